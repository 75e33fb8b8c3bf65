"""Access to the API server: the Cluster interface, its HTTP client, watches with cache and work queue, leader election.

`main.py` starts them; `reconcile.py` sees the interface alone. Imports `api`.
"""
