"""Cross-field rules: those of every run, and those of RLJobs alone.

`load` checks their Python form, and `rljob/crd` writes their CEL form into the CRD. Imports the sections alone.
"""
