"""What `make images` writes: layouts that compress a layer once, digests in values, and refusals with a remedy."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from packaging.tags import parse_tag
from tools.images import builders, chart, command, layouts, release, sbom, wheels
from tools.images.command import ImagesFailed

NAME = "docker.io/library/specrl-control:0.1.0"


class Builder:
    """Writes images into a layout as buildah does: a layer whose file is there before compression is left out."""

    def __init__(self, layout: Path) -> None:
        self.layout = layout
        self.compressed: list[bytes] = []

    def push(self, *layers: bytes, name: str = NAME, notes: dict[str, str] | None = None) -> None:
        plain = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
        config = self._add(json.dumps({"architecture": "amd64", "rootfs": {"diff_ids": plain}}).encode())
        described = []
        for layer, digest in zip(layers, plain, strict=True):
            if (place := self.layout / "blobs" / digest.replace(":", "/")).exists():
                described.append({"digest": digest, "size": place.stat().st_size, "mediaType": "plain"})
                continue
            self.compressed.append(layer)
            packed = gzip.compress(layer, mtime=0)
            described.append({"digest": self._add(packed), "size": len(packed), "mediaType": layouts.GZIP})
        manifest = json.dumps({"config": {"digest": config, "size": 9}, "layers": described}).encode()
        entry = {"digest": self._add(manifest), "mediaType": "manifest", "annotations": notes or {layouts.NAME: name}}
        (self.layout / "oci-layout").write_text("{}")
        (self.layout / "index.json").write_text(json.dumps({"manifests": [entry]}))

    def _add(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        place = self.layout / "blobs" / "sha256" / digest
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        return f"sha256:{digest}"


def manifest_of(layout: Path, digest: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((layout / "blobs" / digest.replace(":", "/")).read_text())
    return content


def test_an_image_of_buildkit_is_found_by_its_full_name(tmp_path: Path) -> None:
    """BuildKit annotates an image's tag where buildah annotates its name."""
    builder = Builder(tmp_path / "layout")
    builder.push(b"packages", notes={layouts.NAME: "0.1.0", layouts.BUILDKIT_NAME: NAME})
    assert layouts.read_image(builder.layout, NAME).name == NAME


def test_a_layer_is_compressed_once_and_a_lost_one_again(tmp_path: Path) -> None:
    """Packages are gigabytes: a rebuild after a changed source line compressed them again."""
    builder, target = Builder(tmp_path / "plain"), tmp_path / "layout"
    builder.push(b"packages" * 1000, b"first")
    layouts.move_image(builder.layout, target, NAME)
    first = layouts.read_image(target, NAME)
    assert first.architecture == "amd64"
    assert first.size_bytes < 1000
    builder.compressed.clear()
    builder.push(b"packages" * 1000, b"second")
    assert builder.compressed == [b"second"]
    layouts.move_image(builder.layout, target, NAME)
    second = layouts.read_image(target, NAME)
    assert second.layers[0] == first.layers[0]
    assert second.layers[1] != first.layers[1]
    for layer, content in zip(
        manifest_of(target, second.digest)["layers"], (b"packages" * 1000, b"second"), strict=True
    ):
        blob = target / "blobs" / layer["digest"].replace(":", "/")
        assert gzip.decompress(blob.read_bytes()) == content
        assert layer["size"] == blob.stat().st_size
        assert layer["mediaType"] == layouts.GZIP
    layouts.remove_unused_blobs(target)
    assert not (target / "blobs" / first.layers[1].replace(":", "/")).exists()
    (target / "blobs" / first.layers[0].replace(":", "/")).unlink()
    layouts.forget_lost_layers(builder.layout, target)
    builder.push(b"packages" * 1000, b"second")
    layouts.move_image(builder.layout, target, NAME)
    assert layouts.read_image(target, NAME) == second


