"""What specrl takes from vllm, megatron and torch without a promise of theirs, and in which versions it was read.

    table           every such name, what is done with it, and where
    versions        refuses at start a version in which the names were not read
    expected.json   their signatures and bodies in the versions that the tests run with (`make seams`)

requirements/gpu-seams.json holds the same of the versions that images for GPUs get (`make check-gpu-pins`).
docs/seams.md explains the differences. Imports none of the three.
"""
