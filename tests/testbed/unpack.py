"""Unpack carried .deb files on a machine without package sources: `python3 unpack.py FOLDER` (root, dpkg-deb).

The packages are not entered into dpkg's database, nothing that exists is overwritten, and a library the
machine already has, in any patch version, is left alone. Standard library only; runs without this package.

A light bed needs (`apt-get download` on Debian 12; the newest glibc symbol in them is 2.34): slurmctld slurmd
slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 libjson-c5 liblz4-1 libnuma1.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Debian manages these by update-alternatives, which only a real installation sets up.
ALTERNATIVES = ("slurmctld", "slurmd", "slurmstepd", "slurmdbd")
# Libraries private to a program: a file of the same name elsewhere does not replace them.
PRIVATE = ("slurm", "slurm-wlm", "mariadb", "mariadb19")


def soname(name: str) -> str | None:
    """Return the name up to the major version (libz.so.1.2.13 -> libz.so.1); None for other files."""
    found = re.match(r"(.+\.so\.\d+)(?:\.|$)", name)
    return found[1] if found else None


def known_libraries() -> set[str]:
    """Return the names of libraries in the loader's cache."""
    shown = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in shown.splitlines()[1:] if line.strip()}


def target(inside: PurePosixPath, root: Path) -> Path:
    """Return where a file of a package belongs: /lib, /bin and /sbin are links into /usr on merged systems."""
    merged = inside.parts[0] in ("lib", "lib64", "bin", "sbin") and (root / inside.parts[0]).is_symlink()
    return root / "usr" / inside if merged else root / inside


def is_private(inside: PurePosixPath) -> bool:
    return any(part in PRIVATE for part in inside.parts[:-1])


def wanted(laid: Path, root: Path, have: set[str]) -> Iterator[tuple[Path, Path]]:
    """Return source and target of every file that the machine lacks."""
    for folder, folders, files in os.walk(laid):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in [*files, *links]:
            source = Path(folder) / name
            inside = PurePosixPath(source.relative_to(laid))
            if soname(name) in have and not is_private(inside):
                continue
            if not os.path.lexists(to := target(inside, root)):
                yield source, to


def unpack(debs: list[Path], root: Path, have: set[str]) -> int:
    """Copy the files to their targets and return the number of new ones."""
    with tempfile.TemporaryDirectory() as folder:
        laid = Path(folder)
        for deb in debs:
            subprocess.run(["dpkg-deb", "-x", str(deb), folder], check=True)
        pairs = list(wanted(laid, root, have))
        for source, to in pairs:
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to, follow_symlinks=False)
    link_alternatives(root)
    return len(pairs)


def link_alternatives(root: Path) -> None:
    for name in ALTERNATIVES:
        link = root / "usr/sbin" / name
        if (root / f"usr/sbin/{name}-wlm").exists() and not link.exists():
            link.unlink(missing_ok=True)  # a dangling link
            link.symlink_to(f"{name}-wlm")


def main() -> None:
    parser = argparse.ArgumentParser(prog="unpack.py", description="lay carried .deb files down, dpkg untouched")
    parser.add_argument("folder", type=Path, help="searched for *.deb, subfolders too")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where to (default: /)")
    asked = parser.parse_args()
    debs = sorted(asked.folder.rglob("*.deb"))
    if not debs:
        sys.exit(f"unpack.py: no .deb under {asked.folder}")
    if asked.root == Path("/") and os.geteuid() != 0:
        sys.exit("unpack.py: only root may write to /")
    count = unpack(debs, asked.root, known_libraries())
    if asked.root == Path("/"):
        subprocess.run(["ldconfig"], check=True)
    print(f"{len(debs)} packages, {count} new files under {asked.root}")


if __name__ == "__main__":
    main()
