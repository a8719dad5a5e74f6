"""read_config_file: a value is what its declared type makes of it, and everything else is refused by file and line."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from inpaint_bench.cli import app
from inpaint_bench.core.config.yaml_file import MAX_BYTES, ConfigFileError, read_config_file
from inpaint_bench.core.paths import ROOT, conf_dir

A100 = "name: mine\ngpus:\n  a100:\n    "


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5760", 5760),
        ("'90'", 90),
        ("1:30:00", 90),
        ("90:30", 91),  # Slurm rounds up to whole minutes
        ("2-0", 2880),
        ("4-00:00:00", 5760),
        ("1-12:30", 2190),
        ("unlimited", 60 * 24 * 366),
        ("${oc.env:LIMIT}", "${oc.env:LIMIT}"),
    ],
)
def test_time_limit_in_the_formats_of_slurm(site: Path, text: str, value: object):
    site.write_text(f"{A100}max_minutes: {text}\n")
    assert read_config_file(site, "site")["gpus"]["a100"]["max_minutes"] == value


@pytest.mark.parametrize(
    "text",
    [
        "000123456789",
        "122700000000",
        "1_227",
        "1e3",
        "0x10",
        "on",
        "yes",
        "2026-11-20",
        "1:30:00",
        "true",
        "NaN",
        "007",
        "+5",
        "1.50",
    ],
)
def test_text_stays_as_it_was_written(site: Path, text: str):
    site.write_text(f"name: mine\naccount: {{value: {text}}}\nenvironment: {{variables: {{on: {text}}}}}\n")
    content = read_config_file(site, "site")
    assert content["account"]["value"] == text
    assert content["environment"]["variables"] == {"on": text}


def test_byte_order_mark_line_ends_and_aliases_are_understood(site: Path):
    site.write_bytes(
        b"\xef\xbb\xbfname: mine\r\nrequeue: {request: Yes}\r\ngpus:\r\n"
        b"  a100: &node {cpus_per_gpu: 8, partition: gpu}\r\n"
        b"  a40: {<<: *node, partition: gpu-a40}\r\n"
    )
    assert read_config_file(site, "site") == {
        "name": "mine",
        "requeue": {"request": True},
        "gpus": {
            "a100": {"cpus_per_gpu": 8, "partition": "gpu"},
            "a40": {"cpus_per_gpu": 8, "partition": "gpu-a40"},
        },
    }


BOMB = "name: mine\na: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: mine\nconnect:\n\tmethod: slurm", r":3: not YAML \(.*indent with spaces, not tabs\)"),
        ("name: mine\nqos: 'x", r":2: not YAML \(.*end of stream\)"),
        ("name: mine\n---\nname: mine", r":2: not YAML \(but found another document\)"),
        ("name: mine\nqos: *x", r":2: not YAML \(found undefined alias"),
        ("name: caf\xe9".encode("latin-1"), r":1: byte 0xe9 is not UTF-8; save the file as UTF-8"),
        ("", r": is empty; it needs keys and values"),
        ("- name: mine", r":1: needs keys and values at the top"),
        pytest.param("[" * 20000, r": not YAML \(nested too deeply\)", id="deep"),
        ("x" * (MAX_BYTES + 1), r": is larger than 64 KiB"),
        (BOMB.replace("\n", "\n  ").replace("name: mine\n", "name: mine\nconnect:\n"), r"connect\.a: no such key"),
        ("name: mine\nconstraint: &a [*a]", r":2: constraint\[0\]"),
        ("name: mine\nconnect: &a {<<: {<<: *a}}", r"nested|needs a block"),
        ("name: mine\nconnect: {<<: 5}", r":2: connect: << needs a block"),
        ("name: mine\nqos: a\nqos: b", r":3: qos: is given twice, first in line 2; keep one"),
        ("name: mine\ngpus:\n  a100: {}\n  a100: {}", r":4: gpus\.a100: is given twice, first in line 3"),
        ("name: mine\npartitions: {}", r":2: partitions: no such key at the top\. Valid: account, charging"),
        (
            "name: mine\nconect: {}",
            r":2: conect: no such key at the top\. Did you mean connect\? `inpaint-bench launch --help site` lists all",
        ),
        (
            "name: mine\nconnect:\n  methd: ssh",
            r":3: connect\.methd: no such key in connect\. Did you mean method\? `.* --help site`",
        ),
        ("name: mine\ngpus: {a40: {dcgm_url: null}}", r":2: gpus\.a40\.dcgm_url: was removed; profile=ncu"),
        ("name: mine\nconnect:\nmethod: ssh", r":2: connect: is empty; needs a block of keys and values"),
        ("name: mine\nconnect: ssh", r":2: connect=ssh: must be a block of keys and values"),
        ("name: mine\nconnect:\n  method:", r":3: connect\.method: is empty; needs a text"),
        ("name: mine\nconnect: {method: sh}", r":2: connect\.method=sh: not one of slurm, ssh.* Did you mean ssh"),
        ("name: mine\nconnect: {hostnames: grace}", r"connect\.hostnames=grace: must be a list, such as"),
        ("name: mine\nconnect: {hostnames: ['*.tamu']}", r":2: connect\.hostnames=\*\.tamu: not a regular expression"),
        ("name: mine\nqos: {a: b}", r":2: qos: needs a text, not a block of keys"),
        ("name: mine\nreservation: [a, b]", r":2: reservation: needs the name of a reservation, not a list"),
        ("name: mine\nqos: !env x", r":2: qos: has the tag !env; leave it out"),
        ("name: mine\n? [a]\n: b", r":2: a key must be a word"),
        ("name: mine\nuse_srun: maybe", r":2: use_srun=maybe: must be true or false"),
        ("name: mine\npreempt: {signal: SIGTREM}", r":2: preempt\.signal=SIGTREM: not one of .*Did you mean SIGTERM"),
        ("name: mine\nlimits: {max_submit_jobs: -1}", r":2: limits\.max_submit_jobs=-1: must lie between 1"),
        ("name: mine\nenvironment: {modules: ['a; rm x']}", r":2: environment\.modules='a; rm x': must be one module"),
        ("name: mine\nenvironment: {modules: [null]}", r":2: environment\.modules\[0\]: is empty; needs a text"),
        ("name: mine\nenvironment: {variables: {A-B: x}}", r"environment\.variables='A-B': must be a variable name"),
        ("name: mine\ngpus: [a100]", r":2: gpus: needs a block"),
        (f"{A100}cpus_per_gpu: 0", r":4: gpus\.a100\.cpus_per_gpu=0: must lie between 1 and 512"),
        (f"{A100}cpus_per_gpu: 08", r":4: gpus\.a100\.cpus_per_gpu=08: must be an integer between 1 and 512"),
        (f"{A100}mem_gb_per_gpu: 58G", r"mem_gb_per_gpu=58G: must be an integer between 1 and 8,192"),
        (f"{A100}mem_gb_per_gpu: 99999999999999999999", r"mem_gb_per_gpu=9{20}: must lie between"),
        (f"{A100}charge_factor: .nan", r"charge_factor=\.nan: must be a number"),
        (f"{A100}max_minutes: 2 days", r"max_minutes=2 days: must be a time limit in minutes or as MIN, MIN:SEC"),
        (f"{A100}max_minutes: auto", r"max_minutes=auto: must be a time limit .* or UNLIMITED"),
        (f"{A100}max_minutes: 400-0", r"max_minutes=576000: must lie between 1 and 527,040"),
        (f"{A100}partition: gpu,gpu-a40", r"partition='gpu,gpu-a40': must be the name of one partition"),
        (
            "name: mine\nlimits: {checked_on: 2026-13-01}",
            r":2: limits\.checked_on='2026-13-01': must be a date",
        ),
        ("name: other", r": name is other, it must be mine, as the file"),
    ],
)
def test_wrong_site_file_is_refused_by_line(site: Path, text: str | bytes, message: str):
    site.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigFileError) as refused:
        read_config_file(site, "site")
    error = str(refused.value)
    assert error.startswith(str(site))
    assert re.search(message, error.removeprefix(str(site)))
    assert len(error.splitlines()) == 1


def test_what_is_no_file_is_refused(tmp_path: Path):
    folder, loop, pipe = (tmp_path / f"{name}.yaml" for name in ("folder", "loop", "pipe"))
    folder.mkdir()
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    for path, reason in ((folder, "Is a directory"), (loop, "symbolic links"), (pipe, "is not a file")):
        with pytest.raises(ConfigFileError, match=reason):
            read_config_file(path, "site")


@pytest.mark.parametrize(
    ("group", "package", "text", "message"),
    [
        ("profile", "_global_", "site: {qos: a, qos: b}", r":1: site\.qos: is given twice"),
        ("profile", "_global_", "tiem_min: 5", r":1: tiem_min: no such key at the top\. Did you mean time_min"),
        (
            "profile",
            "_global_",
            "sites: {grace: {acount: {}}}",
            r":1: sites\.grace\.acount: no such key in sites\.grace",
        ),
        ("recipe", None, "tf32: 1:30", r":1: tf32=1:30: must be true or false"),
        ("model", None, "unet: {channels: 010}", r":1: unet\.channels=010: is read as 10; put it in"),
        ("model", None, "unet: {channels: 1_0}", r":1: unet\.channels=1_0: is read as 10; put it in quotes"),
        ("model", None, "unet: {channels: 0x10}", r":1: unet\.channels=0x10: is read as 16; put it in quotes"),
        ("hydra/job_logging", None, "root: {level: 1}\nroot: {}", r":2: root: is given twice"),
    ],
)
def test_other_groups_are_read_in_the_same_way(
    tmp_path: Path, group: str, package: str | None, text: str, message: str
):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigFileError, match=re.escape(str(path)) + message):
        read_config_file(path, group, package)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("defaults: [override /recipe: cpu]\ntime_min: 1:00:00", {"time_min": 60}),
        ("time_min: auto\nbatch: auto", {"time_min": "auto", "batch": "auto"}),
        (
            "sites: {grace: {account: {value: 000123456789}}}",
            {"sites": {"grace": {"account": {"value": "000123456789"}}}},
        ),
        ("# nothing", {}),
    ],
)
def test_values_of_a_profile(tmp_path: Path, text: str, content: dict[str, Any]):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert content.items() <= read_config_file(path, "profile", "_global_").items()


FILES = sorted(conf_dir().rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(conf_dir())))
def test_our_own_files_have_the_values_that_omegaconf_reads(path: Path):
    group = "" if path.parent == conf_dir() else str(path.parent.relative_to(conf_dir()))
    package = "_global_" if "@package _global_" in path.read_text() else None
    assert OmegaConf.create(read_config_file(path, group, package)) == OmegaConf.load(path)


def test_damaged_site_file_is_read_or_refused_in_one_line(site: Path):
    """Regression: a block that became one text was printed in full."""
    original = (conf_dir() / "site" / "delta.yaml").read_bytes().replace(b"name: delta", b"name: mine")
    drawn = random.Random(11)
    pieces = b"\t,\n,  ,: ,- ,*,&a ,<<: ,[,},',\",#,|,!,\x00,\xe9,%".split(b",")
    refused = []
    for _ in range(150):
        content = bytearray(original)
        for _ in range(drawn.randint(1, 3)):
            start = drawn.randrange(len(content))
            content[start : start + drawn.choice((0, 1, 40))] = drawn.choice(pieces)
        site.write_bytes(content)
        try:
            read_config_file(site, "site")
        except ConfigFileError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert [error for error in refused if not re.fullmatch(rf"{site}(:\d+)?: .+", error)] == []


@pytest.mark.slow  # composes with Hydra
def test_site_file_of_the_documentation_has_all_that_a_script_needs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "sites.md").read_text()
    (example,) = re.findall(r"```yaml\n(name: mine\n.*?)```", text, re.DOTALL)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mine.yaml").write_text(example)
    sweep = tmp_path / "sweep"
    command = ["launch", "-m", "site=mine", "gpu=h100", "batch=16", "dry_run=true", f"hydra.sweep.dir={sweep}"]
    assert app.main([*command, "--config-dir", str(tmp_path)]) == 0
    (script,) = (sweep / "sbatch").iterdir()
    asked = script.read_text()
    for option in ("account=ab1234", "partition=gpu", "gres=gpu:h100:1", "cpus-per-task=12", "mem=120G"):
        assert f"#SBATCH --{option}\n" in asked


def test_aliases_of_aliases_in_a_block_of_any_content_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(
        BOMB.replace("name: mine\n", "name: bomb\nunet:\n").replace("\n", "\n  ").replace("\n  unet", "\nunet")
    )
    with pytest.raises(ConfigFileError, match="too many values, perhaps by aliases"):
        read_config_file(path, "model")
