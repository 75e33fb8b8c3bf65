"""Fetches models and data sets by their names on the Hugging Face Hub into Hugging Face's cache.

    client     requests and downloads, by huggingface_hub; the only module that imports it
    fetching   which files are missing, room on the disk, progress
    models     the files of a model that are fetched
    data_sets  the files of a data set's split
    run_sources  what a run file names: fetched, and put into the run file as folders and files
    object_stores  a folder of an object store, such as s3://
    folders    what a URI names, fetched into a folder: by an init container of a pod

Invariants: no code of a repository is run, and none is fetched. A commit is resolved once; every process of a run reads
the same files. Called by preflight and by `specrl fetch`, `init` and `sft`, before any process of a run starts.
"""

from specrl.hub.run_sources import FetchedSource, fetch_run_sources, read_sources, write_sources

__all__ = ["FetchedSource", "fetch_run_sources", "read_sources", "write_sources"]
