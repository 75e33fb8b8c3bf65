"""Ignores Ctrl-C in the process that imports it. The fork server of `rewards.workers` imports it first, for that alone.

A forked worker gets the signal handlers that the fork server has after its imports. pebble's loop ignores SIGINT; a
worker that was interrupted before that loop began ended with a traceback of Python's own handler. The module is here
and not in `rewards`, whose own imports take seconds.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
