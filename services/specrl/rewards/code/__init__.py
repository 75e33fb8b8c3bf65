"""Verifier `code`: answers that are programs, judged by tests in a sandbox of the operating system."""

from specrl.rewards.code.verifier import Code

__all__ = ["Code"]
