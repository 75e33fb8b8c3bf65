"""Programs that run inside the sandbox, with the standard library alone.

Outside of it only `codec` is imported, and what `tests` and `load_tests` say.
"""
