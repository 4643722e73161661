"""Shares of numbers that FP8 loses: of one process by a direct count, and the same in each layout."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cases import Case, build_rank, load_weights, weights_of
from tests.parity.test_fp8 import one_process
from triaxis.engine.comm.backends import Pending
from triaxis.engine.kernels.fp8.recipes import E4M3, E5M2, RECIPES, is_bytes, quantise
from triaxis.engine.kernels.fp8.shares import ROLES
from triaxis.engine.linear.fp8_gemms import Fp8Gemms
from triaxis.engine.linear.fp8_shares import count_lost
from triaxis.engine.linear.products import Operand
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.meters.fp8_shares import PURPOSE, Fp8Shares
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion

SMALL: dict[str, Any] = {"num_layers": 2, "global_batch_size": 4, "fp8_shares": True}

COVERING = [
    Case("llama", tp=2, sequence_parallel=True, recompute=("full", "uniform", 1), fp8="tensorwise", **SMALL),
]
COVERING_TOO = [
    Case("llama", tp=2, cp=2, sequence_parallel=True, recompute=("full", "uniform", 1), fp8="tensorwise", **SMALL),
    Case("qwen", tp=2, pp=2, dp=2, fp8="tensorwise", **SMALL),
    Case("mla", tp=2, dp=2, fp8="tensorwise", **SMALL),
    Case("qwen", tp=2, cp=2, sequence_parallel=True, fp8="tensorwise", fp8_gather=True, **SMALL),
    Case("mla", tp=2, sequence_parallel=True, schedule="zb_h1", pp=2, fp8="tensorwise", **SMALL),
    Case("deepseek", tp=2, dp=2, ep=2, fp8="tensorwise", **SMALL),
    Case("llama", tp=2, recompute=("selective", "uniform", 1), modules=("mlp", "norm"), fp8="tensorwise", **SMALL),
    Case("llama", dp=2, frozen=("embedding.*", "layers.0.*"), fp8="tensorwise", **SMALL),
    Case("blocks_of_32", tp=2, dp=2, fp8="mxfp8", **SMALL),
    Case("blocks_of_128", tp=2, dp=2, fp8="blockwise", num_layers=1, global_batch_size=2, fp8_shares=True),
]

Shares = Mapping[str, Mapping[str, Mapping[str, float]]]


def uneven_weights(case: Case) -> dict[str, torch.Tensor]:
    """Weights of which some are so small that FP8 loses them, and of norms too, so that it loses inputs."""
    weights = {name: weight.detach().clone() for name, weight in weights_of(case.model, case.num_layers).items()}
    for name, weight in weights.items():
        if name.startswith("layers.") and not name.endswith("bias"):
            weight[..., ::3] *= 1e-7
    return weights


INPUT_GRAD, LEAVING = Fp8Gemms.input_grad, Fp8Gemms.leave_backward


def uneven(grad: torch.Tensor) -> torch.Tensor:
    """Return gradients [s, ..] of which FP8 loses those of every second token."""
    grad = grad.clone()
    grad[::2] *= 1e-12
    return grad


def of_uneven_tokens(self: Fp8Gemms, grad: Operand) -> torch.Tensor:
    return INPUT_GRAD(self, grad if is_bytes(grad.tensor) else Operand(uneven(grad.tensor), grad.scale))


def sent_of_uneven_tokens(
    self: Fp8Gemms, grad: torch.Tensor, region: TensorParallelRegion, purpose: str
) -> tuple[Pending, Operand]:
    return LEAVING(self, uneven(grad) if self._sends(region) else grad, region, purpose)


def found_in(shares: Fp8Shares, step: int) -> Shares | None:
    found = shares.read(step, StepResult(3.0, 0.5, 100))
    return None if found is None else found.fields["fp8"]


def measured(
    rank: int, case: Case, weights: Mapping[str, torch.Tensor], interval: int = 1
) -> tuple[list[Shares | None], int]:
    """Make two steps with uneven gradients; return the shares of each, and the last one's calls over all ranks for them."""
    engine, batches = build_rank(rank, case)
    load_weights(engine, weights)
    counts = engine.chunks[0].fp8_counts
    assert counts is not None
    shares = Fp8Shares(counts, engine.topology.axis("world"), interval)
    shares.begin(0)
    with (
        mock.patch.object(Fp8Gemms, "input_grad", of_uneven_tokens),
        mock.patch.object(Fp8Gemms, "leave_backward", sent_of_uneven_tokens),
    ):
        for _ in range(2):
            shares.before_step()
            # Small: AdamW makes an update of a gradient that is rounding alone.
            engine.train_step(batches.next_step(), lr=1e-9)
            shares.after_update()
    calls = sum(event.purpose == PURPOSE and event.phase == "post" for event in engine.topology.ledger.events)
    batches.close()
    return [found_in(shares, 0), found_in(shares, 1)], calls


