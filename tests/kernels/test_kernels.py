"""Every kernel, in Triton's interpreter and float32, against its PyTorch reference in float64, gradients included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

from inpaint_bench import kernels
from inpaint_bench.kernels import dispatch
from inpaint_bench.kernels.adamw import SplitMasterAdamW, master, split
from inpaint_bench.kernels.chunks import Chunks
from inpaint_bench.kernels.cross_attention import cross_attention
from inpaint_bench.kernels.group_norm import compiled_group_norm, group_norm
from inpaint_bench.kernels.layer_norm import add_layer_norm
from inpaint_bench.kernels.mean import CHUNK, mean_over_ranks
from inpaint_bench.kernels.pointwise import add_bias, add_bias_padded, geglu, softmax_rows
from inpaint_bench.kernels.reduce import column_sums, keep_column_sums
from inpaint_bench.kernels.self_attention import rotate
from inpaint_bench.kernels.upsample import upsample_conv
from inpaint_bench.models.optimizers import ADAMW

pytestmark = pytest.mark.usefixtures("interpreted")

TOLERANCE = 2e-6  # relative, of float32 sums


def normal(*shape: int, mean: float = 0.0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) + mean


def outputs_and_gradients(call: Callable[..., Any], arguments: list[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """Return what `call` gives of the arguments in `dtype`, and the gradients of a random scalar of it."""
    leaves = [None if a is None else a.detach().to(dtype, copy=True).requires_grad_() for a in arguments]
    results = call(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(dtype) for r in results]
    torch.autograd.backward(results, weights)
    return [*(r.detach() for r in results), *(leaf.grad for leaf in leaves if leaf is not None)]


def assert_kernel_equals_reference(call: Callable[..., Any], *arguments: Tensor | None) -> None:
    """Compare float32 (the kernel) with float64, which has none and so runs the reference."""
    kernel = outputs_and_gradients(call, list(arguments), torch.float32)
    reference = outputs_and_gradients(call, list(arguments), torch.float64)
    assert len(kernel) == len(reference)
    for ours, theirs in zip(kernel, reference, strict=True):
        assert float((ours.double() - theirs).norm()) <= TOLERANCE * max(1.0, float(theirs.norm()))


def test_float64_runs_the_reference() -> None:
    assert not dispatch.use_triton(normal(2))
    assert dispatch.use_triton(normal(2).float())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_upsampling_and_convolution_are_one_transposed_convolution() -> None:
    assert_kernel_equals_reference(upsample_conv, normal(2, 3, 5, 6), normal(8, 6, 3, 3))


def test_the_wide_kernel_of_a_frozen_weight_follows_its_changes() -> None:
    x, weight = normal(1, 3, 4, 6).float(), normal(8, 6, 3, 3).float()
    for factor in (1, 2):
        weight *= factor
        for _ in range(2):
            wanted = upsample_conv(x.double(), weight.double())
            assert float((upsample_conv(x, weight).double() - wanted).norm()) <= TOLERANCE * float(wanted.norm())


class TestGroupNorm:
    @pytest.fixture(autouse=True, params=["small", "tiled"])
    def _kernels(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if request.param == "tiled":
            monkeypatch.setattr(kernels.group_norm, "SMALL_GROUP", 0)

    @pytest.mark.parametrize("silu", [True, False])
    @pytest.mark.parametrize("uses", [0, 1, 2])
    def test_one_map_with_further_uses(self, silu: bool, uses: int) -> None:
        def call(x: Tensor, w: Tensor, b: Tensor) -> Any:
            return group_norm(x, w, b, groups=4, eps=1e-5, silu=silu, uses=uses)

        assert_kernel_equals_reference(call, normal(2, 70, 16), normal(16, mean=1), normal(16))

    def test_two_maps_whose_groups_straddle_the_seam(self) -> None:
        def call(x: Tensor, skip: Tensor, w: Tensor, b: Tensor) -> Any:
            return group_norm(x, w, b, groups=4, eps=1e-5, silu=True, joined=skip, uses=1)

        assert_kernel_equals_reference(call, normal(2, 40, 32), normal(2, 40, 8), normal(40), normal(40))

    def test_a_shift_whose_rows_lie_apart(self) -> None:
        def call(x: Tensor, shifts: Tensor, w: Tensor, b: Tensor) -> Any:
            return group_norm(x, w, b, groups=2, eps=1e-6, silu=True, shift=shifts[:, 3:11])

        assert_kernel_equals_reference(call, normal(3, 33, 8), normal(3, 20), normal(8), normal(8))

    def test_a_mean_far_above_the_deviation_costs_no_digits(self) -> None:
        x = torch.randn(1, 256, 8) + 1000
        weight, bias = torch.ones(8), torch.zeros(8)
        (y,) = group_norm(x, weight, bias, groups=2, eps=0.0, silu=False)
        (right,) = group_norm(x.double(), weight.double(), bias.double(), groups=2, eps=0.0, silu=False)
        assert float((y.double() - right).abs().max()) < 1e-3

    def test_the_weight_gradient_of_wide_maps_with_four_channels_a_group(self) -> None:
        """Regression of others: a compiled GroupNorm was silently wrong here (pytorch issue 140913)."""

        def call(x: Tensor, w: Tensor, b: Tensor) -> Any:
            return group_norm(x, w, b, groups=2, eps=1e-5, silu=False)

        assert_kernel_equals_reference(call, normal(1, 64 * 64, 8), normal(8), normal(8))

    @pytest.mark.parametrize("shifted", [True, False])
    def test_a_map_of_many_blocks_as_one_operator(self, shifted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        shift = normal(2, 8) if shifted else None
        monkeypatch.setattr(kernels.group_norm, "MAX_BLOCKS", 3)  # 13 tiles in two blocks of eight, the last not full

        def call(x: Tensor, w: Tensor, b: Tensor, shift: Tensor | None) -> Any:
            return compiled_group_norm(x, w, b, groups=4, eps=1e-5, silu=True, shift=shift)

        assert_kernel_equals_reference(call, normal(2, 400, 8, mean=3), normal(8, mean=1), normal(8), shift)
        tensors = [None if a is None else a.float() for a in (normal(2, 4, 10, 8), normal(8), normal(8), shift)]
        torch.library.opcheck(torch.ops.inpaint_bench.group_norm.default, (*tensors, 4, 1e-5, True))


class TestLeftBehind:
    """What a kernel leaves with its result, for the kernel behind it."""

    @pytest.fixture(autouse=True)
    def _tiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels.group_norm, "SMALL_GROUP", 0)

    def test_a_norm_begins_with_the_statistics_of_the_sum_before_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        arguments = normal(2, 8, 8, 16, mean=3), normal(16), normal(2, 8, 8, 16)
        y = add_bias(*(argument.float() for argument in arguments))
        weight, bias = normal(16), normal(16)

        def normed(x: Tensor, joined: Tensor | None = None) -> Tensor:
            scale, offset = weight.to(x.dtype), bias.to(x.dtype)
            return group_norm(x, scale, offset, groups=4, eps=1e-5, silu=True, joined=joined)[0]

        with monkeypatch.context() as without:
            without.setattr(kernels.group_norm, "_group_norm_blocks", None)
            exact = normed(add_bias(*arguments))
            assert float((normed(y).double() - exact).norm()) <= TOLERANCE * float(exact.norm())
            with pytest.raises(TypeError):  # a copy has none
                normed(y, joined=y.clone())
        y.mul_(2)  # written to: what was left does not hold
        exact = normed(2 * add_bias(*arguments))
        assert float((normed(y).double() - exact).norm()) <= TOLERANCE * float(exact.norm())

    def test_an_alias_of_a_map_keeps_its_statistics(self) -> None:
        x = add_bias(normal(1, 8, 8, 16).float(), normal(16).float())
        _, alias = group_norm(x, torch.ones(16), torch.zeros(16), groups=4, eps=1e-5, silu=False, uses=1)
        assert alias.block_statistics is x.block_statistics

    def test_a_gradient_that_autograd_added_to_is_summed_anew(self) -> None:
        """The first map's gradient comes from two norms: the sums that one left are not those of both."""

        def call(x: Tensor, bias: Tensor, w: Tensor, b: Tensor) -> Any:
            y = add_bias(x, bias)
            return tuple(group_norm(y, w, b, groups=groups, eps=1e-5, silu=True)[0] for groups in (4, 2))

        assert_kernel_equals_reference(call, normal(2, 6, 8, 16), normal(16), normal(16), normal(16))

    def test_a_sum_in_inference_mode_leaves_nothing(self) -> None:
        with torch.inference_mode():
            y = add_bias(normal(1, 8, 8, 16).float(), normal(16).float())
            assert not hasattr(y, "block_statistics")

    def test_the_gradient_of_a_bias_comes_from_the_norm_behind_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels.reduce, "_partial_column_sums", None)

        def call(x: Tensor, bias: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Any:
            return group_norm(add_bias(x, bias, residual), w, b, groups=4, eps=1e-5, silu=True, uses=1)

        assert_kernel_equals_reference(
            call, normal(2, 6, 8, 16), normal(16), normal(2, 6, 8, 16), normal(16), normal(16)
        )

    def test_sums_that_were_left_do_not_hold_once_a_gradient_is_written_to(self) -> None:
        x = normal(5, 8).float()
        keep_column_sums(x, torch.ones(1, 8))
        assert torch.equal(column_sums(x), torch.ones(8))
        x.mul_(2)
        torch.testing.assert_close(column_sums(x), x.sum(0))


class TestLayerNorm:
    def test_alone(self) -> None:
        def call(x: Tensor, w: Tensor, b: Tensor) -> Any:
            return add_layer_norm(x, None, None, w, b)

        assert_kernel_equals_reference(call, normal(2, 9, 24), normal(24), normal(24))

    def test_of_a_residual_sum_with_a_bias(self) -> None:
        arguments = (normal(2, 37, 24), normal(2, 37, 24), normal(24), normal(24), normal(24))
        assert_kernel_equals_reference(add_layer_norm, *arguments)


class TestPointwise:
    def test_geglu(self) -> None:
        assert_kernel_equals_reference(geglu, normal(3, 21, 64), normal(64))

    @pytest.mark.parametrize("shape", [(3, 21, 24), None], ids=["residual", "no residual"])
    def test_bias_and_residual(self, shape: tuple[int, ...] | None) -> None:
        assert_kernel_equals_reference(add_bias, normal(3, 21, 24), normal(24), normal(*shape) if shape else None)

    def test_bias_and_residual_with_a_padded_result(self) -> None:
        arguments = (normal(2, 5, 7, 24), normal(24), normal(2, 5, 7, 24))
        padded = add_bias_padded(*(argument.float() for argument in arguments))
        reference = add_bias_padded(*arguments)
        assert reference.shape == (2, 6, 8, 24)
        assert not reference[:, -1].any()
        assert not reference[:, :, -1].any()
        torch.testing.assert_close(padded.double(), reference, rtol=TOLERANCE, atol=TOLERANCE)


def test_rotary_embeddings_are_those_of_diffusers() -> None:
    angles, queries = normal(37, 16).repeat_interleave(2, dim=1), normal(2, 37, 3, 32)
    cos, sin = angles.cos(), angles.sin()

    def call(x: Tensor) -> Tensor:
        rotation = rotate if x.dtype == torch.float32 else apply_rotary_emb
        return rotation(x, (cos.to(x.dtype), sin.to(x.dtype)), sequence_dim=1)

    kernel, reference = (outputs_and_gradients(call, [x], x.dtype) for x in (queries.float(), queries))
    for found, expected in zip(kernel, reference, strict=True):
        assert float((found.double() - expected).norm()) <= TOLERANCE * float(expected.norm())
    torch.library.opcheck(torch.ops.inpaint_bench.rotate.default, (queries.float(), cos.float(), sin.float(), False))


class TestCrossAttention:
    @pytest.mark.parametrize(
        ("queries", "text", "location", "size"), [(40, 77, 4, 40), (20, 64, 0, 72), (150, 90, 6, 160)]
    )
    def test_text_and_gated_location(self, queries: int, text: int, location: int, size: int) -> None:
        def call(q: Tensor, kv: Tensor, gate: Tensor) -> Tensor:
            return cross_attention(q, kv, gate, 2, text) + 0 * gate  # without location tokens the gate is unused

        keys = text + location
        assert_kernel_equals_reference(call, normal(2, queries, 2 * size), normal(2, keys, 4 * size), normal())

    def test_a_location_far_less_attractive_than_the_text_still_counts(self) -> None:
        q, kv = torch.ones(1, 4, 40), torch.ones(1, 72, 80)
        kv[:, :70, :40] *= 100
        kv[:, 70:, 40:] = 7.0
        y = cross_attention(q, kv, torch.tensor(1.0), 1, 70)
        torch.testing.assert_close(y, torch.full_like(y, 8.0))


class TestAdamW:
    @pytest.mark.parametrize("in_memory", [False, True])
    def test_masters_follow_fp32_adamw(self, in_memory: bool) -> None:
        """The masters are exact; only the stochastically rounded moments differ. A schedule's rate is in memory."""
        initial = [torch.randn(shape) for shape in ((8,), (40, 16), (16, 8, 3, 3))]
        halves = [split(t) for t in initial]
        parameters = [torch.nn.Parameter(high) for high, _ in halves]
        parameters[2].data = parameters[2].data.contiguous(memory_format=torch.channels_last)
        references = [torch.nn.Parameter(t.clone()) for t in initial]
        optimizer = SplitMasterAdamW(parameters, low=[low for _, low in halves], lr=1e-3, **ADAMW)
        fp32_adamw = torch.optim.AdamW(references, lr=1e-3)
        if in_memory:
            optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
        for _ in range(20):
            for p, q in zip(parameters, references, strict=True):
                q.grad = (torch.randn(p.shape) + 0.3).bfloat16().float()
                p.grad = torch.empty_like(p).copy_(q.grad)
            optimizer.step()
            fp32_adamw.step()
        masters = master(optimizer._flat, optimizer.buffers["low"])
        for p, q, first in zip(parameters, references, initial, strict=True):
            exact = torch.as_strided(masters, p.shape, p.stride(), p.storage_offset())
            moved = float((q.detach() - first).norm())
            assert float((exact - q.detach()).norm()) < 0.02 * moved
            half_a_place = 2**-8 * exact.abs() * (1 + 1e-6)
            assert bool(((p.detach().float() - exact).abs() <= half_a_place).all())

    def test_a_small_second_moment_still_decays(self) -> None:
        """Rounded to nearest, bf16 would keep it for ever: one step changes it by a thousandth."""
        parameter = torch.nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
        optimizer = SplitMasterAdamW([parameter], lr=0.0, **ADAMW)
        optimizer.buffers["exp_avg_sq"].fill_(1.0)
        for _ in range(100):
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        assert float(optimizer.buffers["exp_avg_sq"].float().mean()) == pytest.approx(0.999**100, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_get_the_same_mean_of_gradients_that_lie_apart(dtype: torch.dtype) -> None:
    sizes, offsets, ranks = [5, 2 * CHUNK + 3, CHUNK], [0, 16, 16 + 2 * CHUNK + 16], 3
    of_ranks = [[normal(size).to(dtype) for size in sizes] for _ in range(ranks)]
    rows = torch.full((ranks, offsets[-1] + CHUNK), float("nan"), dtype=dtype)
    for row, tensors in zip(rows, of_ranks, strict=True):
        for tensor, start in zip(tensors, offsets, strict=True):
            row[start : start + len(tensor)] = tensor
    means = []
    for rank, tensors in enumerate(of_ranks):
        own, others = [tensor.clone() for tensor in tensors], rows.clone()
        others[rank] = float("nan")  # a rank's own gradients do not travel
        mean_over_ranks(own, others, rank, Chunks(sizes, offsets, CHUNK, torch.device("cpu")))
        means.append(own)
    for number, own in enumerate(zip(*means, strict=True)):
        expected = sum(tensors[number].double() for tensors in of_ranks) / ranks
        assert torch.equal(own[0], own[1])
        assert torch.equal(own[0], own[2])
        torch.testing.assert_close(own[0], expected.to(dtype))


def test_softmax_of_rows() -> None:
    x = normal(3, 5, 70)
    torch.testing.assert_close(softmax_rows(x.float()).double(), torch.softmax(x, -1), rtol=TOLERANCE, atol=TOLERANCE)
