"""A run as a Kubernetes object: its manifest, its status, and the CustomResourceDefinition of both.

`load`, the operator, the coordinator and the command line call it. It imports the sections and their rules alone.
"""
