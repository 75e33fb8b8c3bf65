"""Process groups of the ranks (Megatron's `parallel_state`), and the exchange of JSON objects over them.

All other packages of this backend use it.
"""
