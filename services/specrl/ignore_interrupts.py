"""Ignores Ctrl-C in the process that imports it. The fork server of `rewards.workers` imports it first, for that alone.

A forked worker gets the signal handlers that the fork server has after its imports. With Python's own handler of SIGINT,
a worker that was interrupted before pebble's loop began, which ignores it, ended with a traceback. The module is here and
not in `rewards`, whose own imports take seconds.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
