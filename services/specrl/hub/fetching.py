"""Fetches files of a repository into the cache: those that are missing, if the disk has room for them.

Files are fetched one after the other by the calling thread, so that Ctrl-C ends a download at once. Whole files stay,
and the next call goes on with the others. A second thread shows the progress, so that a slow network is not
silent. Two processes that fetch the same file at once wait for each other (huggingface_hub's locks).

Called by `models`, `data_sets` and `folders`.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specrl.errors import FetchFailed
from specrl.hub.client import URI, Listing, fetch_file

SPARE_BYTES = 1 << 30
"""Bytes of the disk that stay free: other programs write to it, too."""

ShowProgress = Callable[[str, int, int], None]
"""Shows (what is done, as in `fetching NAME`, bytes so far, bytes in all). It is called from a thread of its own."""


@dataclass(frozen=True)
class FetchDisplay:
    """Where progress is shown. every_s: seconds between two calls of `show`."""

    show: ShowProgress
    every_s: float


NO_DISPLAY = FetchDisplay(lambda _what, _done, _total: None, 3600.0)


def fetch_files(listing: Listing, files: Sequence[str], display: FetchDisplay = NO_DISPLAY) -> None:
    """Fetch the files that are not in the cache. Raises FetchFailed, before the first byte if the disk is too small."""
    missing = listing.find_missing(list(files))
    if not missing:
        return
    check_room(listing, missing)
    total = sum(listing.sizes[file] for file in missing)
    done = 0

    def add_bytes(count: int) -> None:
        nonlocal done
        done += count

    what = f"fetching {listing.repository.name}"
    with show_regularly(lambda: display.show(what, min(done, total), total), display.every_s):
        finished = 0
        for file in missing:
            fetch_file(listing, file, add_bytes)
            finished += listing.sizes[file]
            done = finished  # another process may have fetched it meanwhile, so that no byte was counted
    if total and display is not NO_DISPLAY:
        display.show(what, total, total)


def check_room(listing: Listing, files: Sequence[str]) -> None:
    """Raise FetchFailed if the cache's disk has no room for these files of the listing that are missing."""
    need = sum(listing.sizes[file] for file in listing.find_missing(list(files)))
    free = measure_free_bytes(listing.cache) - SPARE_BYTES
    if need > max(free, 0) and need > 0:
        repository = listing.repository
        raise FetchFailed(
            f"{repository.field} must fit on the disk of {listing.cache}, got {need / 2**30:.1f} GiB of "
            f"{repository.name} for {max(free, 0) / 2**30:.1f} GiB that are free beside a reserve of 1 GiB; make room, "
            f"or {'use a larger volume' if repository.field == URI else 'set HF_HOME to a folder on another disk'}"
        )


def measure_free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, or of its nearest parent that exists."""
    place = folder.absolute()
    return shutil.disk_usage(next(it for it in (place, *place.parents) if it.exists())).free


@contextmanager
def show_regularly(show: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `show` from another thread every `every_s` seconds, until the block ends."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every_s):  # woken by the end of the block
            show()

    thread = threading.Thread(target=run, name="fetch-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
