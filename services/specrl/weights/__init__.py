"""Transfers a policy version from the trainer to the replicas: process groups, buckets, checksums.

`stream` sends a version over a process group (`group`), `files` through a shared folder. Both ends keep to the
`WeightManifest`. A replica receives into a `StagingArea`, and `arrival` tells its engine when. Called by the trainer's
backend and by the engines.
"""
