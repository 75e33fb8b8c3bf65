"""Decides which rollouts start and what a step trains. Pure: no clock, no I/O, no concurrency.

The coordinator acts on these decisions, and the simulator plans with them. Imports only `specrl.errors`.
"""
