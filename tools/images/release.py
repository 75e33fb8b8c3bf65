"""Builds all images, and writes their digests into the chart's values."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tools.images.builders import Inputs, choose_builder
from tools.images.command import ROOT, ImagesFailed, check_disk, hold_folder, read_output, run, say, step
from tools.images.layouts import Image, read_image, remove_unused_blobs
from tools.images.sbom import check_sbom, find_syft, read_pins, write_sbom

TARGETS = ("control", "generation", "trainer")
NEEDED_GB = {"cpu": 30.0, "gpu": 55.0}  # store, layout and intermediate copies
NEEDED_FOR_CONTROL_GB = 5.0
STORE = "docker.io/valkey/valkey:8.1-alpine"  # images.store of values.yaml
CONTEXT = ("pyproject.toml", "README.md", "LICENSE", "requirements", "tools", "services", "operators", "examples")
"""What images are made of, beside deploy/docker. The digests that are written into the chart do not count."""


def cache_folder() -> Path:
    """Where images are kept: below $SPECRL_CACHE_DIR, outside of the repository."""
    named = os.environ.get("SPECRL_CACHE_DIR")
    base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specrl"
    return base / "images"


def build_images(
    engines: str, values: Path, *, targets: Sequence[str] = TARGETS, tag: str | None = None, has_sbom: bool
) -> None:
    """Build images for the architecture of this machine, and write what was built. Raises ImagesFailed.

    values: file whose images.*.digest are set. tag: of the images, which then stay beside those of the version; None:
    the version. has_sbom: also list the packages of each image.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    version, commit = read_version(), read_commit()
    what = engines if len(targets) > 1 else f"{targets[0]}-{engines}"
    record = folder / (f"{what}-{tag}.json" if tag else f"{what}.json")
    needed_gb = NEEDED_GB[engines] if set(targets) - {"control"} else NEEDED_FOR_CONTROL_GB
    check_disk(folder, needed_gb / 3 if (folder / f"{what}.json").is_file() else needed_gb)
    with hold_folder(folder), closing(choose_builder(folder)) as builder:
        contexts = {"demo-policy": make_demo_policy(folder)} if engines == "cpu" else {}
        inputs = Inputs({"ENGINES": engines, "VERSION": version, "COMMIT": commit}, contexts, tag)
        built: dict[str, tuple[Path, Image]] = {}
        for number, target in enumerate(targets, start=1):
            name = f"docker.io/library/specrl-{target}:{tag or version}"
            with step(f"building {target} for {engines.upper()}s, {number} of {len(targets)}"):
                layout = builder.build_image(target, name, inputs)
            built[target] = layout, read_image(layout, name)
        if (layout_of_store := builder.export_store(STORE)) is not None:
            built["store"] = layout_of_store, read_image(layout_of_store, STORE)
        for layout in {layout for layout, _ in built.values()}:
            remove_unused_blobs(layout)
        builder.remove_unused()
        described = {target: describe_image(layout, image) for target, (layout, image) in built.items()}
        content = {"version": version, "commit": commit, "engines": engines, "images": described}
        record.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        write_digests(values, {target: built[target][1].digest for target in targets})
        for target, (_, image) in built.items():
            say(f"{target:10} {image.size_bytes / 1e6:6.0f} MB as pulled  {image.architecture}  {image.digest}")
        say(f"digests are in {os.path.relpath(values)}, everything else in {record}")
        if has_sbom:  # last: whatever syft does, the images are there
            write_sboms(folder, inputs, built)


def write_sboms(folder: Path, inputs: Inputs, built: Mapping[str, tuple[Path, Image]]) -> None:
    """Write a list of the packages of each image, and check it. built: layout and image by target."""
    syft = find_syft(folder)
    for target, (layout, image) in built.items():
        sbom = folder / f"{inputs.key_of(target)}.spdx.json"
        with step(f"listing the packages of {target}"):
            write_sbom(syft, layout, image, sbom)
        if pins := read_pins(target, inputs.arguments["ENGINES"]):
            check_sbom(sbom, pins | {"specrl": inputs.arguments["VERSION"]})


def describe_image(layout: Path, image: Image) -> dict[str, Any]:
    """What the record says of an image."""
    return {
        "name": image.name,
        "digest": image.digest,
        "layout": str(layout),
        "architecture": image.architecture,
        "sizeBytes": image.size_bytes,
    }


def read_version() -> str:
    """The version in pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def read_commit() -> str:
    """The commit of the checkout, with `, modified` if what images are made of differs from it."""
    try:
        commit = read_output("git", "-C", ROOT, "rev-parse", "--short=12", "HEAD")
        changes = read_output("git", "-C", ROOT, "status", "--porcelain", "--", *CONTEXT, "deploy/docker")
    except (ImagesFailed, OSError):
        return "unknown"
    return f"{commit}, modified" if changes else commit


def make_demo_policy(folder: Path) -> Path:
    """The tiny policy of examples/rljob-local.yaml, as a folder that has it as `demo-policy`.

    Made once for each version of the program that makes it, since every layer above it would change with it.
    """
    demo = ROOT / "examples" / "demo"
    sources = [demo / "make_policy.py", demo / "run.yaml", ROOT / "requirements" / "cpu-runtime.lock"]
    key = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    place = folder / f"policy-{key}"
    if not (place / "demo-policy").is_dir():
        with step("making the demo's policy"), tempfile.TemporaryDirectory(dir=folder) as scratch:
            run(sys.executable, demo / "make_policy.py", "--plain", "--out", Path(scratch) / "demo-policy")
            # safetensors writes files that only their owner may read. Pods have another uid.
            run("chmod", "-R", "a+rX", Path(scratch) / "demo-policy")
            place.mkdir(exist_ok=True)
            (Path(scratch) / "demo-policy").rename(place / "demo-policy")
    return place


def write_digests(values: Path, digests: Mapping[str, str]) -> None:
    """Set images.*.digest in a file of values, which stays as it is otherwise. Raises ImagesFailed."""
    text = values.read_text(encoding="utf-8")
    for target, digest in digests.items():
        pattern = rf'(?m)^(  {target}: \{{repository: [^,]+, tag: [^,]+, digest: )"[^"]*"'
        text, count = re.subn(pattern, rf'\g<1>"{digest}"', text)
        if count != 1:
            raise ImagesFailed(
                f"{values} must have one line `  {target}: {{repository: ..., digest: ...}}`, got {count}"
            )
    values.write_text(text, encoding="utf-8")
