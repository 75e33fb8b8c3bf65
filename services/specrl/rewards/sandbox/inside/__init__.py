"""Programs that run inside the sandbox, with the standard library alone.

Outside of it only `codec` is imported, and the exit statuses of `tests`.
"""
