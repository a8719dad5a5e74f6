"""The lever `adamw_8bit`: its refusals, and bitsandbytes itself where it is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from inpaint_bench import levers
from inpaint_bench.core.errors import UnavailableError
from inpaint_bench.levers import numerics
from tests.run.support import bench, constant_batch

from .test_levers import build

CPU = torch.device("cpu")


class TestUnavailable:
    @pytest.mark.parametrize(
        ("beside", "why"), [("cuda_graph", "counts its steps on the host"), ("channels_last", "undoes channels_last")]
    )
    def test_incompatible_lever_is_named(self, beside: str, why: str) -> None:
        with pytest.raises(UnavailableError, match=f"lever adamw_8bit: .*{why}"):
            levers.require(bench(f"recipe=[cpu,adamw_8bit,{beside}]"), CPU)

    def test_missing_bitsandbytes_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(numerics, "find_spec", lambda name: None)
        with pytest.raises(UnavailableError, match=r"inpaint-bench\[adam8bit\]"):
            levers.require(bench("recipe=[cpu,adamw_8bit]"), CPU)

    def test_bitsandbytes_that_cannot_be_imported_gives_the_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(name: str) -> None:
            raise OSError("libcudart.so.13: cannot open shared object file")

        monkeypatch.setattr(numerics, "find_spec", lambda name: object())
        monkeypatch.setattr(numerics, "import_module", broken)
        with pytest.raises(UnavailableError, match=r"bitsandbytes cannot be imported: libcudart\.so\.13"):
            levers.require(bench("recipe=[cpu,adamw_8bit]"), CPU)


def test_moments_of_plain_adamw_are_read_back_as_fp32() -> None:
    workload = build("adamw_fused")
    workload.step(workload.next_batch())
    assert numerics._moment_types(workload.training_step.optimizers[0]) == "100.0 % float32"
    workload.close()


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes (the extra adam8bit)")
class TestWithBitsandbytes:
    def test_moments_are_read_back_as_uint8(self) -> None:
        workload = build("adamw_8bit")
        workload.step(workload.next_batch())
        (row,) = levers.verify(workload.execution, workload.probe)
        workload.close()
        assert row.active is True
        assert row.effective["class"] == "bitsandbytes.AdamW8bit"
        share = float(row.evidence.partition("moments ")[2].partition(" % uint8")[0])
        assert 50 < share < 100  # what is small stays fp32

    def test_moments_that_stay_fp32_make_the_lever_inactive(self) -> None:
        workload = build("adamw_8bit")
        for optimizer in workload.training_step.optimizers:
            optimizer.args.min_8bit_size = 10**12
        (row,) = levers.verify(workload.execution, workload.probe)
        workload.close()
        assert row.active is False

    def test_first_update_equals_adamw(self) -> None:
        workload = build("adamw_8bit")
        assert workload.parity
        assert workload.parity.gradient_rel < 1e-5
        assert workload.parity.update_rel < 1e-4
        workload.close()

    def test_losses_are_close_to_those_of_adamw(self) -> None:
        plain, narrow = build(), build("adamw_8bit")
        batch = constant_batch(2)
        both = [[float(one.step(batch)) for _ in range(12)] for one in (plain, narrow)]
        assert both[1] == pytest.approx(both[0], rel=0.02)
