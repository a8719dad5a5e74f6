"""Several ranks on this machine, with gloo: they compute what one rank does, and end together. Real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.child import is_descendant
from inpaint_bench.core.config.conflicts import conflict
from inpaint_bench.core.config.levers import DIVIDED_WEIGHTS
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.core.files import read_json
from inpaint_bench.core.records import RankFacts
from inpaint_bench.models.parallel.data_parallel import owners
from inpaint_bench.ranks import engine
from tests.run.test_resume import ROOT, WAIT_S, start

from .endless_group import LEAVING_S
from .support import TINY, bench, last_given, steps_of

pytestmark = pytest.mark.timeout(1200)

STEPS = 6
LORA = ("recipe.lora_rank=4", "recipe.lora_text_encoder=true", "recipe.lora_targets=all")
FLUX = ("model=tiny_flux_fill", "data.resolution_px=64")
FLUX2 = ("model=tiny_flux2", "data.resolution_px=64")
SD3 = ("model=tiny_sd35", "workload=finetune_text2image", "data.resolution_px=64")
PIPELINE = (*FLUX, "recipe.sharding=pipeline")
OF_SEVERAL_RANKS = ("recipe.sharding", "recipe.bucket")
LONG = "workload.min_measure_s=900"


def manifest(run_dir: Path) -> dict[str, Any]:
    record: dict[str, Any] = read_json(run_dir / "manifest.json") or {}
    return record


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while ((manifest(run_dir).get("progress") or {}).get("step") or 0) < step:
        assert time.monotonic() < deadline, manifest(run_dir)
        time.sleep(0.2)


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in sorted(steps_of(run_dir), key=lambda row: row["step"])]


def on_ranks(module: str, ranks: int, *arguments: str) -> list[str]:
    """Output of each rank."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=WAIT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks
    return outputs


@cache
def losses_of_one_rank(*overrides: str) -> list[float]:
    (output,) = on_ranks("tests.run.rank_losses", 1, "", str(STEPS), "gpus=1", *overrides)
    return [float(line) for line in output.splitlines()]


def losses_of_two_ranks(store: Path, *overrides: str) -> list[list[float]]:
    outputs = on_ranks("tests.run.rank_losses", 2, str(store), str(STEPS), "gpus=2", *overrides)
    return [[float(line) for line in output.splitlines()] for output in outputs]


COSINE = (f"workload.train_steps={STEPS}", "workload.schedule=cosine", "workload.schedule_warmup=1")


@pytest.mark.parametrize(
    ("micro_batches", "options"),
    [
        (1, ()),
        (2, ("recipe.bucket_view=true", "recipe.bucket_mb=1")),
        (2, ("recipe.exchange=in_place",)),
        (2, ("recipe.exchange=peer_copies",)),
        (2, ("recipe.sharding=zero1", "recipe.bucket_view=true")),
        (2, ("recipe.sharding=fsdp2",)),
        (2, ("recipe.sharding=tensor",)),
        (2, (*FLUX, "recipe.sharding=tensor")),
        pytest.param(2, (*FLUX2, "recipe.sharding=tensor"), marks=pytest.mark.faults),
        (2, (*SD3, "recipe.sharding=tensor")),
        (2, LORA),
        (1, (*FLUX, "recipe.sharding=pipeline", "recipe.lora_rank=4")),  # with location tokens
        (2, (*SD3, "recipe.sharding=pipeline")),  # without
        (1, (*COSINE, "recipe.sharding=zero1", "workload.max_grad_norm=0.5")),
        pytest.param(1, (*COSINE, "recipe.sharding=fsdp2"), marks=pytest.mark.faults),
        pytest.param(1, (*SD3, *COSINE, "recipe.sharding=pipeline"), marks=pytest.mark.faults),
        (1, ("workload.optimizer=adafactor", "workload.max_grad_norm=0.5")),
        (1, (*FLUX2, "recipe.sharding=pipeline", "recipe.lora_rank=4")),  # the border is that of both kinds of blocks
    ],
)
def test_losses_are_those_of_one_rank_with_the_whole_batch(
    tmp_path: Path, micro_batches: int, options: tuple[str, ...]
) -> None:
    several = tuple(option for option in options if option.startswith(OF_SEVERAL_RANKS))
    everywhere = (option for option in options if option not in several)
    both = ("workload.learning_rate=0.001", f"recipe.accumulate={micro_batches}", *everywhere)
    alone = losses_of_one_rank("batch=4", *both)
    first, second = losses_of_two_ranks(tmp_path / "store", "batch=2", *both, *several)
    assert len(alone) == STEPS
    assert first == second
    assert first == pytest.approx(alone, rel=0, abs=1e-10)
    assert abs(alone[-1] - alone[0]) > 1e-3, "the weights changed"


