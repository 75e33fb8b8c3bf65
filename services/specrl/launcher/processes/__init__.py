"""Starts, restarts and stops a run's processes on this machine: their commands, environments, GPUs and ports.

Called by `launcher.local_run`, which decides when, and by `preflight`, which chooses the ports. Imports nothing from
`launcher.terminal`.
"""
