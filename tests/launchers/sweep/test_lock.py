"""One submitter at a time, on file systems with locks and without."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading

import pytest

from launchers.sweep import lock


@pytest.fixture(params=["flock", "none"])
def kind(request, monkeypatch):
    """A file system with locks, and one that answers as NFS without its lock daemon does."""
    if request.param == "none":

        def refuse(*_):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", refuse)
    return request.param


def test_a_second_one_is_refused_while_the_first_holds_it(kind, tmp_path):
    assert not lock.busy(tmp_path)
    with lock.held(tmp_path):
        assert lock.busy(tmp_path)
        with pytest.raises(lock.BusyError, match="wait for it"), lock.held(tmp_path, patience_s=0):
            pass
    assert not lock.busy(tmp_path)
    with lock.held(tmp_path, patience_s=0):
        pass


def test_of_many_at_once_one_is_inside(kind, tmp_path):
    inside, most = [], []

    def enter():
        with lock.held(tmp_path, patience_s=30):
            inside.append(1)
            most.append(len(inside))
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8


def test_who_only_looks_is_in_nobodys_way(kind, tmp_path):
    done = threading.Event()

    def look():
        while not done.is_set():
            lock.busy(tmp_path)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(50):
            with lock.held(tmp_path):
                pass
    finally:
        done.set()
        looker.join()


def test_a_holder_of_this_machine_that_died_is_passed_over(monkeypatch, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (tmp_path / lock.MAKER).symlink_to(f"{socket.gethostname()}:{child.pid}:{lock._started(child.pid)}")
    monkeypatch.setattr(lock, "_flock", lambda *_: None)
    (tmp_path / lock.NAME).touch()
    assert lock.busy(tmp_path)
    child.communicate()
    assert not lock.busy(tmp_path)
    with lock.held(tmp_path, patience_s=0):
        assert lock.busy(tmp_path)


def test_a_holder_of_another_machine_is_named(monkeypatch, tmp_path):
    (tmp_path / lock.MAKER).symlink_to("login2:77:1234")
    monkeypatch.setattr(lock, "_flock", lambda *_: None)
    with pytest.raises(lock.BusyError, match="on login2; wait for it, or remove"), lock.held(tmp_path, patience_s=0):
        pass
