"""Recognize what looks like a secret in a line of configuration, so that it is not left where others can read it."""

from __future__ import annotations

import re
from collections.abc import Iterable

# The last word of a key, as in environment.variables.WANDB_API_KEY=..., {HF_TOKEN: ...} and export DB_PASSWORD=...; not
# `tokens`, which are counted.
_KEY = re.compile(
    r"(?P<key>[\w.]*(?:token|secret|passw(?:or)?d|passphrase|credentials?|(?<![a-z])key|apikey))['\"]?\s*[=:]\s*['\"]?"
    r"(?P<value>[^\s'\",}]+)",
    re.IGNORECASE,
)
_URL = re.compile(r"(?P<key>\w+://[^\s/:@]*):[^\s/@]+@")  # https://user:password@host
_KNOWN_FORM = re.compile(r"(?P<key>hf_|gh[oprsu]_|github_pat_|glpat-|xox[abp]-|sk-|AKIA)[A-Za-z0-9_-]{16,}")
_NO_VALUE = ("null", "none", "true", "false", "")


def find_secret(lines: Iterable[str]) -> str | None:
    """Return the key, or the beginning, of the first value that looks like a secret; None if nothing does."""
    for line in lines:
        for match in _KEY.finditer(line):
            if match["value"].lower() not in _NO_VALUE:
                return match["key"]
        if known := _URL.search(line) or _KNOWN_FORM.search(line):
            return f"{known['key']}..."
    return None
