"""Checks before a run starts: the verifier can use every reference, and it grades made-up completions.

Called by `coordinator/rollouts/checked_prompts.py` and by `specrl rewards grade`. Results are cached for the next
start.
"""
