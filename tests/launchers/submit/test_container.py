"""Jobs in a container. No Apptainer can be installed here: on the bed a stand-in runs what follows the image."""

import os
import sys

import pytest

from inpaint_bench import launch
from inpaint_bench.core.config.site import Container
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import PACKAGE
from launchers.points.input_paths import InputPaths
from launchers.points.point import group_points
from launchers.points.site_catalog import Reachability
from launchers.slurm.sbatch import render
from tests.faults.support import ROOT, SHORT, WORKLOAD, reasons

CONTAINER = "environment.container"


def test_definition_has_the_interpreter_that_jobs_start():
    definition = (PACKAGE.parent / "apptainer.def").read_text()
    assert f"{Container().python} -c" in definition
    sources = [line.split()[0] for line in definition.splitlines() if "/opt/source/" in line]
    assert len(sources) > 5
    assert all((PACKAGE.parent / source).exists() for source in sources)


def test_folder_with_a_comma_cannot_be_bound(points, tmp_path):
    (group,) = group_points(points(f"gpu=a40 sites.grace.{CONTAINER}.image=/image.sif"))
    with pytest.raises(UserError, match="comma"):
        render(group, tmp_path / "a,b", tmp_path, "s")


def test_data_that_the_container_does_not_show_is_refused(points, tmp_path):
    reachable = Reachability(ok=True, reason="")
    line = f"gpu=h200 sites.delta.{CONTAINER}.image=/image.sif data=folder data.root=/elsewhere/photos"
    (point,) = points(line)
    with pytest.raises(UserError, match=r"data.root=/elsewhere/photos: the container of site=delta does not show it"):
        InputPaths().check(point.bench, point.site, reachable)
    (point,) = points(f"{line} sites.delta.{CONTAINER}.binds=['/else/where:/elsewhere:ro']")
    with pytest.raises(UserError, match=r"data.root=/elsewhere/photos.*(no such|does not exist|not found)"):
        InputPaths().check(point.bench, point.site, reachable)


def test_training_in_a_container_does_not_count_on_requeueing_itself(points):
    line = "gpu=a40 workload.train_steps=9"
    plain, contained = points(line, f"{line} sites.grace.{CONTAINER}.image=/image.sif")
    assert plain.bench.max_requeues(plain.site) > 0
    assert contained.bench.max_requeues(contained.site) == 0


@pytest.mark.slurm
def test_job_on_slurm_runs_through_the_program(testbed, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    folder, image, calls = tmp_path / "sweep", tmp_path / "image.sif", tmp_path / "calls"
    line = ["gpu=h200", "workload.name=fine", SHORT, f"hydra.sweep.dir={folder}", "wait=true"]
    line += [f"sites.delta.{CONTAINER}.image={image}", f"sites.delta.{CONTAINER}.python={sys.executable}"]
    line += [
        f"sites.delta.{CONTAINER}.binds=[/opt]",
        f"sites.delta.environment.variables.PATH={tmp_path}:/usr/bin:/bin",
    ]
    assert launch.main(["-m", *WORKLOAD, *line]) == 2
    assert "image.sif: no such file" in capsys.readouterr().err
    image.touch()
    program = tmp_path / "apptainer"
    program.write_text(
        f'#!/bin/bash\necho "$PYTHONNOUSERSITE $@" >> {calls}\n'
        f'while [ "$1" != {image} ]; do shift; done\nshift\nexec "$@"\n'
    )
    program.chmod(0o755)
    assert launch.main(["-m", *WORKLOAD, *line]) == 0
    assert reasons(folder, capsys) == [("completed", None)]
    expected = f"1 exec --nv --bind={folder} --bind=/opt {image} {sys.executable} -u -m launchers.entry "
    expected += f"{folder}/points 0.yaml"
    assert calls.read_text().startswith(expected)
    assert len(calls.read_text().splitlines()) == 1
