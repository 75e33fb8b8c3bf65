"""Fast kernels of the policy that only CUDA has, each beside the reference that it must agree with.

    choice            which kernels this card may use
    guard             compares a kernel with its reference in the first micro-batch
    varlen_attention  attention of all packed sequences in one call
    fused_swiglu      SwiGLU as one compiled function

`model/gpt_model.py` puts them into the policy. Docs: docs/decisions/0060.
"""
