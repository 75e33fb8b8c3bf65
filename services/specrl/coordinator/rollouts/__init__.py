"""Samples and grades rollouts: for training steps, validations, canaries and the initialisation of a drafter.

`pipeline` runs the rollouts of training steps. `side_rollouts` runs all others.
"""
