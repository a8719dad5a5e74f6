"""Which files of a sweep directory at a site are listed and copied."""

import os
import sys
from dataclasses import replace

import pytest

from inpaint_bench.core.config.site import ConnectConfig, SiteConfig
from launchers.remote import sync
from launchers.remote.client import RemoteSweep
from launchers.remote.ssh import UnreachableError
from launchers.remote.sync import list_files, owner_of
from tests.launchers.over_ssh import replace_ssh


@pytest.mark.subprocess
def test_plain_files_are_listed_and_copied_with_their_times(tmp_path, monkeypatch):
    replace_ssh(tmp_path, monkeypatch, bash_profile="echo Welcome")
    root, precious = tmp_path / "root", tmp_path / "precious"
    odd = "1/attempt-1/my \x1b[31m\n picture.png"
    names = ("0/attempt-1/manifest.json", odd, "jobs/00-delta/77_0_0_log.out", "sweep.json")
    left_out = ("code/abc/conf/x.yaml", "0/attempt-1/checkpoints/x.json", "0/attempt-1/weights/x.json")
    for name in (*names, *left_out, "../precious/x.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
        os.utime(root / name, (1000.5, 1000.5))
    (root / "2").symlink_to(precious)
    (root / "0" / "attempt-1" / "other.json").symlink_to(precious / "x.json")
    os.mkfifo(root / "0" / "attempt-1" / "worker.log")
    connect = ConnectConfig(method="ssh", host="login", folder=str(tmp_path))
    site = SiteConfig(name="delta", python=sys.executable, connect=connect)
    remote = RemoteSweep(site=site, root=str(root), code="abc")
    listed = list_files(remote)
    assert sorted(listed) == sorted((name.replace("jobs/", "logs/"), len(name), 1000) for name in names)
    monkeypatch.setattr(sync, "BATCH_BYTES", 40)  # the second archive has two files, and one that is gone
    copied = [file for file in listed if file.path.startswith(("0/", "logs/"))]
    sync.fetch_over_ssh(remote, [*copied, sync.ResultFile("0/attempt-1/gone.json", 1, 1000)], tmp_path / "here")
    arrived = [path for path in (tmp_path / "here").rglob("*") if path.is_file()]
    shown = {path.relative_to(tmp_path / "here").as_posix(): path for path in arrived}
    assert {path: (len(file.read_text()), int(file.stat().st_mtime)) for path, file in shown.items()} == {
        path: (size, mtime_s) for path, size, mtime_s in copied
    }
    with pytest.raises(UnreachableError, match=r"delta: results cannot be copied \(.*No such file"):
        sync.fetch_over_ssh(replace(remote, root="/nowhere"), copied, tmp_path / "here")


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("6/attempt-1/manifest.json", "6/attempt-1"),
        ("6/attempt-1/events/.journal.arrows", "6/attempt-1"),
        ("6/attempt-1/events/.journal.worker.arrows", "6/attempt-1"),
        ("6/attempt-1/.hydra/config.yaml", "6/attempt-1"),
        ("logs/00-delta/77_0_0_log.out", "logs/00-delta/77_0"),
        ("6/attempt-1/events/.journal.worker.arrows.tmp", None),
        ("6/attempt-1/events/.part-000001.parquet.tmp", None),
        ("6/attempt-1/.hidden/x.json", None),
        ("6/attempt-1/../x.json", None),
        ("6/attempt-1/evil.pkl", None),
        ("6/attempt-1/checkpoints/step-1/state.json", None),
        ("6/attempt-1/weights/model.json", None),
        ("logs/00-delta/77_0_submitted.pkl", None),
        ("sweep.json", None),
    ],
)
def test_only_results_belong_to_an_attempt(path, owner):
    assert owner_of(path) == owner
