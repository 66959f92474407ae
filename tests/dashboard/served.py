"""A dashboard as its user starts it, and plain HTTP for asking it."""

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 60.0


class Served:
    """One `python -m relight.dashboard`."""

    def __init__(self, run_dir: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "relight.dashboard", "--run-dir", str(run_dir), "--address", f"{host}:{port}"],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "dashboard at http://" in line, f"it said {line!r}"
        self.url = line.split(" at ")[1].strip()
        self.port = int(self.url.split("/")[2].rsplit(":", 1)[1])
        self.token = self.url.partition("#token=")[2]

    def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> tuple[int, Any, bytes]:
        """Status, headers and body of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_SECONDS)
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    @contextmanager
    def events(self, last: str = "", token: str = "") -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
        """Ids and values of the events, as they come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_SECONDS)
        headers = {"Last-Event-ID": last} if last else {}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        connection.request("GET", "/api/events", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 200

        def read() -> Iterator[tuple[str, dict[str, Any]]]:
            name = ""
            while line := answer.readline():
                if line.startswith(b"id: "):
                    name = line[4:].decode().strip()
                elif line.startswith(b"data: "):
                    yield name, json.loads(line[6:])

        try:
            yield read()
        finally:
            connection.close()

    def wait_for_version(self, version: int, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        """Until the page would say that this version is there."""
        deadline = time.monotonic() + deadline_seconds
        with self.events(token=self.token) as events:
            for _, event in events:
                if event.get("summary", {}).get("version", -1) >= version:
                    return
                assert time.monotonic() < deadline, event.get("summary")

    def close(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(20)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
