"""The sharded policy with its optimizer: micro-batches as tensors, their pipeline schedule, masters and moments.

Called by `training` and by the backend's top-level modules. It imports only `model` and `parallel` of this backend.
"""
