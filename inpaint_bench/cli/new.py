"""`new`: the first file of a site or of a GPU, filled from what this machine's Slurm or NVML reports."""

import math
import re
import shlex
import socket
from contextlib import suppress
from pathlib import Path

from inpaint_bench.core.config.bench import GpuConfig
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.config.validation import NEW_NAME
from inpaint_bench.core.console import echo
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.estimates import rates
from inpaint_bench.core.key_docs import comment
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.records import Device
from inpaint_bench.telemetry.driver import DriverError
from inpaint_bench.telemetry.nvml.real import RealNvml
from inpaint_bench.telemetry.sampling.devices import describe
from launchers.sites.draft import TO_TYPE, draft
from launchers.sites.site_file import as_yaml, not_writable
from launchers.sites.slurm_facts import query_cluster


def run_new(kind: str, name: str, config_dir: Path | None) -> None:
    """Write the file, and print what to type and the next commands. Raises UserError."""
    if not NEW_NAME.fullmatch(name):
        raise UserError(f"{name}: cannot be the name of a {kind}; use letters, digits, _ and -, with a letter first")
    path = (config_dir or conf_dir()) / kind / f"{name}.yaml"
    for file in (path, conf_dir() / kind / path.name):
        if file.exists() or file.is_symlink():
            raise UserError(f"{file}: exists; edit it, or choose another name")
    if reason := not_writable(path):
        raise UserError(f"{path}: {reason}, or name a folder of your own with --config-dir")
    option = f" --config-dir {shlex.quote(str(config_dir))}" if config_dir else ""
    if kind == "site":
        cluster, hosts = query_cluster(SiteConfig(name=name)), (socket.gethostname(), socket.getfqdn())
        text, gpus, remark = draft(name, cluster, rates.cards(config_dir), hosts)
        commands = [f"doctor site {name}{option}", f"launch -m{option} site={name} gpu={gpus[0]} batch=16 dry_run=true"]
    else:
        text, remark = _gpu_text(name)
        local = f"site=local sites.local.gpus.{name}.request=none"
        commands = [f"launch -m{option} {local} gpu={name} batch=16 dry_run=true"]
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("x") as out:
            out.write(text)
    except OSError as error:
        raise UserError(f"{path}: not written ({error.strerror})") from None
    marked = ", ".join(f"{number}" for number, line in enumerate(text.splitlines(), 1) if f": {TO_TYPE}" in line)
    echo(
        f"{path}: written{f'; lines {marked} are marked {TO_TYPE}: type them' if marked else ''}",
        *filter(None, [remark]),
    )
    echo("then:", *(f"  inpaint-bench {command}" for command in commands))


def _gpu_text(name: str) -> tuple[str, str]:
    """Return the text of the file, with what NVML reports of a GPU with that name, and why there is nothing."""
    devices = {gpu.name: gpu for gpu in listed() if gpu.name}
    # rtx4090 is the GeForce RTX 4090, and t4 is no T400.
    pattern = r"[\W_]*".join(re.sub(r"[\W_]", "", name.lower()))
    matching = [full for full in devices if re.search(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])", full.lower())]
    gpu = devices[matching[0]] if len(matching) == 1 else Device(uuid="")
    keys = {
        "name": name,
        "title": gpu.name,
        "nvml_name": gpu.name and re.sub(r"\\([ -])", r"\1", re.escape(gpu.name)) + "$",
        "memory_gb": math.ceil(gpu.memory_mib / 1024) if gpu.memory_mib else None,
        **dict.fromkeys(("memory_type", "bandwidth_gb_s", "bf16_dense_tflops")),
        "power_limit_w": gpu.power_limit_w,
        "max_sm_clock_mhz": gpu.max_sm_clock_mhz or 0,
        "source": None,
    }
    head = f"# What is marked {TO_TYPE} is yet to be typed, from the data sheet.\n"
    values = {key: TO_TYPE if value is None else as_yaml(value) for key, value in keys.items()}
    remark = "" if gpu.name else f"NVML lists {', '.join(devices) or 'no GPU'} here"
    return head + "".join(f"{key}: {value} # {comment(GpuConfig, key)}\n" for key, value in values.items()), remark


def listed() -> list[Device]:
    """Return the GPUs of this machine; none without a driver."""
    with suppress(DriverError), RealNvml() as nvml:
        return [describe(nvml, nvml.device(uuid)) for uuid in nvml.uuids()]
    return []
