"""Runs the probes of `specrl doctor` one after another, and turns a probe that raises into a finding.

    software      versions, extras
    gpus          driver, cards, links between them
    surroundings  memory, limits, folders, ports, sandbox
    run_file      the store, and the rules of a run file that the user names

A probe is a function that yields findings. It takes seconds at most: it imports no engine, and bounds every program
that it starts. Called by `specrl doctor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from specrl.errors import SpecrlError, first_line
from specrl.formats.doctor_report import DoctorReport, Finding, FindingState
from specrl.launcher.doctor import gpus, run_file, software, surroundings

Probe = Callable[[], Iterable[Finding]]


def list_probes(runs: Path, file: Path | None) -> list[tuple[str, Probe]]:
    """Return every probe with the name under which it reports its own failure. runs: the folder of runs."""
    return [
        ("specrl", software.probe_installation),
        ("engines", software.probe_engines),
        ("CUDA runtime", software.probe_cuda_runtime),
        ("extras", software.probe_extras),
        ("driver", gpus.probe_driver),
        ("GPUs", gpus.probe_cards),
        ("GPU links", gpus.probe_links),
        ("machine", surroundings.probe_machine),
        ("locked memory", surroundings.probe_locked_memory),
        ("shared memory", surroundings.probe_shared_memory),
        ("disk", partial(surroundings.probe_disk, runs)),
        ("sockets", surroundings.probe_sockets),
        ("ports", surroundings.probe_ports),
        ("sandbox", surroundings.probe_sandbox),
        ("run file", partial(run_file.probe_run_file, file)),
    ]


def examine(probes: Sequence[tuple[str, Probe]]) -> DoctorReport:
    """Run the probes in order. A probe that raises adds a finding: the examination never fails as a whole."""
    findings: list[Finding] = []
    for name, probe in probes:
        try:
            # One by one, so that what a probe found before it failed is kept.
            for finding in probe():
                findings.append(finding)  # noqa: PERF402
        except SpecrlError as error:
            findings.append(Finding(name=name, state=FindingState.PROBLEM, value=str(error), remedy="see the message"))
        except Exception as error:  # noqa: BLE001 - the edge of a probe
            value = f"could not be examined: {type(error).__name__}: {first_line(error)}"
            remedy = "report this as a bug, with the whole output"
            findings.append(Finding(name=name, state=FindingState.WARNING, value=value, remedy=remedy))
    return DoctorReport(findings=findings)
