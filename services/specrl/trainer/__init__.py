"""The trainer service: loss, backends, ranks, gRPC. Rank 0 decides nothing; a step is idempotent by its number."""
