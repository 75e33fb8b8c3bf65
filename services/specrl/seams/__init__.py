"""Tracks which versions of vllm, megatron-core and torch specrl supports. Imports none of them.

    versions        refuses to start with an unsupported version
    expected.json   signatures and body hashes of the names that specrl uses, in the versions that the tests run with

tools/seam_table.py lists the names, and `make seams` writes expected.json. requirements/gpu-seams.json has the same
data for the versions in the GPU images (`make check-gpu-pins` writes it). docs/seams.md explains the differences.
"""
