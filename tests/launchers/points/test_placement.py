"""Choice of site, Slurm request, cost, and grouping into arrays."""

import os

import pytest
from hydra import compose

from inpaint_bench import launch
from inpaint_bench.core.errors import UserError
from launchers.points import site_catalog
from launchers.points.compose import composer
from launchers.points.point import group_points
from launchers.submit.submit import Submission
from launchers.sweep.sweep_record import SweepRecord
from tests.launchers.conftest import ACCOUNT

pytestmark = pytest.mark.slow

SSH = " ".join(
    f"sites.delta.{key}" for key in ["connect.method=ssh", "connect.host=h", "connect.folder=/f", "python=/p"]
)


def test_auto_chooses_the_home_site_of_the_gpu(points):
    assert [p.site.name for p in points("gpu=a40", "gpu=a100", "gpu=h200", "gpu=cpu")] == [
        "grace",
        "grace",
        "delta",
        "local",
    ]


@pytest.mark.parametrize(
    ("names", "sites"),
    [
        (("dt-login03", "dt-login03.delta.ncsa.illinois.edu"), ["delta"]),
        (("gpua001.delta.ncsa.illinois.edu",) * 2, ["delta"]),
        (("gpub045", "gpub045.delta.internal.ncsa.edu"), ["delta"]),
        (("gpue08.hsn.cm.delta.internal.ncsa.edu",) * 2, ["delta"]),
        (("cn001", "localhost.localdomain"), ["delta"]),
        (("gh-login01.delta.ncsa.illinois.edu", "gh001.hsn.cm.delta.internal.ncsa.edu"), []),  # DeltaAI
        (("grace4.hprc.tamu.edu",) * 2, ["grace"]),
        (("g101", "g101"), ["grace"]),
        (("c123", "c123.cluster"), ["grace"]),
        (("g102", "g102.grace.hprc.tamu.edu"), ["grace"]),
        (("c123", "c123.hpc.example.edu"), []),  # another cluster's
        (("cn001", "cn001.hpc.example.edu"), []),
        (("g101", "g101.delta.ncsa.illinois.edu"), []),
    ],
)
def test_login_and_compute_nodes_belong_to_their_site(monkeypatch, names, sites):
    monkeypatch.setattr(site_catalog, "_host_names", lambda: names)
    with composer() as composed:
        config = compose("config")
        catalog = composed.catalog
        assert [name for name in catalog.names if site_catalog.is_site_host(catalog.site(name, config))] == sites


