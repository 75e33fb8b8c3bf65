"""Code that runs inside vLLM's own processes: the scheduler (`scheduler_cls`), the worker extension, and patches.

vLLM loads them through `plugin.py`, one folder up, and through the engine's arguments. The front end only imports some
of their names.
"""
