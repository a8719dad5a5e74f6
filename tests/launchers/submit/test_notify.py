"""The end of a sweep: a mail of Slurm's for each array."""

import pytest

from inpaint_bench import launch
from launchers.status.survey import sites_of
from launchers.sweep.ledger import Ledger
from tests.faults.support import ROOT, WORKLOAD
from tests.launchers.sweeps import exited_process, sweep_of_jobs


@pytest.mark.subprocess
def test_sweep_of_an_earlier_version_with_removed_keys_stays_readable(tmp_path):
    ledger = Ledger.open(sweep_of_jobs(tmp_path / "sweep", [exited_process()]))
    ledger.sweep.sites["local"]["cpu_jobs"] = {"account": "bbxx-delta-cpu"}
    assert sites_of(ledger)["local"].name == "local"


@pytest.mark.slurm
def test_slurm_writes_once_about_each_array_and_more_points_than_an_array_holds_all_run(testbed, monkeypatch, tmp_path):
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder, mail = tmp_path / "sweep", f"me-{tmp_path.name}@example.org"
    line = ["gpu=a40,h200", "workload.name=fine,app_error", "sites.grace.limits.max_array_size=1"]
    line += ["workload.min_measure_s=12", f"notify.mail={mail}", f"hydra.sweep.dir={folder}"]
    assert launch.main(["-m", *WORKLOAD, *line]) == 0
    # Grace has two arrays of one task each, and delta one of two.
    files = {site: testbed.plan.home(site) / "log" / "mail" for site in ("grace", "delta")}

    def mails() -> dict[str, int]:
        return {site: file.read_text().count(f"{mail}: ") if file.exists() else 0 for site, file in files.items()}

    testbed.wait(lambda: mails() == {"grace": 2, "delta": 1}, timeout_s=200, what="the mails of both sites")
    manifests = [file.read_text() for file in folder.glob("*/attempt-*/manifest.json")]
    assert len(manifests) == 4
    assert not any(mail in text for text in manifests)
