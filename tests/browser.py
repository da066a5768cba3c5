"""Headless Chromium, driven over two pipes: what a page looks like, asks for and complains of."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)


class Browser:
    """One page at a time. Messages are JSON, each ended by a zero byte."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers, self._rest, self._number = to, answers, b"", 0
        self._events: list[dict[str, Any]] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, page: Path, width: int, *, dark: bool) -> list[dict[str, Any]]:
        """Load a page; returns the requests for anything else, and all complaints."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        self._events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())
        self.value("document.fonts.ready.then(() => 1)")
        return [event for event in self._events if _is_wrong(event, page.as_uri())]

    def value(self, script: str) -> Any:
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")


def _is_wrong(event: dict[str, Any], page: str) -> bool:
    method, params = event["method"], event["params"]
    if method == "Network.requestWillBeSent":
        url = params["request"]["url"]
        return bool(url != page and not url.startswith("data:"))
    return method in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a new profile. Skips where there is no Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium, Debian's package of that name")
    read_by_it, to = os.pipe()
    answers, written_by_it = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Chromium reads its third and writes its fourth file.
        shell = f'exec "$0" "$@" 3<&{read_by_it} 4>&{written_by_it}'
        process = subprocess.Popen(
            ["bash", "-c", shell, chromium, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(read_by_it, written_by_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_by_it)
        os.close(written_by_it)
        try:
            yield Browser(to, answers)
        finally:
            with suppress(OSError):
                os.write(to, b'{"id":0,"method":"Browser.close"}\0')
            os.close(to)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(answers)
