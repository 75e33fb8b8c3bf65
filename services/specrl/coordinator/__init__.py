"""Runs one training run: decides what is generated, trained and published, and in which order.

Start with `loop.py`. `schedule` decides, `rollouts` and `members` act, `ledger` stores, `observe` shows, `requests`
serves users and kubelets. Only `main` imports `observe`, so a run does not depend on who watches it.
"""