def test_launch_from_a_compute_node_submits_to_its_cluster(monkeypatch, tmp_path, points):
    monkeypatch.setattr(site_catalog, "_host_names", lambda: ("gpua001", "gpua001.delta.ncsa.illinois.edu"))
    (tmp_path / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    a40, ssh = points(f"gpu=a40 {ACCOUNT}", f"gpu=h200 {ACCOUNT} {SSH}")
    assert (a40.site.name, a40.request.partition, a40.reachable) == ("delta", "gpuA40x4", True)
    assert ssh.site.connect.method == "slurm"  # Slurm is here


@pytest.fixture
def logged_in_to_delta(monkeypatch, tmp_path):
    monkeypatch.setattr(site_catalog, "_host_names", lambda: ("dt-login03.delta.ncsa.illinois.edu",))
    sbatch = tmp_path / "sbatch"
    sbatch.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("logged_in_to_delta")
def test_auto_prefers_the_site_we_are_logged_in_to(points):
    delta, grace = points(f"gpu=a100 {ACCOUNT}", f"gpu=a100 site=grace {ACCOUNT}")
    assert (delta.site.name, delta.reachable) == ("delta", True)
    assert (grace.site.name, grace.reachable) == ("grace", False)


def test_missing_slurm_conf_makes_a_site_unreachable(points):
    (point,) = points("gpu=h200 sites.delta.connect.slurm_conf=/nonexistent/slurm.conf")
    assert point.reachability.reason == "/nonexistent/slurm.conf does not exist"


def test_gpus_are_requested_in_the_syntax_of_the_site(points):
    grace, delta = points("gpu=a100", "gpu=h200")
    assert grace.request.gpu_option == ("gres", "gpu:a100:1")
    assert delta.request.gpu_option == ("gpus-per-node", "1")


@pytest.mark.parametrize(
    ("line", "units"),
    [
        ("gpu=h200 time_min=60", 3.0),  # one GPU of eight: 12 of 16 cores, 240 of 250 GB, so the GPU share counts
        ("gpu=a40 site=delta time_min=120", 1.0),
        ("gpu=a100 site=delta time_min=60 sites.delta.gpus.a100.cpus_per_gpu=32", 2.0),  # two GPUs' worth of cores
        (
            "gpu=a100 site=delta time_min=60 sites.delta.gpus.a100.mem_gb_per_gpu=232",
            232 * 1.073741824 / 62.5,
        ),
        ("gpu=a100 site=grace time_min=60", 16 + 72.0),  # cores and GPU are added there
        ("gpu=a100 site=grace time_min=60 mem_gb=118", 17 + 72.0),  # a little more than the memory of 16 cores
        ("gpu=a40 site=grace time_min=60", 16 + 72.0),  # at most: its GPU counts as an A100, which it is not above
        ("gpu=h200 site=delta sites.delta.gpus.h200.charge_factor=null", None),
        (
            "gpu=h200 site=delta sites.delta.charging.gpus_per_unit=null +sites.delta.charging.units_per_gpu={a40:1}",
            None,
        ),
        ("gpu=h200 gpus=8 time_min=60", 24.0),
        ("gpu=a100 site=delta gpus=4 nodes=2 telemetry=none time_min=60", 8.0),
        ("gpu=a100 site=grace gpus=2 nodes=2 telemetry=none time_min=60", 4 * (16 + 72.0)),
        ("gpu=h200 time_min=60 workload.train_steps=9", 12.0),  # it requeues itself three times at most
        ("gpu=h200 time_min=60 workload.train_steps=9 rerun.timeout.requeues=1", 6.0),
        ("gpu=h200 time_min=60 workload.train_steps=9 sites.delta.requeue.request=false", 3.0),
    ],
)
def test_service_units_follow_the_charging_rule_of_the_site(points, line, units):
    (point,) = points(line)
    assert point.service_units == units


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("gpu=h200 time_min=60", 0),
        ("gpu=h200 time_min=60 workload.train_steps=9", 120),
        ("gpu=h200 time_min=60 workload.train_steps=9 rerun.timeout.warn_s=0", 0),
        ("gpu=h200 time_min=60 workload.train_steps=9 sites.delta.use_srun=false", 0),
        ("gpu=h200 time_min=19 workload.train_steps=9", 0),
        ("gpu=h200 time_min=20 workload.train_steps=9", 120),
        ("gpu=cpu site=local workload.train_steps=9", 0),
    ],
)
def test_training_requests_a_warning_if_its_limit_leaves_time_for_it(points, line, seconds):
    (point,) = points(line)
    assert point.request.warning_s == seconds


def test_points_of_equal_site_and_request_are_one_array(points):
    nine = points(*(f"gpu={gpu} batch={batch}" for gpu in ("a40", "a100", "h200") for batch in (8, 16, 32)))
    groups = group_points(nine)
    assert [[p.num for p in g.points] for g in groups] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert len({g.name for g in groups}) == 3


def test_points_of_different_time_limits_are_two_arrays(points):
    assert len(group_points(points("gpu=h200", "gpu=h200 time_min=90"))) == 2


@pytest.mark.parametrize("limit", ["max_array_size=2", "max_submit_jobs=2"])
def test_more_points_than_the_site_allows_are_several_arrays(points, limit):
    many = points(*(f"gpu=h200 batch={b} sites.delta.limits.{limit}" for b in range(1, 6)))
    groups = group_points(many)
    assert [len(g.points) for g in groups] == [2, 2, 1]
    assert sorted(p.num for g in groups for p in g.points) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("key", ["qos", "account.how_to_list", "environment.variables.OMP_NUM_THREADS", "python"])
def test_points_that_differ_in_any_site_key_are_two_arrays(points, key):
    assert len(group_points(points(f"gpu=a40 sites.grace.{key}='1'", f"gpu=a40 sites.grace.{key}='2'"))) == 2


def test_budget_is_checked_for_every_submission(points, tmp_path):
    """A rerun with a longer limit may cost more than the sweep did."""
    points = points(f"gpu=h200 batch=8 budget=1 {ACCOUNT}")
    new_sweep = SweepRecord(sweep_id="s1")
    submission = Submission(folder=tmp_path, preview_only=True, new_sweep=new_sweep)
    with pytest.raises(UserError, match=r"budget=1: this sweep may cost"):
        submission.run(lambda _: points)


def test_more_points_than_a_user_may_have_jobs_are_refused(tmp_path, capsys):
    words = ["-m", "gpu=h200", "batch=1,2,3,4,5", "dry_run=true", f"hydra.sweep.dir={tmp_path}"]
    assert launch.main([*words, "sites.delta.limits.max_submit_jobs=4"]) == 2
    assert "5 jobs for delta, which takes 4 jobs of one user at a time" in capsys.readouterr().err
    assert launch.main([*words, "sites.delta.limits.max_submit_jobs=4", "points_per_job=2"]) == 0
    assert launch.main([*words, "sites.delta.limits.max_submit_jobs=5"]) == 0
