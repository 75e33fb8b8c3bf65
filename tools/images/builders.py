"""The two programs that build images: docker buildx, and buildah with runc where no Docker runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tools.images.base import LocalBases
from tools.images.command import ROOT, ImagesFailed, has_succeeded, read_output, run, run_and_read, say, step
from tools.images.layouts import forget_lost_layers, move_image

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
REGISTRY = "https://registry-1.docker.io/v2/"
PROBE_TIMEOUT_S = 10
BUILT = re.compile(r"^--> (?:Using cache )?([0-9a-f]{11,64})$", re.MULTILINE)
"""How buildah names the image of each instruction, made or found."""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")  # of Debian and its relatives


@dataclass(frozen=True)
class Inputs:
    """What a build is given beside the checkout: arguments of the Dockerfile, and folders in place of stages."""

    arguments: Mapping[str, str]
    contexts: Mapping[str, Path] = field(default_factory=dict)
    tag: str | None = None
    """Tag of images that are kept beside those of the version; None: the version's."""

    def key_of(self, target: str) -> str:
        """Name of what is kept of a target. Images for CPUs, for GPUs and of other tags do not displace each other."""
        return "-".join([target, self.arguments["ENGINES"], *([self.tag] if self.tag else [])])

    def list_options(self) -> list[str]:
        """Options that docker buildx and buildah have in common."""
        arguments = [f"--build-arg={name}={value}" for name, value in self.arguments.items()]
        contexts = [f"--build-context={name}={folder}" for name, folder in self.contexts.items()]
        return ["--file", str(DOCKERFILE), *arguments, *contexts]


class Builder(Protocol):
    """Builds targets of the Dockerfile into OCI layouts."""

    def build_image(self, target: str, name: str, inputs: Inputs) -> Path:
        """Build a target. Returns the layout that has it under this name. Raises ImagesFailed."""

    def export_store(self, name: str) -> Path | None:
        """Make a stand-in for the store's image where it cannot be pulled. Returns the layout that has it."""

    def remove_unused(self) -> None:
        """Delete what earlier builds needed and the last one did not."""

    def close(self) -> None:
        """Leave nothing on the machine but files."""


class Docker:
    """`docker buildx`: a layout for each image below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build_image(self, target: str, name: str, inputs: Inputs) -> Path:
        layout = self._folder / inputs.key_of(target)
        output = f"--output=type=oci,tar=false,dest={layout},name={name}"
        # With provenance, the layout's entry would be an index of the image and its attestation.
        options = ("--target", target, "--provenance=false")
        run("docker", "buildx", "build", *options, *inputs.list_options(), output, ROOT)
        return layout

    def export_store(self, name: str) -> Path | None:
        return None

    def remove_unused(self) -> None:
        """Docker collects what is old by itself."""

    def close(self) -> None:
        pass


class Buildah:
    """buildah with its store below `folder`, and one layout for all images: what they share is there once.

    runc, not crun: Debian's crun 1.8.1 refuses cgroups in hybrid mode. RUN lines use the network of the machine, and
    trust the certificates that it trusts; neither is in a layer. uv's cache of this machine is used, if it has one.
    """

    def __init__(self, folder: Path) -> None:
        self._layout = folder / "layout"
        self._layers = folder / "layers"
        self._used = folder / "used"
        self._store = folder / "store"
        self._command = ["buildah", "--root", str(self._store), "--runroot", str(folder / "run")]
        self._pip = folder / "pip.conf"
        self._pip.write_text(f"[global]\ncert = {CERTIFICATES}\n", encoding="utf-8")
        self._base: LocalBases | None = None
        if not can_reach(REGISTRY):
            say(f"{REGISTRY} does not answer; building on a base made on this machine")
            self._base = LocalBases(self._command)
            self._base.make_missing(folder)

    def build_image(self, target: str, name: str, inputs: Inputs) -> Path:
        mounts = []
        if CERTIFICATES.is_file():
            mounts += [f"--volume={CERTIFICATES.parent}:{CERTIFICATES.parent}:ro"]
            mounts += [f"--volume={self._pip}:/etc/pip.conf:ro"]
        if (cache := Path.home() / ".cache" / "uv").is_dir():
            mounts.append(f"--volume={cache}:/tmp/.cache/uv")
        base = [] if self._base is None else [f"--build-arg=BASE={self._base.base}"]
        output = run_and_read(
            *(*self._command, "build", "--layers", "--network=host", "--isolation=oci", "--runtime=runc"),
            *(f"--ignorefile={DOCKERFILE}.dockerignore", *mounts, "--target", target),
            *(*inputs.list_options(), *base, "--tag", name, str(ROOT)),
        )
        self._used.mkdir(exist_ok=True)
        (self._used / inputs.key_of(target)).write_text("\n".join(BUILT.findall(output)), encoding="utf-8")
        return self._export(name, name)

    def export_store(self, name: str) -> Path | None:
        return None if self._base is None else self._export(self._base.store, name)

    def remove_unused(self) -> None:
        """Delete images that the last build of no target used.

        `buildah rmi --prune` would also delete the stages that are copied from, which no image is built on.
        """
        with step("deleting what earlier builds needed"):
            self._remove_containers()
            images = json.loads(read_output(*self._command, "images", "--all", "--json"))
            used = [each for file in self._used.iterdir() for each in file.read_text(encoding="utf-8").split()]
            if unused := find_unused(images, used):
                # Not checked: it fails for parents, which have gone with their children.
                subprocess.run([*self._command, "rmi", "--force", *unused], check=False, capture_output=True)

    def close(self) -> None:
        """Remove the containers that buildah leaves behind, and its mount, which would hold the folder."""
        self._remove_containers()
        has_succeeded("umount", str(self._store / "overlay"))

    def _remove_containers(self) -> None:
        read_output(*self._command, "rm", "--all")

    def _export(self, image: str, name: str) -> Path:
        with step(f"compressing what is new in {name}"):
            forget_lost_layers(self._layers, self._layout)
            run(*self._command, "push", "--quiet", "--format=oci", image, f"oci:{self._layers}:{name}")
            move_image(self._layers, self._layout, name)
        return self._layout


def find_unused(images: Sequence[Mapping[str, Any]], used: Collection[str]) -> list[str]:
    """Return the ids of images of buildah's store that no build used, the newest first.

    images: as `buildah images --json` lists them. used: ids, or beginnings of ids, of those that are to stay.
    """
    left = [
        image
        for image in images
        if not any(image["id"].startswith(each[:11]) for each in used)
        # A build that was interrupted leaves a name of its own.
        and all(name.endswith("-tmp:latest") for name in image["names"] or ())
    ]
    return [image["id"] for image in sorted(left, key=lambda image: image["created"], reverse=True)]


def choose_builder(folder: Path) -> Builder:
    """The program of this machine. Raises ImagesFailed if it has none."""
    if has_succeeded("docker", "info") and has_succeeded("docker", "buildx", "version"):
        return Docker(folder)
    missing = [name for name in ("buildah", "runc") if shutil.which(name) is None]
    if missing:
        raise ImagesFailed(
            f"a running Docker with buildx, or buildah and runc, must be installed, got no {' and no '.join(missing)}; "
            "on Debian: apt-get install --no-install-recommends buildah runc debootstrap"
        )
    return Buildah(folder)


def can_reach(url: str) -> bool:
    """Whether a server can_reach, be it with a refusal."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S):  # noqa: S310 - a constant https address
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
