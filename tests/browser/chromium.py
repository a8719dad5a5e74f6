"""Chromium over its DevTools pipe: JSON messages that end in a zero byte, on file descriptors 3 and 4.

https://chromedevtools.github.io/devtools-protocol/ names the methods. One thread, no events are lost: what arrives
while an answer is waited for is kept in order.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

TIMEOUT_S = 60.0
LOCAL = ("file:", "data:", "about:", "blob:")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--hide-scrollbars",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--force-device-scale-factor=1",
    "--font-render-hinting=none",
)


class BrowserError(RuntimeError):
    """The browser did not start, did not answer, or refused."""


class Browser:
    """A running browser with a profile of its own; `with` ends it and removes the profile."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._events: list[dict[str, Any]] = []
        self._buffer = b""
        self._last_id = 0

    def __enter__(self) -> Browser:
        self._profile = tempfile.mkdtemp(prefix="browser-")
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()
        # Above 9 and below none of the shell's own: the shell moves them to 3 and 4, whatever those were here.
        inside = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to sandbox as root
        flags = [*_FLAGS, *sandbox, f"--user-data-dir={self._profile}", "about:blank"]
        script = f'exec "$0" "$@" 3<&{inside[0]} 4>&{inside[1]}'
        self._log = tempfile.TemporaryFile()
        self._child = subprocess.Popen(
            ["bash", "-c", script, self._program, *flags],
            stdout=self._log,
            stderr=self._log,
            pass_fds=inside,
            start_new_session=True,
        )
        for fd in (theirs_in, theirs_out, *inside):
            os.close(fd)
        try:
            self.version = str(self.call("Browser.getVersion")["product"])
        except BrowserError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)  # Chromium ends when its pipe does
        try:
            self._child.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        os.close(self._read)
        self._log.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One command and its result."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        try:
            left = json.dumps(message).encode() + b"\0"
            while left:
                left = left[os.write(self._write, left) :]
        except BrokenPipeError:
            raise BrowserError(f"{self._program} has ended: {self._said()}") from None
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") != message["id"]:
                self._events.append(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error']['message']}")
            else:
                return dict(answer["result"])

    def events(self, session: str) -> list[dict[str, Any]]:
        """What has arrived for a page since it was last asked for."""
        mine = [one for one in self._events if one.get("sessionId") == session]
        self._events = [one for one in self._events if one.get("sessionId") != session]
        return mine

    def wait_event(self, session: str) -> dict[str, Any]:
        """The page's next event that nobody has read yet."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            for index, one in enumerate(self._events):
                if one.get("sessionId") == session:
                    return self._events.pop(index)
            self._events.append(self._next(deadline, "an event"))

    def page(self, **look: Any) -> Page:
        """An empty page; `look` as in `Page.look`."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(browser=self, session=session, target=target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.look(**look)
        return page

    def _next(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0, deadline - time.monotonic()))[0]:
                raise BrowserError(f"{self._program}: {what} took longer than {TIMEOUT_S:g} s")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise BrowserError(f"{self._program} has ended: {self._said()}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()[-600:] or "it said nothing"


@dataclass(kw_only=True)
class Page:
    """A tab. `requests` and `complaints` are of everything opened in it."""

    browser: Browser
    session: str
    target: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)  # console errors and warnings, exceptions, what CSP refused

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def look(self, *, width: int = 1400, height: int = 900, scheme: str = "light", scale: float = 1) -> None:
        """Window in CSS px, `prefers-color-scheme`, and device px per CSS px."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, path: Path) -> None:
        """Go to a file and wait until it has loaded."""
        self._go(lambda: self.call("Page.navigate", url=path.resolve().as_uri()))

    def reload(self) -> None:
        self._go(lambda: self.call("Page.reload", ignoreCache=True))

    def evaluate(self, script: str) -> Any:
        """The value of an expression, a promise's too. BrowserError with what it threw."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return found["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """PNG of the window, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def collect(self) -> None:
        """Read the events that have arrived into `requests` and `complaints`."""
        for event in self.browser.events(self.session):
            self._note(event)

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)

    def _go(self, start: Callable[[], dict[str, Any]]) -> None:
        self.collect()
        answer = start()
        if answer.get("errorText"):
            raise BrowserError(f"cannot be opened: {answer['errorText']}")
        while True:
            event = self.browser.wait_event(self.session)
            self._note(event)
            if event["method"] == "Page.loadEventFired":
                return

    def _note(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        match event["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(given["exceptionDetails"]["text"]))
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                self.complaints.append(" ".join(str(one.get("value")) for one in given["args"]))
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(given["entry"]["text"]))
