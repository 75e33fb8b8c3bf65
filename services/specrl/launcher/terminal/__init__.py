"""Shows a run in a terminal: rows of steps and validations, a live area, and the progress of checks.

Called by `launcher`, `cli` and `report`. It draws what it is given and decides nothing.
"""
