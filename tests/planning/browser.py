"""A headless Chromium over the W3C WebDriver protocol: just enough to move sliders and read numbers."""

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"


class Browser:
    """One session of chromedriver."""

    def __init__(self, url: str, profile: Path) -> None:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        options = {"binary": CHROMIUM, "args": [*flags, f"--user-data-dir={profile}"]}
        asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._url = url
        found = self._call("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
        self._url = f"{url}/session/{found['sessionId']}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, content, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)["value"]

    def open(self, path: Path) -> None:
        """Loads a local page."""
        self._call("POST", "/url", {"url": path.as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a function body in the page."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def resize(self, width: int, height: int) -> None:
        """Size of the page itself, however narrow."""
        values = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", values)

    def devtools(self, command: str, values: dict[str, Any]) -> Any:
        """A Chrome DevTools command."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": values})

    def press(self, element: str, keys: str) -> None:
        """Types keys into the element with this id."""
        found = self._call("POST", "/element", {"using": "css selector", "value": f"#{element}"})
        (identity,) = found.values()
        self._call("POST", f"/element/{identity}/value", {"text": keys})

    def screenshot(self, path: Path) -> None:
        """The visible page as PNG."""
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def messages(self) -> list[str]:
        """What the console printed since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._call("DELETE", "")


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Starts chromedriver on a free port, and ends what it started."""
    assert DRIVER is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url)
        session = Browser(url, profile)
        try:
            yield session
        finally:
            session.close()
    finally:
        driver.terminate()
        driver.wait(30)


def _wait_until_ready(url: str, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{url}/status", timeout=5) as reply:
                if json.load(reply)["value"]["ready"]:
                    return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > until:
                raise
        time.sleep(0.1)
