"""Plan before you buy: what a run would cost on a cluster, and which layout of it is best. Nothing here touches a GPU.

    scenario        what is simulated: model, cluster, layout, workload, schedule, speculation, efficiency
    hardware, models                published figures of GPUs; shapes of models
    acceptance, lengths             what a draft brings; how long rollouts are
    roofline, measured              seconds of one engine step: from published figures, or from a run's calibration
    memory          does it fit
    costs, pace     what is asked of either; seconds for a token by live batch and context
    drain           one step's batch, from its first token to its last rollout
    pipeline        steps as discrete events, with the coordinator's own scheduler
    from_run        a run file or RLJob as a scenario
    simulate        one scenario with and without speculation -> Outcome
    search          the best layout of the same cluster -> Advice
    pages, figures, maps            Markdown, HTML, JSON; SVG and the numbers in it

Imports of the services: their pure state machines and file formats alone (`coordinator.scheduler`, `order`,
`calibration`, `report`); that nothing else is reached is checked by import-linter. Needs the extra `plan`.
"""
