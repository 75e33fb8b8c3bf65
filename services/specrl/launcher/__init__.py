"""Runs on one machine: what the operator does in a cluster, with processes instead of pods.

Called by the command line alone. The launcher decides which processes live, never what they do: order, versions and
progress are the coordinator's, and the launcher reads them from it like any other spectator.
"""
