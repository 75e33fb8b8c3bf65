"""Verifiers that compare the final answer as text: `exact`, `regex` and `jsonSchema`.

`choice` builds the one that the run file names.
"""
