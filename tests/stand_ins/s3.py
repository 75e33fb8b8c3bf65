"""moto's server, which speaks S3. `make s3` installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from tests.requirements import S3

ENDPOINT = "FSSPEC_S3_ENDPOINT_URL"


@contextmanager
def serve_s3(host: str = "127.0.0.1", port: int = 0) -> Iterator[dict[str, str]]:
    """Serve empty buckets. Yields the environment variables of a client. port: 0 takes any free one.

    Skips the test without moto.
    """
    S3.require()
    server = import_module("moto.server").ThreadedMotoServer(host, port, verbose=False)
    server.start()
    try:
        yield {
            ENDPOINT: "http://{}:{}".format(*server.get_host_and_port()),
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.stop()
