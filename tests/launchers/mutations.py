"""Mutate a sweep directory at random, for tests that no command stumbles over one or executes anything from it."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inpaint_bench.core.schema import LEDGER, SWEEP
from launchers.slurm.local_executor import machine

SECRET = "content of a file outside of the sweep"
NUMBERS = (0, -1, 10**7, 2**63, 2**64, 10**30, 1e308, -1e308, 1.5, float("nan"), float("inf"))
TEXTS = ("", "x", "\x1b[2J\x1b]0;title\x07", "\u202e\u2028\u0000", "../../../etc", "-x", "a;id", "$(id)", "x" * 100_000)
OTHER_TYPES = (None, True, [], {}, [[]], {"a": {"b": []}}, 7, "7")
JOB_IDS = ("7_0", "7_%a", "999999_3", "7", f"pid:1@{machine()}", "pid:x@y", "pid:99999999@other", "x")


class Planted:
    """What loads or runs itself if a command touches it: each leaves the file `marker`."""

    def __init__(self, folder: Path) -> None:
        self.marker = folder / "executed"
        self.secret = folder / "secret"
        self.secret.write_text(SECRET)
        self.script = folder / "script"
        self.script.write_text(f"#!/bin/sh\ntouch {self.marker}\n")
        self.script.chmod(0o755)
        self.ssh_config = folder / "ssh_config"
        self.ssh_config.write_text(f"Host *\n  ProxyCommand {self.script}\n  StrictHostKeyChecking no\n")
        self.slurm_conf = folder / "slurm.conf"
        self.slurm_conf.write_text(f"ClusterName=x\nPluginDir={folder}\nAuthType=auth/evil\n")

    def pickle(self) -> bytes:
        """A pickle that leaves the marker when it is loaded."""
        return pickle.dumps(_Touch(str(self.marker)))


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Mutator:
    """Applies one mutation, which follows from the seed alone, to a sweep directory; `donor` is another sweep."""

    def __init__(self, seed: int, folder: Path, donor: Path, planted: Planted) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.donor = donor
        self.planted = planted

    def mutate(self) -> str:
        """Mutate and return what was done."""
        kinds: list[tuple[int, Callable[[], str]]] = [
            (6, self._edit_value),
            (4, self._edit_lines),
            (3, self._cut),
            (3, self._replace_by_another_kind),
            (2, self._copy_from_another_sweep),
            (2, self._swap),
            (2, self._plant_pickles),
            (1, self._plant_site),
            (1, self._remove),
        ]
        chosen = self.rng.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]
        return f"{chosen.__name__.lstrip('_')} {chosen()}"

    def _paths(self, *, folders: bool = False) -> list[Path]:
        paths = [
            path for path in sorted(self.folder.rglob("*")) if folders or (path.is_file() and not path.is_symlink())
        ]
        # What decides about jobs half of the time: there are more logs than records.
        records = [self.folder / name for name in (SWEEP, LEDGER)]
        return records if self.rng.random() < 0.5 else paths

    def _choose(self, *, folders: bool = False) -> Path:
        return self.rng.choice(self._paths(folders=folders))

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.folder))

    def _cut(self) -> str:
        path = self._choose()
        content = path.read_bytes()
        ways: dict[str, Callable[[], Any]] = {
            "truncated": lambda: path.write_bytes(content[: self.rng.randrange(len(content) or 1)]),
            "emptied": lambda: path.write_bytes(b""),
            "garbage": lambda: path.write_bytes(self.rng.randbytes(300)),
            "zeros": lambda: path.write_bytes(bytes(len(content))),
            "huge": lambda: os.truncate(path, 2**33),
            "deep": lambda: path.write_bytes(b"[" * 300_000),
            "deep objects": lambda: path.write_bytes(b'{"a":' * 300_000),
            "a changed byte": lambda: path.write_bytes(
                content[: (at := self.rng.randrange(len(content) or 1))] + b"\xff" + content[at + 1 :]
            ),
        }
        way = self.rng.choice(list(ways))
        ways[way]()
        return f"{self._name(path)} {way}"

    def _replace_by_another_kind(self) -> str:
        path = self._choose(folders=True)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        ways: dict[str, Callable[[], Any]] = {
            "folder": path.mkdir,
            "fifo": lambda: os.mkfifo(path),
            "link out": lambda: path.symlink_to(self.planted.secret),
            "link to a folder": lambda: path.symlink_to(self.donor),
            "dangling link": lambda: path.symlink_to(self.folder / "nothing"),
            "loop": lambda: path.symlink_to(path.name),
            "link to a device": lambda: path.symlink_to("/dev/zero"),
        }
        way = self.rng.choice(list(ways))
        ways[way]()
        return f"{self._name(path)} {way}"

    def _copy_from_another_sweep(self) -> str:
        path = self._choose()
        source = self.donor / path.relative_to(self.folder)
        if not source.is_file():
            source = self.rng.choice([file for file in sorted(self.donor.rglob("*")) if file.is_file()])
        shutil.copyfile(source, path)
        return self._name(path)

    def _swap(self) -> str:
        first, second = self._choose(), self._choose()
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
        return f"{self._name(first)} {self._name(second)}"

    def _remove(self) -> str:
        path = self._choose(folders=True)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return self._name(path)

    def _plant_pickles(self) -> str:
        for path in self.folder.rglob("*.pkl"):
            path.write_bytes(self.planted.pickle())
        for name in ("sitecustomize.py", "inpaint_bench.py", "yaml.py", "conf/config.yaml", "jobs/sitecustomize.py"):
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(f"import os; os.system('touch {self.planted.marker}')")
        return "everywhere"

    def _plant_site(self) -> str:
        """Name programs and configurations in a sweep that belongs to another user, where this user is root."""
        record = json.loads((self.folder / SWEEP).read_text())
        for site in record["sites"].values():
            planted = {
                "method": self.rng.choice(["ssh", "slurm"]),
                "host": "localhost",
                "folder": "/tmp/elsewhere",
                "ssh_config": str(self.planted.ssh_config),
                "slurm_conf": str(self.planted.slurm_conf),
                "hostnames": [".*"],
            }
            site["connect"] |= planted
            site["python"] = str(self.planted.script)
        (self.folder / SWEEP).write_text(json.dumps(record))
        if os.geteuid() == 0:
            os.chown(self.folder / SWEEP, 65534, 65534)
        return record["sweep_id"]

    def _edit_lines(self) -> str:
        path = self.folder / LEDGER
        lines = path.read_bytes().splitlines(keepends=True)
        at = self.rng.randrange(len(lines))
        match way := self.rng.choice(["removed", "doubled", "shuffled", "reversed", "cut after", "moved"]):
            case "removed":
                del lines[at]
            case "doubled":
                lines.insert(self.rng.randrange(len(lines) + 1), lines[at])
            case "shuffled":
                self.rng.shuffle(lines)
            case "reversed":
                lines.reverse()
            case "cut after":
                del lines[at:]
            case "moved":
                lines.append(lines.pop(at))
        path.write_bytes(b"".join(lines))
        return f"{way} {at}"

    def _edit_value(self) -> str:
        """Change one value of a JSON file, or of a line of the ledger."""
        files = [path for path in self._paths() if path.suffix in (".json", ".jsonl")]
        path = self.rng.choice(files or [self.folder / SWEEP])
        lines = path.read_text().splitlines() if path.name == LEDGER else [path.read_text()]
        at = self.rng.randrange(len(lines))
        document = json.loads(lines[at])
        places = list(_places(document))
        if not places:
            return f"{self._name(path)} unchanged"
        container, key = self.rng.choice(places)
        old = container[key]
        container[key] = self._other(old, str(key))
        lines[at] = json.dumps(document)
        path.write_text("\n".join(lines) + "\n")
        return f"{self._name(path)} {key}: {str(old)[:40]!r} -> {str(container[key])[:40]!r}"

    def _other(self, value: Any, key: str) -> Any:
        if key == "job_id" and self.rng.random() < 0.7:
            return self.rng.choice(JOB_IDS)
        if self.rng.random() < 0.3:
            return self.rng.choice(OTHER_TYPES)
        if isinstance(value, bool):
            return not value
        if isinstance(value, int | float):
            return self.rng.choice([*NUMBERS, value + 1, -value])
        if isinstance(value, str):
            return self.rng.choice([*TEXTS, value + "x", value[::-1]])
        return self.rng.choice(OTHER_TYPES)


def _places(value: Any) -> Any:
    """Yield container and key of every value in a document."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])
