"""Opens the file system of a URL: an object store such as s3://, or a folder. The only module that imports fsspec.

`trainer/checkpointing/mirror.py` copies checkpoints with it, and `hub/object_stores.py` fetches models.
"""

from __future__ import annotations

from typing import Any

import fsspec


def open_file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the URL's path on it.

    Raises ImportError if the library for it is not installed, ValueError for a scheme that fsspec does not know.
    """
    files, path = fsspec.core.url_to_fs(url)
    return files, str(path)