@cache
def alone(case: Case) -> list[Shares | None]:
    return measured(0, case, uneven_weights(case))[0]


def compare(case: Case) -> None:
    expected = alone(replace(one_process(case), fp8_shares=True))
    for operand in ROLES:
        assert any(each[operand]["underflow"] for step in expected for each in (step or {}).values() if operand in each)
    for shares, calls in run_ranks(measured, case.world_size, case, uneven_weights(case)):
        assert shares == expected
        assert calls == (case.world_size > 1)


@pytest.mark.distributed
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_layouts_have_the_shares_of_one_process(case: Case) -> None:
    compare(case)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("case", COVERING_TOO, ids=str)
def test_more_layouts_have_the_shares_of_one_process(case: Case) -> None:
    compare(case)


ONE = Case("qwen", fp8="tensorwise", recompute=("selective", "uniform", 1), modules=("mlp", "norm"), **SMALL)


def test_shares_are_those_of_a_direct_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # By layer and operand: numbers other than zero, and those below half of the smallest number of the format.
    counts: Counter[tuple[str, str, bool]] = Counter()
    seen: set[str] = set()

    def count(name: str, operand: str, tensor: torch.Tensor, largest: float, smallest: float) -> None:
        size = tensor.abs().flatten()
        scaled = size[size > 0] * (largest / float(size.max()))
        counts[name, operand, True] += int((scaled < smallest / 2).sum())
        counts[name, operand, False] += len(scaled)

    forward = Fp8Gemms.forward

    def counted_forward(self: Fp8Gemms, x: Operand) -> torch.Tensor:
        # A recomputed MLP reads the same numbers again.
        if self.parts.name not in seen:
            seen.add(self.parts.name)
            count(self.parts.name, "input", x.tensor, 448.0, 2.0**-9)
            count(self.parts.name, "weight", torch.cat(self.weights.complete().views), 448.0, 2.0**-9)
        return forward(self, x)

    def counted_input_grad(self: Fp8Gemms, grad: Operand) -> torch.Tensor:
        grad = Operand(uneven(grad.tensor), grad.scale)
        count(self.parts.name, "gradient", grad.tensor, 57344.0, 2.0**-16)
        return INPUT_GRAD(self, grad)

    monkeypatch.setattr(Fp8Gemms, "forward", counted_forward)
    monkeypatch.setattr(Fp8Gemms, "input_grad", counted_input_grad)
    case = replace(ONE, num_layers=1, global_batch_size=1)
    engine, batches = build_rank(0, case)
    load_weights(engine, uneven_weights(case))
    counted = engine.chunks[0].fp8_counts
    assert counted is not None
    shares = Fp8Shares(counted, engine.topology.axis("world"), 1)
    shares.before_step()
    engine.train_step(batches.next_step(), lr=1e-2)
    shares.after_update()
    batches.close()
    found = found_in(shares, 0)
    assert found is not None
    assert [*found] == [f"layers.0.{name}" for name in ("attention.qkv", "attention.proj", "mlp.gate_up", "mlp.down")]
    numbers = counted.end()[..., 0].tolist()
    assert numbers == [[counts[name, operand, False] for operand in ROLES] for name in found]
    for name, operands in found.items():
        assert [*operands] == ["input", "gradient", "weight"]
        for operand, lost in operands.items():
            assert lost["underflow"] == counts[name, operand, True] / counts[name, operand, False]
            assert lost["overflow"] == 0
    assert all(sum(counts[name, operand, True] for name in found) for operand in ROLES)


def test_other_steps_count_nothing() -> None:
    case = replace(ONE, num_layers=1, global_batch_size=1)
    shares, calls = measured(0, case, uneven_weights(case), interval=2)
    assert shares[0] is None and shares[1] is not None
    assert calls == 0, "one process sends nothing"


@pytest.mark.parametrize(("form", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_a_stale_scale_shows_as_overflow(form: Any, largest: float) -> None:
    # Of numbers up to twice the largest that the scale was made for; those that rounding takes to the largest are no loss.
    x = torch.tensor([[0.0, 1.0, 1.02, 1.2, -2.0, 1e-11, 0.5, 0.0]])
    rounded = quantise(x, form, None, has_powers=False, largest=torch.tensor(1.0))
    assert count_lost(x, rounded).tolist() == [6, 1, 2]


def test_each_block_is_counted_by_its_own_scale() -> None:
    x = torch.ones(2, 64)
    x[0, :32] *= 1e6
    x[0, 0] = x[1, 63] = 1e-3
    rounded = quantise(x, E4M3, RECIPES["mxfp8"].activation_block, has_powers=True, largest=None)
    assert count_lost(x, rounded).tolist() == [128, 1, 0]
    assert count_lost(x.t(), quantise(x.t(), E4M3, None, has_powers=False, largest=None)).tolist() == [128, 97, 0]
