"""Converts GGUF files of the families that specrl trains to ordinary model folders.

    header           reads and checks a file's metadata and its table of tensors
    architecture     config.json, and which tensor is which
    tokenizer_files  the tokenizer's files
    conversion       the whole folder

Invariant: a file is checked whole before anything is written: truncated and hostile files, unknown architectures,
metadata that would change what is computed.
"""
