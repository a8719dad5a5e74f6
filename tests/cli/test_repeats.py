"""`rerun --repeats` and `repeats=auto`: which cells get further repetitions."""

import shutil
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.core.schema import LEDGER, PLAN_PATTERN
from launchers.remote import plan_file
from launchers.sweep import snapshot
from launchers.sweep.events import Submitted
from launchers.sweep.ledger import Ledger
from launchers.sweep.sweep_record import RunOrder
from tests.analysis.build import rewrite_json, write_run
from tests.launchers.submit.test_submit import QUICK, status_of, sweep
from tests.launchers.sweeps import launched

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]

UNREACHABLE = ["gpu=h200", "profile=demo", "sites.delta.connect.method=slurm"]  # waits in a plan file: nothing runs
LOCAL = ["gpu=a40", "profile=demo"]


class TestAddedRepetitions:
    """Of a sweep whose points wait in a plan file, so that nothing runs."""

    @pytest.fixture(scope="class")
    def planned(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("planned") / "sweep"
        assert sweep(folder, *UNREACHABLE, "batch=8,16", "repeats=2", "budget=15", "order_seed=1") == 0
        return folder

    @pytest.fixture
    def folder(self, planned: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(planned, tmp_path / "sweep"))

    def test_numbers_and_seeds_continue(self, folder: Path) -> None:
        before = launched(folder)
        assert app.main(["rerun", str(folder), "budget=null", "--repeats", "4"]) == 0
        found = launched(folder)
        assert found[:4] == before
        assert [(num, seed) for num, _, seed in found[4:]] == [(4, "2"), (5, "2"), (6, "3"), (7, "3")]
        assert {batch for _, batch, _ in found[4:6]} == {"8", "16"}
        order = Ledger.open(folder).sweep.order
        assert order is not None
        assert [("8", "16").index(batch) for _, batch, _ in found] == [order.locate(num)[0] for num in range(8)]
        assert len(plan_file.read(folder / PLAN_PATTERN.format(site="delta")).points) == 8

    def test_repetitions_are_added_once(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.main(["rerun", str(folder), "budget=null", "--repeats", "3"]) == 0
        before = launched(folder)
        assert app.main(["rerun", str(folder), "budget=null", "--repeats", "3"]) == 0
        assert "No cell gets a further repetition" in capsys.readouterr().out
        assert launched(folder) == before
        with Ledger(folder).lock():
            assert app.main(["rerun", str(folder), "budget=null", "--repeats", "4"]) == 2

    def test_budget_of_the_whole_sweep_limits_them(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Four points of 3 SU each were sent under a budget of 15: one more may go."""
        assert app.main(["rerun", str(folder), "--repeats", "3"]) == 0
        assert len(launched(folder)) == 5
        assert "budget=15: 15.0 SU so far, 3.0 SU more would exceed it" in capsys.readouterr().out

    def test_auto_adds_none_to_cells_with_points_in_a_plan_file(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert app.main(["rerun", str(folder), "--repeats", "auto"]) == 0
        assert "waits in plan.delta.yaml" in capsys.readouterr().out
        assert len(launched(folder)) == 4

    def test_numbers_of_a_carried_plan_continue_those_of_its_sweep(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan = folder / PLAN_PATTERN.format(site="delta")
        plan.write_text(plan.read_text().replace(UNREACHABLE[-1], "sites.delta.connect.method=local"))
        monkeypatch.chdir(tmp_path)
        _fake_runs(monkeypatch, tmp_path, {"8": STEADY, "16": STEADY})
        assert launch.main(["--plan", str(plan)]) == 0
        (there,) = (tmp_path / "runs").iterdir()
        assert app.main(["rerun", str(there), "--repeats", "3"]) == 0
        assert launched(there)[:4] == launched(folder)
        assert [(num, seed) for num, _, seed in launched(there)[4:]] == [(4, "2"), (5, "2")]

    def test_dry_run_shows_them_and_submits_nothing(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.main(["rerun", str(folder), "budget=null", "--repeats", "3", "--dry-run"]) == 0
        assert "Dry run: nothing was submitted" in capsys.readouterr().out
        assert len(launched(folder)) == 4

    @pytest.mark.parametrize(("repeats", "jobs"), [("1", 4), ("2", 3), ("auto", 2)])
    def test_each_is_one_more_job_of_several_points(
        self, repeats: str, jobs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "sweep"
        assert sweep(folder, *UNREACHABLE, "batch=8,16,32", f"repeats={repeats}", "points_per_job=9") == 0
        capsys.readouterr()
        assert app.main(["rerun", str(folder), "--repeats", "5", "--dry-run"]) == 0
        assert f"gpuH200x8 {3 * jobs} {jobs} " in " ".join(capsys.readouterr().out.split())

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            (["--repeats", "0"], "--repeats 0: must be a whole number above 0, or auto"),
            (["--repeats", "some"], "--repeats some: must be a whole number above 0, or auto"),
            (["--repeats", "auto", "--only", "timeout"], "use one of them"),
            (["seed=3", "--repeats", "auto"], "seed=3: repetitions have seeds of their own"),
            (["repeats_target=0", "--repeats", "auto"], "repeats_target=0.0: must lie between"),
        ],
    )
    def test_invalid_requests_are_refused(
        self, folder: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert app.main(["rerun", str(folder), *words]) == 2
        assert why in capsys.readouterr().err
        assert len(launched(folder)) == 4


def test_sweep_over_seeds_cannot_be_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(tmp_path / "sweep", *UNREACHABLE, "batch=2", "seed=0,1") == 0
    assert app.main(["rerun", str(tmp_path / "sweep"), "--repeats", "3"]) == 2
    assert "launch with repeats= instead" in capsys.readouterr().err


def _fake_runs(patch: pytest.MonkeyPatch, place: Path, rates: dict[str, list[float]]) -> None:
    """Make points of this machine write run directories with these steps/s, by batch and repetition.

    Only the worker is fake, because dozens of real runs take minutes; what judges them is real.
    """

    def run_fake(groups, ledger, code) -> None:
        for point in (point for group in groups for point in group.points):
            config, attempts = point.composed.build(), [(point.num, point.attempt)]
            # a process that cannot be checked: only its manifest counts
            ledger.append(Submitted(group=point.group, job_id="pid:1@elsewhere", attempts=attempts))
            facts = {"point": config.identity.point, "sweep_id": config.identity.sweep_id, "batch": config.batch}
            facts |= {"seed": config.seed, "site": config.site.name, "gpu": config.gpu.name}
            folder = write_run(
                place,
                config.identity.run_id,
                steps_per_s=rates[str(config.batch)][config.seed],
                config_hash=config_hash(config),
                overrides=[f"seed={config.seed}"],
                **facts,
            )
            target = Path(config.hydra.sweep.dir, config.hydra.sweep.subdir)
            target.parent.mkdir(exist_ok=True)
            folder.rename(target)

    patch.setattr("launchers.submit.submit.run_points", run_fake)


STEADY, WILD = [2.0] * 10, [1.0, 3.0] * 5


class TestAuto:
    @pytest.fixture(scope="class")
    def finished(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A sweep of two cells, one of which scatters too much to ever be narrow enough."""
        folder = tmp_path_factory.mktemp("finished") / "sweep"
        with pytest.MonkeyPatch.context() as patch:
            _fake_runs(patch, folder.parent, {"8": STEADY, "16": WILD})
            assert sweep(folder, *LOCAL, "batch=8,16", "repeats=auto", "repeats_max=5", "order_seed=1") == 0
        return folder

    @pytest.fixture
    def folder(self, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        _fake_runs(monkeypatch, tmp_path, {"8": STEADY, "16": WILD})
        return Path(shutil.copytree(finished, tmp_path / "sweep"))

    def test_only_cells_with_a_wide_interval_get_repetitions(self, folder: Path) -> None:
        seeds = {batch: [seed for _, found, seed in launched(folder) if found == batch] for batch in ("8", "16")}
        assert seeds == {"8": list("012"), "16": list("01234")}

    def test_reason_is_shown_for_every_cell(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.main(["rerun", str(folder), "--repeats", "auto"]) == 0
        narrow, wide = (line for line in capsys.readouterr().out.splitlines() if "a40" in line)
        assert narrow.split()[-9:] == ["3", "3", "0.00", "%", "2", "%", "0", "narrow", "enough"]
        # 1, 3, 1, 3, 1: mean 1.8, standard deviation 1.0954; t of 4 degrees of freedom is 2.7764
        assert "75.57 %" in wide
        assert "repeats_max=5 is reached" in wide

    def test_repetitions_get_their_predetermined_numbers(self, folder: Path, capsys) -> None:
        order = Ledger.open(folder).sweep.order
        assert order is not None
        found = [num for num, _, _ in launched(folder)]
        wanted = [order.number(0, r) for r in range(3)] + [order.number(1, r) for r in range(5)]
        assert found == sorted(wanted)
        assert [point["point"] for point in status_of(folder, capsys)] == found
        assert all((folder / str(num) / "attempt-1").is_dir() for num in found)

    def test_higher_repeats_max_continues(self, folder: Path) -> None:
        assert app.main(["rerun", str(folder), "--repeats", "auto", "repeats_max=6"]) == 0
        assert [seed for _, batch, seed in launched(folder) if batch == "16"] == list("012345")

    def test_plain_rerun_submits_only_failures(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.main(["rerun", str(folder)]) == 0
        assert "Nothing to submit" in capsys.readouterr().out
        failed = launched(folder)[0][0]
        _fail(folder / str(failed) / "attempt-1")
        assert app.main(["rerun", str(folder), "--only", "app_error"]) == 0
        attempts = {point["point"]: point["attempt"] for point in status_of(folder, capsys)}
        assert {num for num, attempt in attempts.items() if attempt == 2} == {failed}

    def test_cell_with_a_failure_is_left_alone(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = launched(folder)
        wide = next(num for num, batch, _ in before if batch == "16")
        _fail(folder / str(wide) / "attempt-1")
        assert app.main(["rerun", str(folder), "repeats_max=10", "--repeats", "auto"]) == 0
        assert "1 failed: `rerun` without --repeats submits them again" in capsys.readouterr().out
        assert launched(folder) == before

    def test_runs_of_another_configuration_do_not_count(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = launched(folder)
        assert app.main(["rerun", str(folder), "repeats_max=10", "data.num_images=17", "--repeats", "auto"]) == 0
        assert capsys.readouterr().out.count("none of its runs counts") == 2
        assert launched(folder) == before

    def test_runs_that_the_report_excludes_do_not_count(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        wide = next(num for num, batch, _ in launched(folder) if batch == "16")

        def cut(windows: list[dict]) -> list[dict]:
            return [{**window, "status": "interrupted"} for window in windows]

        rewrite_json(folder / str(wide) / "attempt-1", "windows.json", cut)
        assert app.main(["rerun", str(folder), "--repeats", "auto"]) == 0
        (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if "repeats_max" in line)
        assert row[row.index("%") - 3 : row.index("%") - 1] == ["5", "4"]


def _fail(run_dir: Path) -> None:
    rewrite_json(run_dir, "manifest.json", lambda old: {**old, "status": "failed", "reason": "app_error"})


def test_launcher_that_died_before_submitting_loses_no_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_runs(monkeypatch, tmp_path, {"8": STEADY, "16": STEADY})
    folder = tmp_path / "sweep"
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "take", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert sweep(folder, *LOCAL, "batch=8,16", "repeats=3") == 130
    assert not (folder / LEDGER).exists()
    assert app.main(["rerun", str(folder)]) == 0
    order = Ledger.open(folder).sweep.order
    assert order is not None
    places = [order.locate(num) for num in range(6)]
    assert launched(folder) == [(num, ("8", "16")[cell], str(r)) for num, (cell, r) in enumerate(places)]


def test_array_tasks_keep_the_order_and_queued_runs_are_awaited(
    testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    partition = ("scontrol", "update", "partitionname=gpuH200x8")
    testbed.run("delta", *partition, "state=down")
    folder = tmp_path / "sweep"
    try:
        words = ["gpu=h200", "batch=1,2,3", "profile=testbed", "repeats=auto", "order_seed=2"]
        assert launch.main(["-m", *words, *QUICK, f"hydra.sweep.dir={folder}"]) == 0
        assert f"rerun {folder} --repeats auto" in capsys.readouterr().out
        tasks = [int(point["job_id"].split("_")[1]) for point in status_of(folder, capsys)]
        assert tasks == list(range(9))
        order = RunOrder(cells=3, repeats=3, seed=0, order_seed=2)
        expected = [(str(cell + 1), str(r)) for r in range(3) for cell in order.shuffled(r)]
        assert [(batch, seed) for _, batch, seed in launched(folder)] == expected
        assert app.main(["rerun", str(folder), "--repeats", "auto"]) == 0
        assert capsys.readouterr().out.count("waits for 3 runs") == 3
    finally:
        for record in Ledger.open(folder).points().values():
            if record.last and record.last.job_id:
                testbed.run("delta", "scancel", record.last.job_id.split("_")[0])
                break
        testbed.run("delta", *partition, "state=up")
