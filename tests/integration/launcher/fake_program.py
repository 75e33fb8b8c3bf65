"""A program for the supervisor's tests. It records what happens to it in the file EVENTS.

    python fake_program.py NAME [--exit CODE] [--say TEXT] [--ignore-term] [--slow-stop S] [--child] [--serve PORT]

Events, one per line: `NAME started PID [child PID]`, `NAME told to stop`, `NAME stopped`. With --serve it answers
/status with the file STATUS, like a coordinator, and records what it is asked to do, and the step that it answers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

EVENTS = Path(os.environ["FAKE_EVENTS"])
STATUS = Path(os.environ.get("FAKE_STATUS", "/none"))


def tell(text: str) -> None:
    with EVENTS.open("a", encoding="utf-8") as events:
        events.write(text + "\n")


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        content = STATUS.read_bytes() if path == "/status" or self.command == "PUT" else b"[]"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)
        if path == "/status" and (step := json.loads(content).get("step")) is not None:
            tell(f"coordinator is at step {step}")

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        tell(f"coordinator got PUT {self.path} {body}")
        self.do_GET()

    def log_message(self, *_: object) -> None:
        return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--exit", type=int)
    parser.add_argument("--say", default="")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--slow-stop", type=float, default=0.0)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--serve", type=int)
    told = parser.parse_args()

    def stop(*_: object) -> None:
        tell(f"{told.name} told to stop")
        if told.ignore_term:
            return
        time.sleep(told.slow_stop)
        tell(f"{told.name} stopped")
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    child = f" child {subprocess.Popen(['sleep', '600']).pid}" if told.child else ""
    tell(f"{told.name} started {os.getpid()}{child}")
    if told.say:
        sys.stderr.write(told.say + "\n")
    if told.exit is not None:
        sys.exit(told.exit)
    if told.serve is not None:
        threading.Thread(target=HTTPServer(("127.0.0.1", told.serve), Answer).serve_forever, daemon=True).start()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
