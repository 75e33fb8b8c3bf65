"""A smaller language model that drafts (`generation.speculation.draftModel`), trained on the policy's own rollouts.

`kind.py` is read before torch is imported; `model.py` has the model, which transformers computes.
"""
