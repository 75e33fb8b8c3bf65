"""Ignores Ctrl-C in the process that imports this module. The fork server of `rewards.workers` imports it first.

Forked workers inherit the fork server's signal handlers. pebble's worker loop ignores SIGINT, too, but only once it has
begun: a worker that was interrupted before printed a traceback. This module is not in `rewards`, because importing that
package takes seconds, during which Ctrl-C would still end the fork server.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
