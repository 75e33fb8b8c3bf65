"""The formats that other programs read: step reports, status, calibration; and pure functions over them.

The coordinator writes them. The command line, the launcher, `specrl report` and the simulator read them. This package
imports nothing that acts.
"""
