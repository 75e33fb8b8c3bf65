"""The Kubernetes objects that a job needs, built from its plan. Pure.

`reconcile.py` applies and deletes them. Imports `plan` and `api`.
"""
