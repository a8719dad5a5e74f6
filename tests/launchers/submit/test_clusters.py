"""Several clusters of one Slurm (`--clusters`): jobs are asked for, found, cancelled and recorded where they are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.config.site import ConnectConfig, SiteConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import templates_dir
from launchers.sites.slurm_facts import query_cluster
from launchers.slurm import sbatch
from launchers.slurm.environment import other_conf, shell_conf, unused_settings
from launchers.slurm.sbatch import requested_cluster
from launchers.status.cost import attempt_costs
from launchers.status.survey import poll_sweep
from launchers.sweep.events import Submitted
from launchers.sweep.ledger import Ledger, job_name
from tests.launchers.sweeps import a_point, a_sweep, age, plan
from tests.testbed.bed import Bed

FakeCommand = Callable[[str, str], Path]
QUICK = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2"]
TIMES_OUT = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
ACCEPTED = "echo Submitted batch job 7 on cluster far"
TIMES = "N/A|N/A|1:00:00"
TEMPLATE = """{% extends "base.sh.j2" %}
{% block directives %}
#SBATCH --clusters=CLUSTER
{% endblock %}
"""


def launched(folder: Path, *more: str) -> int:
    """Launch two points to delta and return the exit code."""
    (folder.parent / "slurm.conf").touch()
    keys = [f"connect.slurm_conf={folder.parent / 'slurm.conf'}", "account.value=bbxx-delta-gpu"]
    overrides = [*(f"sites.delta.{key}" for key in keys), "gpu=h200", "seed=0,1", f"hydra.sweep.dir={folder}"]
    return launch.main(["-m", *overrides, *more])


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def name_of(folder: Path) -> str:
    """Return the job name of the only array."""
    (event,) = [json.loads(line) for line in lines(folder / "ledger.jsonl") if '"planned"' in line]
    return str(event["job_name"])


def listing(cluster: str, *rows: str) -> str:
    """Return a squeue that lists these rows for one cluster, and nothing for another one or none."""
    printed = "".join(f"echo '{row}';" for row in (f"CLUSTER: {cluster}", *rows))
    return f'case "$*" in "-M {cluster} "*) {printed} esac'


@pytest.fixture
def directive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Let the template named cluster.sh.j2 send its jobs to a cluster."""
    templates = shutil.copytree(templates_dir(), tmp_path / "slurm_templates")
    monkeypatch.setattr(sbatch, "templates_dir", lambda: templates)
    sbatch._environment.cache_clear()

    def write(cluster: str) -> None:
        (templates / "cluster.sh.j2").write_text(TEMPLATE.replace("CLUSTER", cluster))

    yield write
    sbatch._environment.cache_clear()


