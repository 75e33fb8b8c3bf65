"""The policy as a Megatron GPTModel: its layers, and its parameters by their Hugging Face names.

Called by `policy` and by the backend's top-level modules. It imports only `parallel` of this backend.
"""
