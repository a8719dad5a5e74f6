"""Chromium over its DevTools pipe: JSON messages that end in a zero byte, on file descriptors 3 and 4.

https://chromedevtools.github.io/devtools-protocol/ documents the methods. There is one thread, and no event is lost:
those that arrive while a reply is awaited are queued in order.
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
    """The browser did not start, did not reply, or returned an error."""


class Browser:
    """A running browser with a temporary profile. Use it with `with`, which ends it and removes the profile."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._events: list[dict[str, Any]] = []
        self._buffer = b""
        self._last_id = 0

    def __enter__(self) -> Browser:
        self._profile = tempfile.mkdtemp(prefix="browser-")
        child_in, self._write = os.pipe()
        self._read, child_out = os.pipe()
        # Numbers above 9, which the shell does not use itself; it moves them to 3 and 4.
        inherited = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (child_in, child_out)]
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to sandbox as root
        flags = [*_FLAGS, *sandbox, f"--user-data-dir={self._profile}", "about:blank"]
        script = f'exec "$0" "$@" 3<&{inherited[0]} 4>&{inherited[1]}'
        self._log = tempfile.TemporaryFile()
        self._child = subprocess.Popen(
            ["bash", "-c", script, self._program, *flags],
            stdout=self._log,
            stderr=self._log,
            pass_fds=inherited,
            start_new_session=True,
        )
        for fd in (child_in, child_out, *inherited):
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
        """Send a command and return its result. Raises BrowserError."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        try:
            unsent = json.dumps(message).encode() + b"\0"
            while unsent:
                unsent = unsent[os.write(self._write, unsent) :]
        except BrokenPipeError:
            raise BrowserError(f"{self._program} has ended: {self._log_tail()}") from None
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            reply = self._next(deadline, method)
            if reply.get("id") != message["id"]:
                self._events.append(reply)
            elif "error" in reply:
                raise BrowserError(f"{method}: {reply['error']['message']}")
            else:
                return dict(reply["result"])

    def events(self, session: str) -> list[dict[str, Any]]:
        """Return the events of a page that have arrived since the last call."""
        selected = [event for event in self._events if event.get("sessionId") == session]
        self._events = [event for event in self._events if event.get("sessionId") != session]
        return selected

    def wait_event(self, session: str) -> dict[str, Any]:
        """Wait for the page's next event that has not been read and return it."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            for index, event in enumerate(self._events):
                if event.get("sessionId") == session:
                    return self._events.pop(index)
            self._events.append(self._next(deadline, "an event"))

    def page(self, **settings: Any) -> Page:
        """Open an empty page with the settings of `Page.emulate`."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(browser=self, session=session, target=target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.emulate(**settings)
        return page

    def _next(self, deadline: float, awaited: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0, deadline - time.monotonic()))[0]:
                raise BrowserError(f"{self._program}: {awaited} took longer than {TIMEOUT_S:g} s")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise BrowserError(f"{self._program} has ended: {self._log_tail()}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()[-600:] or "no output"


@dataclass(kw_only=True)
class Page:
    """A tab. `requests` and `complaints` are those of every page opened in it."""

    browser: Browser
    session: str
    target: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)  # console errors and warnings, exceptions, CSP violations

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to this page and return its result."""
        return self.browser.call(method, self.session, **parameters)

    def emulate(self, *, width: int = 1400, height: int = 900, scheme: str = "light", scale: float = 1) -> None:
        """Set the window size in CSS px, `prefers-color-scheme`, and the device px per CSS px."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, path: Path) -> None:
        """Go to a file and wait until it has loaded."""
        self._go(lambda: self.call("Page.navigate", url=path.resolve().as_uri()))

    def reload(self) -> None:
        """Load the page again without cache and wait until it has loaded."""
        self._go(lambda: self.call("Page.reload", ignoreCache=True))

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression or of its promise. Raises BrowserError with what it threw."""
        reply = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            details = reply["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return reply["result"].get("value")

    def screenshot(self, path: Path, *, full_page: bool = False) -> None:
        """Write a PNG of the window, or of the full page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full_page)
        path.write_bytes(base64.b64decode(shot["data"]))

    def collect(self) -> None:
        """Sort the events that have arrived into `requests` and `complaints`."""
        for event in self.browser.events(self.session):
            self._record(event)

    def close(self) -> None:
        """Close the tab."""
        self.browser.call("Target.closeTarget", targetId=self.target)

    def _go(self, start: Callable[[], dict[str, Any]]) -> None:
        self.collect()
        reply = start()
        if reply.get("errorText"):
            raise BrowserError(f"cannot be opened: {reply['errorText']}")
        while True:
            event = self.browser.wait_event(self.session)
            self._record(event)
            if event["method"] == "Page.loadEventFired":
                return

    def _record(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]["text"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.complaints.append(" ".join(str(argument.get("value")) for argument in parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(parameters["entry"]["text"]))
