"""The models of a rank and their training: policy steps, supervised steps, the drafter, log-probabilities.

Called by `backend.py`, `checkpoint.py` and `weight_sender.py`. Of this backend it imports `policy`, `model` and
`parallel`.
"""