class TestRun:
    def test_an_exchange_that_the_comparison_with_the_reference_began_is_finished(self, tmp_path: Path) -> None:
        assert start(tmp_path, "gpus=2", "recipe.exchange=peer_copies").wait(WAIT_S) == 0
        record = manifest(tmp_path)
        assert record["parity"]["gradient_rel"] == 0.0
        assert [lever["active"] for lever in record["levers"] if lever["field"] == "exchange"] == [True]

    def test_counts_the_images_of_all_ranks_and_names_them(self, tmp_path: Path) -> None:
        assert start(tmp_path / "run", "gpus=2").wait(WAIT_S) == 0
        assert start(tmp_path / "one", "batch=4").wait(WAIT_S) == 0
        record = manifest(tmp_path / "run")
        assert (record["status"], record["gpus"], record["nodes"], record["batch"]) == ("completed", 2, 1, 2)
        assert [(rank["rank"], rank["local_rank"], rank["steps"]) for rank in record["ranks"]] == [
            (0, 0, None),
            (1, 1, 4),
        ]
        assert {row["images"] for row in steps_of(tmp_path / "run")} == {4}
        assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
        assert app.main(["merge", str(tmp_path / "run"), "-o", str(tmp_path / "merged")]) == 0
        run = pl.read_parquet(tmp_path / "merged" / "runs.parquet").row(0, named=True)
        assert run["valid"], run["invalid_reason"]
        assert (run["gpus"], run["batch"], run["images"]) == (2, 2, 12)

    @pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.faults), 1])
    def test_killed_rank_ends_it_with_the_reason(self, tmp_path: Path, rank: int) -> None:
        run = start(tmp_path, "gpus=2", LONG)
        wait_for_step(tmp_path, 3)
        pids = [one["pid"] for one in manifest(tmp_path)["ranks"]]
        os.kill(pids[rank], signal.SIGKILL)
        assert run.wait(WAIT_S) == 1
        record = manifest(tmp_path)
        assert (record["status"], record["reason"]) == ("failed", "app_error")
        assert record["message"].startswith(f"rank {rank} (process {pids[rank]} on ")
        assert record["message"].endswith("ended without a message, by SIGKILL")
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    @pytest.mark.faults  # waits 120 s
    @pytest.mark.parametrize("rank", [0, 1])
    def test_stopped_rank_ends_it_with_the_reason(self, tmp_path: Path, rank: int) -> None:
        run = start(tmp_path, "gpus=2", LONG)
        wait_for_step(tmp_path, 3)
        pids = [one["pid"] for one in manifest(tmp_path)["ranks"]]
        os.kill(pids[rank], signal.SIGSTOP)
        assert run.wait(180) == 1
        record = manifest(tmp_path)
        assert (record["status"], record["reason"]) == ("failed", "app_error")
        assert record["message"].startswith(f"rank {rank} (process {pids[rank]} on ")
        assert record["message"].endswith("was stopped for 120 s, by SIGSTOP for example")
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    @pytest.mark.faults
    @pytest.mark.parametrize("by", [signal.SIGUSR2, signal.SIGTERM, signal.SIGINT])
    def test_signal_ends_in_a_checkpoint(self, tmp_path: Path, by: signal.Signals) -> None:
        """Slurm signals all processes of a step; a terminal signals those of the group of the first."""
        run = start(tmp_path, "gpus=2", "workload.train_steps=1000", "workload.validate_every=0", "data.num_images=64")
        wait_for_step(tmp_path, 3)
        pids = [one["pid"] for one in manifest(tmp_path)["ranks"]]
        for pid in [run.pid, *(pids if by != signal.SIGINT else [])]:
            os.kill(pid, by)
        assert run.wait(WAIT_S) == 128 + by
        record = manifest(tmp_path)
        assert record["status"] == "interrupted"
        assert record["message"] == f"received {by.name}; resumes from step-{record['progress']['step']:08}"
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    def test_failed_rank_ends_it_with_its_own_reason(self, tmp_path: Path) -> None:
        assert start(tmp_path, "gpus=3", LONG, "workload.module=tests.run.failing_rank").wait(WAIT_S) == 1
        record = manifest(tmp_path)
        assert (record["status"], record["reason"]) == ("failed", "oom_host")
        assert record["message"].startswith("rank 2 (process ")
        assert record["message"].endswith("MemoryError: no host memory for another batch")

    def test_process_group_that_does_not_end_is_given_up(self, tmp_path: Path) -> None:
        assert start(tmp_path, "gpus=2", "workload.module=tests.run.endless_group").wait(WAIT_S) == 1
        run = manifest(tmp_path)
        assert (run["status"], run["reason"]) == ("failed", "app_error")
        assert run["message"] == f"torch's process group did not end within {LEAVING_S:g} s"

    @pytest.mark.usefixtures("real_processes")  # an interpreter ends with more than a fork does
    @pytest.mark.parametrize("how", ["exit", pytest.param("hang", marks=pytest.mark.faults)])  # waits 120 s
    def test_end_of_a_rank_after_the_run_changes_nothing(self, tmp_path: Path, how: str) -> None:
        assert start(tmp_path, "gpus=2", "workload.module=tests.run.late_exit", LATE=how).wait(WAIT_S) == 0
        assert manifest(tmp_path)["status"] == "completed"
        assert not any(Path(f"/proc/{rank['pid']}").exists() for rank in manifest(tmp_path)["ranks"])

    def test_signal_of_the_agent_is_told_from_that_of_slurm(self, tmp_path: Path) -> None:
        """Else rank 0 would requeue its job near a time limit because another rank has died."""
        other = subprocess.Popen(["sleep", "600"])
        rank = RankFacts(rank=1, local_rank=1, node=socket.gethostname(), pid=other.pid, device="cpu")
        assert not engine.is_ending(tmp_path, [rank])
        other.kill()
        other.wait()
        assert engine.is_ending(tmp_path, [rank])
        assert not engine.is_ending(tmp_path, [msgspec.structs.replace(rank, node="another")])
        engine.record_failure(tmp_path, 3, 42, " ended")
        assert engine.is_ending(tmp_path, [])

    @pytest.mark.usefixtures("real_processes")  # else rank 1 starts sooner than rank 0, and finds it first
    def test_mistake_is_told_without_a_traceback(self, tmp_path: Path) -> None:
        overrides = last_given(*TINY[3:], "gpus=2", "recipe=baseline", "gpu=h200", f"hydra.run.dir={tmp_path}")
        # The launch would refuse it before the ranks start, as a job does not.
        code = "import sys; from inpaint_bench import launch; launch._check_single = print; sys.exit(launch.main())"
        command = [sys.executable, "-c", code, *overrides]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
        assert run.returncode == 2
        assert "Traceback" not in run.stderr
        assert run.stderr.splitlines()[-1].startswith("error: recipe baseline needs CUDA, which is not available")

    def test_ranks_end_with_the_process_that_started_them(self, tmp_path: Path) -> None:
        run = start(tmp_path, "gpus=2", "gpu=a40", "demonstration=true", "telemetry=replay", LONG)
        wait_for_step(tmp_path, 3)
        pids = [rank["pid"] for rank in manifest(tmp_path)["ranks"]]
        sidecar = (read_json(tmp_path / "telemetry.json") or {})["pid"]
        worker = json.loads(Path(f"/proc/{sidecar}/cmdline").read_bytes().split(b"\0")[-2])["worker"]
        assert all(is_descendant(pid, worker) for pid in pids), "another rank on its GPU would be a stranger"
        run.kill()
        run.wait(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    def test_port_that_is_in_use_ends_it_with_the_reason(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("", 0)) as taken:
            job = {"SLURM_NODEID": "0", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}
            for name, value in (job | {"SLURM_JOB_ID": str(taken.getsockname()[1] - 20000)}).items():
                monkeypatch.setenv(name, value)
            monkeypatch.setattr(engine, "PORTS", (20000, 50000))
            failure = engine.run_ranks(bench("gpus=1", "nodes=2"), tmp_path, print)
        assert isinstance(failure, engine.RankFailure)
        assert "address already in use" in failure.message

    def test_sweep_on_this_machine_starts_the_ranks_itself(self, tmp_path: Path) -> None:
        sweep = ("-m", *TINY[3:], "gpus=1,2", "wait=true", f"hydra.sweep.dir={tmp_path}")
        assert launch.main(list(sweep)) == 0
        runs = [manifest(tmp_path / str(point) / "attempt-1") for point in (0, 1)]
        assert [run["status"] for run in runs] == ["completed"] * 2
        assert [run["gpus"] for run in runs] == [1, 2]
        assert [run["ranks"] and len(run["ranks"]) for run in runs] == [None, 2]


@pytest.mark.parametrize(
    "sharding",
    ["none", *(pytest.param(name, marks=pytest.mark.faults) for name in ("zero1", "tensor")), "fsdp2", "pipeline"],
)
def test_training_resumes_on_another_number_of_ranks(tmp_path: Path, sharding: str) -> None:
    two = ("gpus=2", f"recipe.sharding={sharding}")
    validations = 0 if sharding in DIVIDED_WEIGHTS else 4  # which these cannot do
    model = {"pipeline": (*FLUX, "recipe.accumulate=2"), "tensor": FLUX}.get(sharding, ())
    training = ("workload.train_steps=12", f"workload.validate_every={validations}", "data.num_images=64", *model)
    cut = start(tmp_path / "cut", *two, "workload.train_steps=1000", *training[1:])
    wait_for_step(tmp_path / "cut", 3)
    cut.send_signal(signal.SIGUSR2)
    assert cut.wait(WAIT_S) == 128 + signal.SIGUSR2
    trained = manifest(tmp_path / "cut")["progress"]["step"]
    steps = f"workload.train_steps={trained + 3}"
    assert start(tmp_path / "cut", "batch=4", steps, *training[1:]).wait(WAIT_S) == 0
    assert manifest(tmp_path / "cut")["resumed"][0]["step"] == trained
    steps = f"workload.train_steps={trained + 6}"
    assert start(tmp_path / "cut", *two, steps, *training[1:]).wait(WAIT_S) == 0
    assert start(tmp_path / "whole", "batch=4", steps, *training[1:]).wait(WAIT_S) == 0
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    if not validations:
        return
    first_validation = [manifest(tmp_path / name)["quality"]["validation"][1] for name in ("cut", "whole")]
    assert first_validation[0]["loss"] == pytest.approx(first_validation[1]["loss"], rel=1e-4)


@pytest.mark.parametrize("sharding", ["zero1", "fsdp2"])
def test_sharded_state_is_read_back(tmp_path: Path, sharding: str) -> None:
    assert start(tmp_path, "gpus=2", f"recipe.sharding={sharding}").wait(WAIT_S) == 0
    (lever,) = manifest(tmp_path)["levers"]
    assert (lever["name"], lever["requested"], lever["active"]) == (sharding, sharding, True)
    effective = lever["effective"]
    assert effective["state_mib"] == pytest.approx(effective["state_of_all_mib"] / 2, rel=0.1)
    share = {"zero1": 1, "fsdp2": 0.5}[sharding]
    assert effective["weights_mib"] == pytest.approx(effective["weights_of_all_mib"] * share, rel=0.1)
    assert "between steps rank 0 keeps" in lever["evidence"]


@pytest.mark.parametrize(("model", "blocks", "layers"), [((), 4, 40), (FLUX, 3, 26), (FLUX2, 3, 16)])
def test_each_rank_computes_its_part_of_the_transformer_blocks(
    tmp_path: Path, model: tuple[str, ...], blocks: int, layers: int
) -> None:
    assert start(tmp_path, "gpus=2", "recipe.sharding=tensor", "recipe.grad_checkpoint=true", *model).wait(WAIT_S) == 0
    levers = {lever["name"]: lever for lever in manifest(tmp_path)["levers"]}
    assert [lever["active"] for lever in levers.values()] == [True, True]
    effective = levers["tensor"]["effective"]
    assert (effective["blocks"], effective["divided_layers"]) == (blocks, layers)
    missing = effective["weights_of_all_mib"] - effective["weights_mib"]
    assert missing > 0
    assert effective["state_of_all_mib"] - effective["state_mib"] == pytest.approx(2 * missing, rel=0.01)
    assert manifest(tmp_path)["parity"]["gradient_rel"] < 1e-5


def test_gradients_of_divided_blocks_are_those_of_whole_ones(tmp_path: Path) -> None:
    on_ranks("tests.run.tensor_gradients", 2, str(tmp_path / "store"))


def test_divided_transformer_blocks_are_computed_again(tmp_path: Path) -> None:
    flux = ("model=tiny_flux_fill", "data.resolution_px=64", "recipe.grad_checkpoint=true")
    assert start(tmp_path, "gpus=2", "recipe.sharding=fsdp2", *flux).wait(WAIT_S) == 0
    assert [lever["active"] for lever in manifest(tmp_path)["levers"]] == [True, True]
    assert manifest(tmp_path)["parity"]["gradient_rel"] < 1e-5


def test_each_rank_of_a_pipeline_computes_its_own_blocks(tmp_path: Path) -> None:
    recipe = ("recipe.accumulate=2", "recipe.grad_checkpoint=true", "recipe.attention=math")
    assert start(tmp_path, "gpus=2", "recipe.sharding=pipeline", *recipe, *SD3).wait(WAIT_S) == 0
    levers = {lever["field"]: lever for lever in manifest(tmp_path)["levers"]}
    assert [lever["active"] for lever in levers.values()] == [True] * 4
    effective = levers["sharding"]["effective"]
    assert (effective["own_blocks"], effective["blocks"], effective["micro_batches"]) == (1, 3, 2)
    assert effective["weights_mib"] == pytest.approx(effective["weights_of_all_mib"] / 2, rel=0.1)
    assert effective["state_mib"] == pytest.approx(effective["state_of_all_mib"] / 2, rel=0.1)
    assert "4 times in 2 UNet passes" in levers["grad_checkpoint"]["evidence"], "once more in the backward pass"
    assert manifest(tmp_path)["parity"]["gradient_rel"] < 1e-5


def test_blocks_of_a_pipeline_are_divided_by_their_costs() -> None:
    costs = [48, 16, 16, 16]
    assert owners(costs, 2) == [0, 1, 1, 1]
    with pytest.raises(UnavailableError, match="4 transformer blocks cannot be divided among 5 GPUs"):
        owners(costs, 5)


GATHERS = """
import torch, torch.distributed as dist
from inpaint_bench.ranks.group import join_group
torch.set_num_threads(1)
join_group(torch.device("cpu"), store=dist.HashStore(), rank=0, world_size=1)
operations, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
for _ in range(1000):
    for gathered in [operations.all_gather_into_tensor(torch.ones(4), 1, group) for _ in range(200)]:
        operations.wait_tensor(gathered)
dist.destroy_process_group()
"""


def test_many_all_gathers_at_once_leave_the_process_alive() -> None:
    """Regression: the two worker threads of gloo's own group corrupt the heap within seconds."""
    assert subprocess.run([sys.executable, "-c", GATHERS], cwd=ROOT, timeout=WAIT_S, check=False).returncode == 0


@pytest.mark.parametrize(
    "model", [("model.unet.attention_head_dim=1",), (*FLUX, "model.transformer.num_attention_heads=1")]
)
def test_heads_that_cannot_be_divided_are_refused(tmp_path: Path, model: tuple[str, ...]) -> None:
    assert start(tmp_path, "gpus=2", "recipe.sharding=tensor", *model).wait(WAIT_S) == 1
    record = manifest(tmp_path)
    assert (record["status"], record["reason"]) == ("failed", "unavailable")
    assert "has 1 heads, which 2 GPUs cannot divide equally" in record["message"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("recipe.weights=bf16_master",), "bf16_master have an AdamW of their own"),
        (("recipe.optimizer=adamw_8bit",), "bitsandbytes nests its state"),
        (("recipe.cuda_graph=true", "workload.warmup_steps=13"), "not captured in a CUDA graph"),
        (("gpus=1",), "set gpus too"),
        (("recipe.sharding=fsdp2", "recipe.compile=default"), "recipe.compile=default: the exchange in every block"),
        (("recipe.sharding=tensor", "recipe.linears=fp8"), "recipe.linears=fp8: its products take whole weights"),
        (("recipe.sharding=tensor", "recipe.unet=nhwc"), "keeps its weights packed"),
        (("recipe.sharding=tensor", "recipe.attention=math"), "a pass of the UNet alone"),
        (("recipe.sharding=tensor", "recipe.precision=fp16"), "look for overflow in a part of the gradients"),
        ((*PIPELINE, "recipe.compile=default"), "recipe.compile=default: other ranks have a part of that graph"),
        ((*PIPELINE, "recipe.ema=true"), "not with recipe.ema=true"),
        ((*PIPELINE, "recipe.weights=bf16_master"), "bf16_master have an AdamW of their own"),
        (("recipe.sharding=fsdp2", "recipe.ema=true"), "not with recipe.ema=true: the average is of whole weights"),
        (
            ("recipe.sharding=fsdp2", "workload.train_steps=9", "workload.save_weights=true"),
            "set workload.validate_every=0, sample_images=0 and save_weights=false",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_a_reason(options: tuple[str, ...], reason: str) -> None:
    config = bench(*last_given("gpus=2", "recipe.sharding=zero1", *options))
    assert reason in (conflict("sharding", config) or "")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("gpus=2", "batch=auto"), "batch=auto searches on one GPU"),
        (("gpus=2", "recipe.cuda_graph=true"), "set workload.warmup_steps=13 or more"),
        (("gpus=2", "workload=denoise_shape"), "workload denoise_shape uses one GPU"),
        (
            ("gpus=2", "recipe.sharding=pipeline"),
            "pipeline: is for the transformers of FLUX and SD 3.5, not for model=",
        ),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        bench(*overrides)