def test_a_view_has_one_image_of_a_layout(tmp_path: Path) -> None:
    builder, target = Builder(tmp_path / "plain"), tmp_path / "layout"
    for name in (NAME, "other:1"):
        builder.push(b"layer", name.encode(), name=name)
        layouts.move_image(builder.layout, target, name)
    image = layouts.read_image(target, NAME)
    layouts.make_view(target, image, tmp_path / "view")
    assert layouts.read_image(tmp_path / "view", NAME) == image
    with pytest.raises(KeyError, match=r"must have an image other:1, got \['docker"):
        layouts.read_image(tmp_path / "view", "other:1")


def test_digests_are_written_into_the_charts_values_and_nothing_else_is_changed(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    before = (chart.CHART / "values.yaml").read_text()
    values.write_text(before)
    digests = {target: f"sha256:{number:064x}" for number, target in enumerate(release.TARGETS)}
    release.write_digests(values, digests)
    after = values.read_text()
    changed = [new for old, new in zip(before.splitlines(), after.splitlines(), strict=True) if old != new]
    assert len(changed) == len(digests)
    for target, digest in digests.items():
        assert any(line.startswith(f"  {target}: ") and f'digest: "{digest}"' in line for line in changed)
    values.write_text("images: {}\n")
    with pytest.raises(ImagesFailed, match=r"must have one line `  control: .*got 0"):
        release.write_digests(values, digests)


def test_too_little_disk_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(
        ImagesFailed, match=r"must have 1000000000 GB free, got .* GB; free some space, or name another"
    ):
        command.check_disk(tmp_path, 1e9)


def test_a_program_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImagesFailed, match=r"`false` failed with exit status 1"):
        command.run("false")
    with pytest.raises(ImagesFailed, match=r"`cat /nowhere/none` failed with exit status 1: .*No such file"):
        command.read_output("cat", "/nowhere/none")


