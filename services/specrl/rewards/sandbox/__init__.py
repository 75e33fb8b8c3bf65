"""Untrusted programs, confined by the operating system. What keeps a verdict unforgeable is docs/decisions/0008."""
