"""`doctor site` looks for the paths that a site file names, and for the program that runs its container."""

import pytest

from inpaint_bench.core import child
from inpaint_bench.core.config.site import Container, SiteConfig, SiteEnvironment, Storage
from launchers.sites.compare import Agreement, compare_container, compare_paths
from launchers.sites.slurm_facts import Cluster


def findings(image, storage=None, **container):
    environment = SiteEnvironment(container=Container(image=image and str(image), **container), modules=["absent"])
    site = SiteConfig(name="here", environment=environment, storage=storage or Storage())
    cluster = Cluster(lambda *command: child.run(command, timeout_s=10).stdout.decode() if command[0] == "sh" else "")
    return {finding.name: finding for finding in (*compare_paths(site, cluster), *compare_container(site))}


def test_site_without_a_container_has_no_findings():
    assert findings(None) == {}


@pytest.mark.subprocess
def test_image_and_program_are_found(tmp_path, monkeypatch):
    image, program = tmp_path / "image.sif", tmp_path / "bin" / "singularity"
    image.touch()
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    # As a login shell finds it.
    (tmp_path / ".bash_profile").write_text(f"PATH={program.parent}:$PATH; echo a message of the day\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = findings(image, command="singularity")
    assert (found["image"].agreement, found["image"].reported) == (Agreement.SAME, "found")
    assert (found["command"].agreement, found["command"].reported) == (Agreement.SAME, str(program))


@pytest.mark.subprocess
@pytest.mark.parametrize("greeting", ["/home is 80 % full", "/usr/bin/apptainer is gone\\n", "\\033[31mWelcome"])
def test_a_greeting_is_not_taken_for_the_program(greeting, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "singularity"
    program.parent.mkdir()
    program.touch(mode=0o755)
    (tmp_path / ".bash_profile").write_text(f"PATH={program.parent}:$PATH; printf '{greeting.replace('%', '%%')}'\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert findings(tmp_path, command="singularity")["command"].reported == str(program)


@pytest.mark.subprocess
def test_missing_image_differs_and_a_missing_program_is_unknown(tmp_path):
    found = findings(tmp_path / "absent.sif")
    assert found["image"].agreement is Agreement.DIFFERS
    assert found["image"].reported == f"not found: {tmp_path / 'absent.sif'}"
    assert found["command"].agreement is Agreement.UNKNOWN
    assert "on a compute node" in found["command"].note


@pytest.mark.subprocess
def test_folders_that_a_site_file_names_are_looked_for(tmp_path):
    absent = str(tmp_path / "it is absent")
    storage = Storage(scratch=absent, node_tmp=absent, file_quotas={str(tmp_path): 10})
    found = findings("/tmp", storage, binds=[f"{tmp_path}:/data:ro", f"{absent}:/more"])
    agreement = {name: finding.agreement for name, finding in found.items() if name != "command"}
    assert agreement == {
        **dict.fromkeys(("image", "file_quotas"), Agreement.SAME),
        **dict.fromkeys(("binds", "scratch"), Agreement.DIFFERS),
        "node_tmp": Agreement.UNKNOWN,  # a compute node may have it
    }
    assert found["binds"].reported == f"not found: {absent}"
