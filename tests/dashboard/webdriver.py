"""Drives Debian's chromium through its chromedriver, in the few words of the WebDriver protocol that tests need.

Both come from the same Debian package source, so they always fit each other, and nothing needs to be installed for
Python.
"""

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 60.0
MISSING = "needs Debian's chromium and chromium-driver: apt-get install chromium chromium-driver"


def is_there() -> bool:
    return shutil.which("chromium") is not None and shutil.which("chromedriver") is not None


def _start_driver() -> tuple["subprocess.Popen[str]", int]:
    """Start chromedriver; return it and its port.

    It takes a free port of IPv4 and ends if the same port of IPv6 is taken: then another one is started.
    """
    while True:
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert driver.stdout is not None
        said = []
        for line in driver.stdout:
            if "started successfully on port" in line:
                return driver, int(line.rsplit("port", 1)[1].strip(" .\n"))
            said.append(line)
        driver.wait()
        assert "port not available" in "".join(said), f"chromedriver did not start: {''.join(said)}"


class Browser:
    """One headless window with a profile of its own."""

    def __init__(self, *, dark: bool = False, width: int = 1440, height: int = 900) -> None:
        self._driver, port = _start_driver()
        try:
            self._url = f"http://127.0.0.1:{port}"
            arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={width},{height}"]
            arguments += ["--blink-settings=preferredColorScheme=0"] if dark else []
            options = {"args": arguments, "binary": shutil.which("chromium")}
            asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
            self._url += f"/session/{answer['sessionId']}"
        except BaseException:
            self._driver.kill()
            self._driver.wait()
            raise

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode(errors="replace")[:2000]) from None

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script's `return`; a promise is waited for."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Keys for whatever has the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def wait_for(self, condition: str, what: str, *arguments: Any) -> Any:
        """Until the expression `condition` is true in the page; returns its value."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (found := self.run(f"return {condition}", *arguments)):
            assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:g} s: {what}"
            time.sleep(0.02)
        return found

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def messages(self) -> list[str]:
        """Lines of the console since the last call, errors of the page included."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._driver.terminate()
            try:
                self._driver.wait(10)
            except subprocess.TimeoutExpired:
                self._driver.kill()
                self._driver.wait()
            assert self._driver.stdout is not None
            self._driver.stdout.close()