@pytest.mark.subprocess
def test_every_command_is_sent_to_the_cluster_that_sbatch_named(
    tmp_path: Path, fake_command: FakeCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, sbatch = tmp_path / "sweep", fake_command("sbatch", ACCEPTED)
    assert launched(folder) == 0
    assert "delta (cluster far): array 7 with 2 points" in capsys.readouterr().out
    assert '"cluster":"far"' in lines(folder / "ledger.jsonl")[-1]
    rows = (f"7_{task}|PENDING|JobHeldUser||{TIMES}|{name_of(folder)}" for task in range(2))
    squeue, scancel = fake_command("squeue", listing("far", *rows)), fake_command("scancel", "")
    age(Ledger(folder))
    assert app.main(["status", str(folder)]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "2 points: 2 queued" in out
    assert "delta (cluster far) squeue ok" in out
    assert "`scontrol -M far release 7_" in out
    assert app.main(["rerun", str(folder), "--only", "lost"]) == 0
    assert app.main(["cancel", str(folder)]) == 0
    assert "delta (cluster far): 2 points cancelled" in capsys.readouterr().out
    assert len(lines(sbatch)) == 1
    assert all(line.startswith("-M far ") for line in lines(squeue))
    assert sorted(lines(scancel)[0].split()) == ["-M", "7_0", "7_1", "far"]


@pytest.mark.subprocess
def test_slurm_of_another_shell_is_not_believed(
    tmp_path: Path, fake_command: FakeCommand, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module sets SLURM_CONF, and a later shell does not load it. Regression: all was lost and submitted again."""
    folder, conf = tmp_path / "sweep", tmp_path / "a" / "slurm.conf"
    conf.parent.mkdir()
    conf.touch()
    for name in ("SLURM_JOB_ID", "SLURM_CONF_SERVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.setenv("SLURM_JWT", "token")
    here = ["sites.delta.connect.slurm_conf=null", "sites.delta.connect.hostnames=['.*']"]
    fake_command("sbatch", "[ $SLURM_JWT = token ] && echo Submitted batch job 7")
    assert launched(folder, *here) == 0
    rows = " ".join(f"'7_{task}|PENDING|Priority||{TIMES}|{name_of(folder)}'" for task in range(2))
    fake_command("squeue", f"""case "$SLURM_CONF" in {conf}) printf '%s\\n' {rows};; esac""")
    fake_command("sacct", "exit 0")
    scancel = fake_command("scancel", "")
    age(Ledger(folder))
    capsys.readouterr()
    for other in (None, "/etc/slurm/other.conf"):
        monkeypatch.delenv("SLURM_CONF") if other is None else monkeypatch.setenv("SLURM_CONF", other)
        for command in (["status"], ["rerun"], ["cancel"]):
            assert app.main([*command, str(folder)]) != 0
            printed = capsys.readouterr()
            text = " ".join((printed.out + printed.err).split())
            assert f"its jobs were submitted with SLURM_CONF={conf}, and this shell has" in text, command
            assert f"`export SLURM_CONF={conf}` first" in text
    assert not scancel.exists() or not scancel.read_text()
    (tmp_path / "link").symlink_to(conf.parent)
    assert other_conf(SiteConfig(name="delta"), [str(tmp_path / "link" / "slurm.conf"), None, "\0"]) is not None
    monkeypatch.setenv("SLURM_CONF", str(conf))
    assert other_conf(SiteConfig(name="delta"), [str(tmp_path / "link" / "slurm.conf"), None]) is None
    assert {str(point.state) for point in poll_sweep(Ledger.open(folder)).points} == {"queued"}
    monkeypatch.setenv("SLURM_JOB_ID", "3")  # in a job slurmd sets SLURM_CONF
    assert shell_conf(SiteConfig(name="delta")) is None


@pytest.mark.subprocess
@pytest.mark.parametrize("override", ["sites.delta.cluster=far", "sites.delta.template=cluster.sh.j2"])
def test_array_whose_sbatch_was_cut_off_is_searched_for_on_its_cluster(
    override: str, tmp_path: Path, fake_command: FakeCommand, directive: Callable[[str], None]
) -> None:
    directive("far")
    folder, sbatch = tmp_path / "sweep", fake_command("sbatch", TIMES_OUT)
    assert launched(folder, override) == 1
    name = name_of(folder)
    printed = f"""echo 'CLUSTER: far'; case "$*" in
    *'%F|%j') echo '7|{name}';;
    *'%i|%T|%j') echo '7_0|PENDING|{name}'; echo '7_1|PENDING|{name}';;
    *) echo '7_0|PENDING|Priority||{TIMES}|{name}'; echo '7_1|PENDING|Priority||{TIMES}|{name}';;
    esac"""
    fake_command("squeue", f'case "$*" in "-M far "*) {printed};; esac')
    sacct = fake_command("sacct", "exit 0")
    age(Ledger(folder))
    assert app.main(["rerun", str(folder), "--only", "lost,never_started"]) == 0
    assert len(lines(sbatch)) == 1
    assert all(line.startswith("-M far ") for line in lines(sacct))
    # The guard before sbatch finds it too, where nothing but the points' own cluster is known.
    (folder / "ledger.jsonl").write_text("")
    shutil.rmtree(folder / "jobs")
    assert app.main(["rerun", str(folder), "--only", "never_started"]) == 2
    assert len(lines(sbatch)) == 1


@pytest.mark.subprocess
def test_equal_job_ids_of_two_clusters_are_two_jobs(tmp_path: Path, fake_command: FakeCommand) -> None:
    (tmp_path / "slurm.conf").touch()
    site = SiteConfig(name="delta", connect=ConnectConfig(slurm_conf=str(tmp_path / "slurm.conf")))
    ledger = a_sweep(tmp_path / "sweep", [a_point(0), a_point(1)], {"delta": asdict(site)})
    for num, cluster in enumerate(("far", None)):
        plan(ledger, [a_point(num)], group=f"0{num}", job_name=job_name(f"0{num}", "s1"))
        ledger.append(Submitted(group=f"0{num}", job_id="7_%a", cluster=cluster, attempts=[(num, 1)]))
    age(ledger)
    row = f"{TIMES}|{job_name('0', 's1')}"
    rows = (f'"-M far "*) echo "7_0|RUNNING|None|n1|{row}0";;', f'*) echo "7_0|PENDING|Priority||{row}1";;')
    fake_command("squeue", f'case "$*" in {rows[0]} {rows[1]} esac')
    accounted = f"echo '7_0|01:00:00|{job_name('00', 's1')}'", f"echo '7_0|00:30:00|{job_name('01', 's1')}'"
    sacct = fake_command("sacct", f'case "$*" in "-M far "*) {accounted[0]};; *) {accounted[1]};; esac')
    scancel = fake_command("scancel", "")
    sweep = poll_sweep(ledger)
    assert [str(point.state) for point in sweep.points] == ["running", "queued"]
    attempt_costs(sweep)
    assert [line.startswith("-M far ") for line in lines(sacct)] == [True, False]
    assert app.main(["cancel", str(ledger.folder)]) == 0
    assert lines(scancel) == ["-M far 7_0", "7_0"]


@pytest.mark.subprocess
def test_array_of_that_name_and_id_on_another_cluster_is_one_too_many(
    tmp_path: Path, fake_command: FakeCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, sbatch = tmp_path / "sweep", fake_command("sbatch", ACCEPTED)
    assert launched(folder) == 0
    age(Ledger(folder))
    fake_command("sacct", "exit 0")
    # The points would now go to a second cluster, which has such an array already.
    fake_command("squeue", f'case "$*" in "-M near "*"|%j") echo "7_0|PENDING|{name_of(folder)}";; esac')
    changed = ["sites.delta.cluster=near", "--only", "lost"]
    assert app.main(["rerun", str(folder), *changed]) == 2
    assert "records array 7 (cluster far) as inpaint-s" in (err := capsys.readouterr().err)
    assert "delta (cluster near) has 7_0 of that name" in err
    assert len(lines(sbatch)) == 1


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("#SBATCH --clusters=delta", "delta"),
        ("#SBATCH --cluster=delta", "delta"),
        ("#SBATCH --clusters delta", "delta"),
        ("#SBATCH -M delta  # the other one", "delta"),
        ("#SBATCH -Mdelta", "delta"),
        ("#SBATCH -p gpu -M 'Delta'", "delta"),
        ("#SBATCH --clusters=grace\n#SBATCH --clusters=delta", "delta"),
        ("##SBATCH --clusters=delta", None),
        ("#SBATCH -p gpu # not -M delta", None),
        ("#SBATCH --cluster-constraint=fast", None),
        ("#SBATCH --mem=3G\n#SBATCH --mail-type=END", None),
        ("hostname\n#SBATCH --clusters=delta", None),  # sbatch reads no options after a command
    ],
)
def test_cluster_of_a_script_is_read_as_sbatch_reads_it(text: str, cluster: str | None) -> None:
    assert requested_cluster(SiteConfig(name="delta"), f"#!/bin/bash\n\n{text}\nset -e\n") == cluster


@pytest.mark.parametrize("value", ["grace,delta", "all"])
def test_several_clusters_are_refused(value: str) -> None:
    with pytest.raises(UserError, match=rf"--clusters={value}; the jobs of a site go to one cluster"):
        requested_cluster(SiteConfig(name="delta"), f"#!/bin/bash\n#SBATCH --clusters={value}\n")


@pytest.mark.subprocess
def test_doctor_asks_the_cluster_of_the_site(fake_command: FakeCommand) -> None:
    calls = fake_command("scontrol", "echo 'ClusterName = far'")
    assert query_cluster(SiteConfig(name="delta", cluster="far")).setting("ClusterName") == "far"
    assert set(lines(calls)) == {"-M far show config"}


class TestSettingsOfTheShell:
    SCRIPT = "#SBATCH --account=mine\n#SBATCH --partition=gpu\n#SBATCH --no-requeue\n#SBATCH --output='/a b/%A.out'\n"

    def unused(self, monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, str]:
        for name in [name for name in os.environ if name.startswith(("SBATCH_", "SLURM_"))]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return unused_settings(SiteConfig(name="delta"), "h200", self.SCRIPT)

    @pytest.mark.parametrize(
        ("name", "value", "instead"),
        [
            ("SBATCH_ACCOUNT", "yours", "sites.delta.account.value"),
            ("SBATCH_CLUSTERS", "far", "sites.delta.cluster"),
            ("SLURM_CLUSTERS", "far", "sites.delta.cluster"),
            ("SBATCH_PARTITION", "gpu-long", "sites.delta.gpus.h200.partition"),
            ("SBATCH_QOS", "low", "sites.delta.qos"),
            ("SBATCH_RESERVATION", "training", "sites.delta.reservation"),
            ("SBATCH_TIMELIMIT", "60", "time_min"),
            ("SBATCH_MEM_PER_CPU", "4G", "`#SBATCH --mem-per-cpu` in the template of delta"),
            ("SBATCH_WCKEY", "{0}", "`#SBATCH --wckey` in the template of delta"),
        ],
    )
    def test_one_that_would_change_the_job_is_named_with_what_does_the_same(
        self, name: str, value: str, instead: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.unused(monkeypatch, **{name: value}) == {f"{name}={value}": instead}

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("SBATCH_ACCOUNT", "mine"),  # as the script has it
            ("SBATCH_NO_REQUEUE", "1"),
            ("SBATCH_QOS", ""),
            ("SBATCH_OUTPUT", "log"),  # each job has its own
            ("SBATCH_DEBUG", "1"),
            ("SLURM_JOB_ACCOUNT", "yours"),  # of the job that the launch runs in, and nothing for sbatch
            ("SLURM_TIME_FORMAT", "%s"),
        ],
    )
    def test_one_that_changes_nothing_is_not_named(
        self, name: str, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.unused(monkeypatch, **{name: value}) == {}

    @pytest.mark.subprocess
    def test_launch_says_it_once(
        self,
        tmp_path: Path,
        fake_command: FakeCommand,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        fake_command("sbatch", "echo Submitted batch job 7")
        monkeypatch.setenv("SBATCH_RESERVATION", "training")
        arrays = "sites.delta.limits.max_array_size=1"
        assert launched(tmp_path / "sweep", arrays) == 0
        sentence = (
            "SBATCH_RESERVATION=training: a launch does not read this from the shell; use sites.delta.reservation"
        )
        assert capsys.readouterr().out.count(sentence) == 1
        assert launched(tmp_path / "reserved", arrays, "sites.delta.reservation=training") == 0
        assert "SBATCH_RESERVATION" not in capsys.readouterr().out
        (text, _) = (path.read_text() for path in (tmp_path / "reserved").rglob("sbatch.sh"))
        assert "#SBATCH --reservation=training\n" in text


@pytest.mark.faults
def test_sweep_of_a_template_for_the_other_cluster_is_followed_from_here(
    testbed: Bed,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    directive: Callable[[str], None],
) -> None:
    """This machine is a login node of grace; its scripts send the jobs to delta."""
    directive("delta")
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    folder = tmp_path / "sweep"
    overrides = [f"sites.delta.connect.slurm_conf={testbed.conf('grace')}", "sites.delta.template=cluster.sh.j2"]
    overrides += ["gpu=h200", "batch=1,2", "profile=testbed", *QUICK, "workload.min_measure_s=120"]
    assert launch.main(["-m", *overrides, f"hydra.sweep.dir={folder}"]) == 0
    ids = [str(record.last.job_id) for record in Ledger.open(folder).points().values()]

    def points() -> list[dict[str, str]]:
        capsys.readouterr()
        assert app.main(["status", str(folder), "--json"]) != 2
        shown: list[dict[str, str]] = json.loads(capsys.readouterr().out)["points"]
        return shown

    testbed.wait(lambda: {point["state"] for point in points()} == {"running"}, timeout_s=60)
    assert {point["cluster"] for point in points()} == {"delta"}
    ledger, again = folder / "ledger.jsonl", ["rerun", str(folder), "--only", "lost,never_started"]
    content = ledger.read_text()
    for each in (content, "".join(line for line in content.splitlines(True) if '"submitted"' not in line)):
        ledger.write_text(each)
        age(Ledger(folder))
        assert app.main(again) == 0
        assert "Nothing to submit" in capsys.readouterr().out
    assert app.main(["cancel", str(folder)]) == 0
    assert {state.split()[0] for state in testbed.ended("delta", ids)} == {"CANCELLED"}
    testbed.wait(lambda: {point["reason"] for point in points()} == {"cancelled"}, timeout_s=30)