def test_what_a_program_writes_is_shown_and_returned(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.run_and_read("sh", "-c", "echo one; echo two >&2") == "one\ntwo\n"
    assert capfd.readouterr().out == "one\ntwo\n"
    with pytest.raises(ImagesFailed, match=r"`false` failed with exit status 1"):
        command.run_and_read("false")


def test_a_second_build_waits_for_the_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It would delete the containers of the first one."""
    entered = threading.Event()

    def build() -> None:
        with command.hold_folder(tmp_path):
            entered.set()

    with command.hold_folder(tmp_path):
        second = threading.Thread(target=build)
        second.start()
        while "waiting for another build" not in capfd.readouterr().out:
            assert second.is_alive()
        assert not entered.is_set()
    second.join()
    assert entered.is_set()


def test_builds_for_other_engines_and_of_other_tags_keep_their_own_layers() -> None:
    inputs = [builders.Inputs({"ENGINES": "cpu"}, tag=tag) for tag in (None, "next")]
    inputs.append(builders.Inputs({"ENGINES": "gpu"}))
    assert [each.key_of("control") for each in inputs] == ["control-cpu", "control-cpu-next", "control-gpu"]


def test_images_that_the_last_builds_did_not_use_are_found() -> None:
    """buildah kept every layer that a lock ever had: 6 GB each."""
    output = (
        "[2/7] STEP 1/2: COPY a b\n--> 3b7eefe33fc\n[2/7] STEP 2/2: RUN true\n"
        f"--> Using cache {'c' * 64}\n--> {'c' * 11}\nSuccessfully tagged one:1\n"
    )
    used = builders.BUILT.findall(output)
    names = {"3b7eefe33fc5": None, "c" * 12: None, "a" * 12: None, "d" * 12: ["one:1"], "b" * 12: ["x/1f-tmp:latest"]}
    images = [{"id": name, "names": those, "created": number} for number, (name, those) in enumerate(names.items())]
    assert builders.find_unused(images, used) == ["b" * 12, "a" * 12]


def write_sbom(file: Path, **packages: str) -> Path:
    """Write what syft writes of packages. A package of Debian has the name of one of Python's."""
    listed = [
        {"name": name, "versionInfo": version, "externalRefs": [{"referenceLocator": f"pkg:pypi/{name}@{version}"}]}
        for name, version in packages.items()
    ]
    debian = {"name": "numpy", "versionInfo": "2.4", "externalRefs": [{"referenceLocator": "pkg:deb/debian/numpy@2.4"}]}
    file.write_text(
        json.dumps({"packages": [*listed, debian, {"name": "image", "versionInfo": "1"}]}), encoding="utf-8"
    )
    return file


def test_a_list_of_packages_must_have_those_of_the_locks(tmp_path: Path) -> None:
    """A list that lacked engines or their environment would look like one of a small image."""
    found = write_sbom(tmp_path / "trainer.spdx.json", torch="2.13.0+cpu", PyYAML="6.0")
    sbom.check_sbom(found, {"torch": "2.13.0", "pyyaml": "6.0"})
    for pins in ({"torch": "2.13.1"}, {"numpy": "2.4"}):
        with pytest.raises(ImagesFailed, match=rf"must list every package .* got none of {next(iter(pins))} "):
            sbom.check_sbom(found, pins)


@pytest.mark.parametrize("engines", ["cpu", "gpu"])
def test_the_locks_of_each_image_are_known(engines: str) -> None:
    control, trainer = sbom.read_pins("control", engines), sbom.read_pins("trainer", engines)
    assert trainer == sbom.read_pins("generation", engines)
    assert {"torch", "megatron-core", "arctic-inference"} <= trainer.keys()
    assert {"kubernetes", "grpcio"} <= control.keys()
    assert not {"hatchling", "uv", "cmake", "torch"} & control.keys()
    assert not {"hatchling", "uv", "cmake"} & trainer.keys()
    assert "+" not in "".join(trainer.values())
    assert sbom.read_pins("store", engines) == {}


WHEEL = "tiny-1.0-cp312-cp312-manylinux_2_28_aarch64.whl"


@pytest.mark.parametrize(
    ("package", "problem"),
    [
        ({"wheels": [(WHEEL, "a")]}, ""),
        ({"wheels": [("tiny-1.0-py3-none-any.whl", "a")]}, ""),
        ({"wheels": [(WHEEL, "b")]}, f"the lock has no hash of {WHEEL}; run `make lock`"),
        ({"wheels": [(WHEEL.replace("aarch64", "x86_64"), "a")]}, "no wheel for this platform among 1"),
        ({"wheels": [(WHEEL.replace("2_28", "2_39"), "a")]}, "no wheel for this platform among 1"),
        ({"wheels": []}, "no wheel for this platform among 0"),
    ],
)
def test_a_package_without_a_wheel_or_its_hash_is_reported(package: dict[str, Any], problem: str) -> None:
    listed = [
        {"url": f"https://files.example.com/{name}", "hashes": {"sha256": digest}} for name, digest in package["wheels"]
    ]
    supported = wheels.platform_tags("aarch64")
    assert parse_tag("cp312-abi3-manylinux2014_aarch64") & supported
    found = wheels._find_wheel("gpu", {"name": "tiny", "wheels": listed}, supported, {"a"})
    assert found.problem == problem
    assert (found.wheel is None) == bool(problem)


def test_the_chart_is_packed_as_registries_keep_charts(tmp_path: Path) -> None:
    config, content = layouts.Blob(chart.CONFIG, b"{}"), layouts.Blob(chart.CONTENT, b"archive")
    digest = layouts.write_artifact(tmp_path / "chart", "0.1.0", config, content)
    manifest = manifest_of(tmp_path / "chart", digest)
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.helm.config.v1+json"
    (layer,) = manifest["layers"]
    assert layer["mediaType"] == "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
    assert (tmp_path / "chart" / "blobs" / layer["digest"].replace(":", "/")).read_bytes() == b"archive"
