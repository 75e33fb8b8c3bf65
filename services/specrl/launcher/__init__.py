"""Runs training on one machine: it plays the role of the Kubernetes operator, with processes instead of pods.

The command line calls it. The launcher decides which processes live, and the coordinator decides what they do. The
launcher reads the order of steps, policy versions and progress from the coordinator's REST API, like any other client.
"""
