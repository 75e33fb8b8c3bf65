"""The Kubernetes operator of RLJobs. Pure functions decide; only `reconcile.py` writes to the cluster.

Read `reconcile.py` first, then `plan/job_plan.py` and `plan/decision.py`.
"""
