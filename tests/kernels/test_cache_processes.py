"""Processes that share a folder of compiled kernels, one of which is killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inpaint_bench.core.paths import ROOT

USE = """
import sys, time
from pathlib import Path
from inpaint_bench.kernels import cache
cache.LIMIT_BYTES, cache.CHECK_S = int(sys.argv[2]), 0
folder = cache.use((Path(sys.argv[1]),), sys.argv[3], ())
for number in range(20):  # as the compilers write
    part = folder / f".{number}.{id(folder)}"
    part.write_bytes(bytes(8192))
    part.rename(folder / str(number))
print(folder, flush=True)
sys.stdin.read()
"""


@contextmanager
def using(root: Path, limit: int, card: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    command = [sys.executable, "-c", USE, str(root), str(limit), card]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert child.stdout
        yield child, Path(child.stdout.readline().strip())
    finally:
        child.communicate()


def test_writers_share_a_folder_and_only_the_death_of_the_last_one_frees_it(tmp_path: Path) -> None:
    root = tmp_path / "kernels"
    names = {str(number) for number in range(20)}
    with using(root, 2**30, "H200") as (one, folder), using(root, 2**30, "H200") as (_, same):
        assert folder == same
        one.kill()
        one.wait()
        with using(root, 0, "H100"):
            assert {path.name for path in folder.iterdir()} == names
    with using(root, 0, "H100"):
        assert not folder.exists()
