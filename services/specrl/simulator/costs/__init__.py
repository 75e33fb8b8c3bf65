"""Seconds and bytes of what a scenario computes, from a roofline of published figures or from a run's calibration.

Called by `simulate`. Imports `scenarios`, and nothing that simulates.
"""
