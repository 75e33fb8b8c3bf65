"""Runs untrusted programs, confined by the operating system. docs/decisions/0008 says why verdicts cannot be forged."""
