"""`python -m tests.e2e.kubelet --kubeconfig FILE --folder FOLDER`: run the kubelet of all our nodes until SIGTERM.

It creates FOLDER/ready when it watches. Logs are in FOLDER/logs/NAMESPACE/POD/CONTAINER.RESTARTS.log.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse
from tests.e2e.harness.network import PodNetwork
from tests.e2e.kubelet.client import Client
from tests.e2e.kubelet.kubelet import ImageMap, Kubelet, until_ready

from specrl.launcher.processes.ports import find_free_port


def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--network", type=int, required=True, help="N of the pods' addresses, 10.N.0.0/16")
    parser.add_argument("--entrypoints", type=json.loads, default={}, help="JSON: part of an image's name to a command")
    parser.add_argument("--keep", type=Path, action="append", default=[], help="a folder that every image has")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.folder
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    port = find_free_port()
    network = PodNetwork(arguments.network)
    images = ImageMap(arguments.entrypoints, tuple(arguments.keep))
    kubelet = Kubelet(Client(arguments.kubeconfig), folder, network, images, port)
    await until_ready(kubelet.client)
    server = _log_server(kubelet, folder, port)
    serving = asyncio.create_task(server.serve())
    (folder / "ready").touch()
    await kubelet.run(stop)
    server.should_exit = True
    await serving


def _log_server(kubelet: Kubelet, folder: Path, port: int) -> uvicorn.Server:
    """The kubelet's endpoint that the API server calls for `kubectl logs`, over TLS with an unverified certificate."""
    key = folder / "kubelet.key"
    certificate = folder / "kubelet.crt"
    command = [*("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=kubelet", "-days", "2")]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    app = FastAPI()

    @app.get("/containerLogs/{namespace}/{pod}/{container}")
    def logs(namespace: str, pod: str, container: str) -> Response:
        file = kubelet.log_file(namespace, pod, container)
        if file is None:
            return PlainTextResponse(f"container {container} has not started\n", status_code=404)
        return PlainTextResponse(file.read_bytes())

    server = uvicorn.Server(
        uvicorn.Config(
            app,
            kubelet.network.gateway,
            port,
            ssl_keyfile=key,
            ssl_certfile=str(certificate),
            log_config=None,
            lifespan="off",
            access_log=False,
        )
    )
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]  # uvicorn must not handle signals; main does
    return server


if __name__ == "__main__":
    main()
