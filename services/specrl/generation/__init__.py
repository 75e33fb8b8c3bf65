"""A generation replica: a gRPC service (`service`) over an engine (`engine`).

`vllm_backend` has the production engine. `draft_length` and `cost_calibration` choose the number of draft tokens; they
are pure and need no torch. The launcher or a pod starts the process (`main`).
"""
