"""The HTTP requests that act on a run or probe it: pause, resume, scale, checkpoint, health; and who may send them.

Calls `controls`. Never imports `observe`.
"""
