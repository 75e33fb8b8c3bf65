"""A generation replica: a gRPC service (`service`) over an engine (`engine`).

`vllm_backend` has the production engine. `draft_lengths` chooses the number of draft tokens; it is pure and needs no
torch. The launcher or a pod starts the process (`main`).
"""
