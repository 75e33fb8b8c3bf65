"""The command line of `make images` and `make chart`.

python -m tools.images build --engines cpu       build control, generation and trainer for this machine's architecture
python -m tools.images check-wheels              say whether the other architecture has all wheels; builds nothing
python -m tools.images chart                     pack the chart
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

from tools.images.chart import CHART, pack_chart
from tools.images.command import ImagesFailed, say
from tools.images.release import TARGETS, build_images, cache_folder
from tools.images.wheels import LOCKS, resolve_locks

OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}


def main() -> int:
    """Run a command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.images", description="Builds specrl's images.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build all images for this machine's architecture")
    build.add_argument("--values", type=Path, default=CHART / "values.yaml", help="gets the digests (%(default)s)")
    build.add_argument("--only", choices=TARGETS, help="build one image alone; the others' digests stay as they are")
    build.add_argument("--tag", help="of the images, which stay beside those of the version (default: the version)")
    build.add_argument("--no-sbom", action="store_true", help="do not list the packages of the images")
    check = commands.add_parser("check-wheels", help="say whether all packages have wheels for an architecture")
    check.add_argument("--machine", choices=OTHER, default=OTHER.get(platform.machine()), help="(%(default)s)")
    for command in (build, check):
        command.add_argument("--engines", choices=LOCKS, default="gpu", help="(%(default)s)")
    commands.add_parser("chart", help="pack the chart into an OCI layout")
    arguments = parser.parse_args()
    try:
        if arguments.command == "build":
            targets = TARGETS if arguments.only is None else (arguments.only,)
            build_images(
                arguments.engines,
                arguments.values,
                targets=targets,
                tag=arguments.tag,
                has_sbom=not arguments.no_sbom,
            )
        elif arguments.command == "chart":
            pack_chart(cache_folder())
        else:
            return check_wheels(arguments.engines, arguments.machine)
    except (ImagesFailed, OSError) as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nimages: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


def check_wheels(engines: str, machine: str) -> int:
    """Print what each lock resolves to, and each package that cannot be installed. Returns the exit status."""
    found = resolve_locks(engines, machine)
    for lock in LOCKS[engines]:
        packages = [each for each in found if each.lock == lock]
        wheels = [each for each in packages if each.wheel is not None]
        say(f"{lock}.lock: {len(packages)} packages, {len(wheels)} with a wheel for {machine} and its hash")
        for each in packages:
            if each.wheel is None:
                say(f"  {each.package}: {each.problem or 'compiled from source, whose hash the lock has'}")
    return 1 if any(each.problem for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
