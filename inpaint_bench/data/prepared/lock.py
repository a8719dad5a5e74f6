"""A lock between processes of one machine that the kernel drops with its holder, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path


class Lock:
    """A lock file, held shared or exclusive until `release`.

    Some network file systems know no locks: there every taker gets it, and nobody is kept out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def take(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Take it, or change how it is held. False where `wait` is False and someone else is in the way."""
        how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        while True:
            if self._handle is None:
                self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._handle, how)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
            if self._is_current():
                return True
            self.release()  # its last holder removed the file while we waited

    def release(self, *, remove: bool = False) -> None:
        """`remove` also deletes the file; only for who holds it exclusively."""
        if self._handle is None:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._handle)
        self._handle = None

    def _is_current(self) -> bool:
        assert self._handle is not None
        try:
            return os.path.samestat(os.fstat(self._handle), self.path.stat())
        except FileNotFoundError:
            return False
