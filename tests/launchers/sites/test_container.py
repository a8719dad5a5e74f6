"""`doctor site` looks for the image of a site's container and for the program that runs it."""

import pytest

from inpaint_bench.core.config.site import Container, SiteConfig, SiteEnvironment
from launchers.sites.container import compare_container
from launchers.sites.findings import Agreement


def findings(image, **container):
    environment = SiteEnvironment(container=Container(image=image and str(image), **container), modules=["absent"])
    return {finding.name: finding for finding in compare_container(SiteConfig(name="here", environment=environment))}


def test_site_without_a_container_has_no_findings():
    assert findings(None) == {}


@pytest.mark.subprocess
def test_image_and_program_are_found(tmp_path, monkeypatch):
    image, program = tmp_path / "image.sif", tmp_path / "bin" / "singularity"
    image.write_bytes(b"x" * 20_000_000)
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    # As a login shell finds it.
    (tmp_path / ".bash_profile").write_text(f"PATH={program.parent}:$PATH; echo a message of the day\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = findings(image, command="singularity")
    assert (found["image"].agreement, found["image"].reported) == (Agreement.SAME, "0.02 GB")
    assert (found["command"].agreement, found["command"].reported) == (Agreement.SAME, str(program))


@pytest.mark.subprocess
def test_missing_image_differs_and_a_missing_program_is_unknown(tmp_path):
    found = findings(tmp_path / "absent.sif")
    assert (found["image"].agreement, found["image"].reported) == (Agreement.DIFFERS, "no such file")
    assert found["command"].agreement is Agreement.UNKNOWN
    assert "on a compute node" in found["command"].note
