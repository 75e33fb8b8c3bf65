"""Drafters: EAGLE-3 heads, native heads and draft models, and their training on the policy's own rollouts.

Called by the trainer, by generation replicas at their start, by preflight and by `specrl drafter`. Imports no megatron.
"""
