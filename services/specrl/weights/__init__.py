"""Weights on their way from the trainer to the replicas: process groups, buckets, checksums."""
