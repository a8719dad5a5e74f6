"""Lines for sidecar.log. Straight to the descriptor: a full disk must not stop the sampling."""

from __future__ import annotations

import contextlib
import os


def log(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace") + b"\n")
