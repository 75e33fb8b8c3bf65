"""Shows a run: status, reports, metrics, live page, sinks and the RLJob's status. No module here makes decisions.

Only `main` imports this package. A run trains the same without it.
"""
