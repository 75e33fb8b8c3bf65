"""Scenarios: their fields and rules, how they are read from a file or a run file; known GPUs, models and lengths.

Called by `cli` and by the rest of the simulator. Imports nothing that simulates.
"""
