"""Probes of `specrl doctor` for NVIDIA's driver, the cards, and the links between them.

They ask the kernel's files and `nvidia-smi`. No driver library is loaded, so a broken driver cannot crash the command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from specrl.formats.doctor_report import Finding, FindingState
from specrl.machine import (
    DRIVER_FILE,
    DRIVER_VERSION,
    OLDEST_DRIVER,
    ask_nvidia_smi,
    is_old_driver,
    visible_gpus,
)

_NO_SMI = "not known without nvidia-smi"


def probe_driver() -> Iterator[Finding]:
    """Yield the version of NVIDIA's kernel driver."""
    try:
        found = DRIVER_VERSION.search(DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        yield from _describe_missing_driver()
        return
    if found is None:
        remedy = f"read {DRIVER_FILE} yourself; the packages for GPUs need {OLDEST_DRIVER} or newer"
        yield Finding(name="driver", state=FindingState.WARNING, value="of an unknown version", remedy=remedy)
        return
    yield judge_driver(found[0])


def judge_driver(version: str) -> Finding:
    """Compare a driver's version, such as 580.95.05, with the oldest that CUDA 13 runs on."""
    if not is_old_driver(version):
        return Finding(name="driver", state=FindingState.OK, value=version)
    remedy = f"install driver {OLDEST_DRIVER} or newer: torch and vLLM of specrl[gpu] are built for CUDA 13"
    return Finding(name="driver", state=FindingState.PROBLEM, value=version, remedy=remedy)


def _describe_missing_driver() -> Iterator[Finding]:
    if visible_gpus():
        remedy = "check the driver's installation; in a container, check the NVIDIA container toolkit"
        value = f"GPUs are visible, but there is no {DRIVER_FILE}"
        yield Finding(name="driver", state=FindingState.WARNING, value=value, remedy=remedy)
    else:
        yield Finding(name="driver", state=FindingState.OK, value="none")


def probe_cards() -> Iterator[Finding]:
    """Yield one finding for each card with its memory, or one that says that runs use the CPU."""
    gpus = visible_gpus()
    if not gpus:
        yield Finding(name="GPUs", state=FindingState.OK, value="none; runs on this machine use the CPU")
        return
    yield Finding(name="GPUs", state=FindingState.OK, value=f"{len(gpus)} visible: {', '.join(gpus)}")
    listing = ask_nvidia_smi("--query-gpu=index,name,memory.total,memory.used", "--format=csv,noheader,nounits")
    if listing is None:
        remedy = "install nvidia-smi, which comes with the driver, to see the cards and their memory"
        yield Finding(name="cards", state=FindingState.WARNING, value=_NO_SMI, remedy=remedy)
        return
    yield from read_cards(listing)


def read_cards(listing: str) -> Iterator[Finding]:
    """Yield one finding for each line of nvidia-smi: `index, name, MiB, used MiB`."""
    for line in listing.splitlines():
        index, name, total, used = (part.strip() for part in line.split(","))
        # The driver itself keeps some hundred MiB; vLLM refuses to start if a tenth of a card is taken.
        is_taken = used.isdigit() and total.isdigit() and int(used) * 10 > int(total)
        yield Finding(
            name=f"GPU {index}",
            state=FindingState.WARNING if is_taken else FindingState.OK,
            value=f"{name}, {total} MiB, {used} MiB of them in use",
            remedy="another process uses this card; end it, or leave the card out by CUDA_VISIBLE_DEVICES"
            if is_taken
            else "",
        )


def probe_links() -> Iterator[Finding]:
    """Yield how the cards are connected, if there are several."""
    if len(visible_gpus()) < 2:
        return
    topology = ask_nvidia_smi("topo", "-m")
    if topology is None:
        yield Finding(name="GPU links", state=FindingState.OK, value=_NO_SMI)
        return
    for name, kinds in read_links(topology):
        yield Finding(name=f"{name} links", state=FindingState.OK, value=kinds)


def read_links(topology: str) -> Iterator[tuple[str, str]]:
    """Yield each card's row of `nvidia-smi topo -m`: its name, and its links to the other cards (NV18, PIX, SYS)."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in topology.splitlines()]
    header = next((words for words in lines if words and words[0] == "GPU0"), [])
    cards = [word for word in header if re.fullmatch(r"GPU\d+", word)]
    for words in lines:
        if words is not header and words and words[0] in cards:
            links = zip(cards, words[1 : 1 + len(cards)], strict=False)
            yield words[0], ", ".join(f"{other} {kind}" for other, kind in links if other != words[0])
