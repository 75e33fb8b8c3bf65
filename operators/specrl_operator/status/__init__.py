"""An RLJob's status and events, built from the plan, the decision and the observed pods. Pure.

`reconcile.py` writes them to the API server.

Imports `plan`, `children` and `api`.
"""
