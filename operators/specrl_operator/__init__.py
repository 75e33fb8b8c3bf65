"""The operator: turns RLJobs into placed pods. It decides in pure functions and acts in `reconcile.py` alone."""
