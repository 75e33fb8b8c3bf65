"""The trainer: one process per rank, started by the launcher, or in a pod by `rank_processes`.

    main               one rank of a run's trainer
    sft                one rank of a supervised warm-up
    service            gRPC at rank 0
    calls, ranks       the calls that every rank runs, and how rank 0 makes them run
    backend            the protocol of a backend; `megatron_backend` implements it
    losses             the objective, as pure functions
    checkpointing      files: checkpoints, checksums, mirrors, exports
    layout, preflight  checks that need no torch

The trainer makes no scheduling decisions: the coordinator tells it which step to train. A step is idempotent by its
number. The command line and preflight import `checkpointing` and `layout`.
"""
