"""Predicts what a run would cost on a cluster before you buy it, and which layout is best. Uses no GPU.

    scenarios/      what is simulated: read from a scenario, run file or RLJob; checked; figures of GPUs and models
    costs/          its seconds and bytes: from published figures, or from a run's calibration
    pipeline        steps as discrete events, with the coordinator's own scheduler
    simulate        one scenario with and without speculation -> SimulationResult
    search          the best layout of the same cluster -> LayoutAdvice
    pages/          results as Markdown, HTML, JSON and SVG

Of the services it imports only pure state machines and file formats (`coordinator.schedule.scheduler`,
`formats.calibration`). import-linter checks that nothing else is reached. Needs the extra `plan`. Called by `specrl
simulate` and `specrl plan`.
"""
