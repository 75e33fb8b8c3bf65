"""The desired state of a job: a `JobPlan` from its spec and the cluster, a `Decision` from the plan and its pods.

Pure. `reconcile.py` makes one of each per reconciliation; `children` and `status` are built from them. Imports
`observed` and `api`.
"""
