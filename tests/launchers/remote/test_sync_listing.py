"""Which files of a sweep directory at a site are copied."""

import os
import sys

import pytest

from inpaint_bench.core.config.site import ConnectConfig, SiteConfig
from launchers.remote.client import RemoteSweep
from launchers.remote.sync import list_files, owner_of
from tests.launchers.over_ssh import replace_ssh


@pytest.mark.subprocess
def test_plain_files_are_listed_with_size_and_time_whatever_their_names(tmp_path, monkeypatch):
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
    listed = list_files(RemoteSweep(site=site, root=str(root), code="abc"))
    assert sorted(listed) == sorted((name.replace("jobs/", "logs/"), len(name), 1000) for name in names)


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
