"""Runs with different rules are updated in one launch, to the bits of one launch for each."""

from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank
from triaxis.engine.config.quantities.update_settings import UpdateRule
from triaxis.engine.kernels.fusion import Fusion, Lengths
from triaxis.engine.optimizer import distributed
from triaxis.engine.optimizer.distributed import DistributedOptimizer
from triaxis.engine.optimizer.stretches import Run, Stretch, stretches

CPU = torch.device("cpu")
DECAYS, PLAIN, SLOW = UpdateRule(1.0, 0.1), UpdateRule(1.0, 0.0), UpdateRule(0.5, 0.1)
NUMBERS = {DECAYS: 0, PLAIN: 1, SLOW: 2}


def test_runs_are_joined_up_to_a_gap() -> None:
    runs = [(slice(0, 192), DECAYS), (slice(192, 256), PLAIN), (slice(256, 384), SLOW), (slice(400, 416), PLAIN)]
    first, second = stretches(runs, NUMBERS, CPU)
    assert (first.where, first.rules.tolist()) == (slice(0, 384), [0, 0, 0, 1, 2, 2])
    assert (second.where, second.rules.tolist()) == (slice(400, 416), [1, 1])
    assert first.blocks(torch.arange(384)).shape == (6, 64)


def test_a_long_run_is_several_blocks_and_an_even_one_is_never_alone() -> None:
    (long,) = stretches([(slice(8, 8 + 4096), PLAIN)], NUMBERS, CPU)
    (short,) = stretches([(slice(0, 64), PLAIN)], NUMBERS, CPU)
    assert long.rules.tolist() == [1] * 4 and short.rules.tolist() == [1, 1]


def test_an_owned_part_of_padding_alone_has_no_stretch() -> None:
    assert stretches([], NUMBERS, CPU) == []


class _Counting(Fusion):
    """The compiled form with nothing compiled, and the number of calls."""

    def __init__(self) -> None:
        super().__init__("compiled")
        self.calls = 0

    def __call__(self, function: Any, *, lengths: Lengths = "fixed") -> Any:
        def call(*arguments: Any) -> Any:
            self.calls += function is distributed._update
            return function(*arguments)

        return call


def updated(case: Case) -> tuple[list[torch.Tensor], int, DistributedOptimizer]:
    """Parameters and state after three updates with gradients of their own, and the launches of one."""
    engine, batches = build_rank(0, case)
    batches.close()
    config = engine.config
    fusion = _Counting()
    with patch.object(distributed, "Fusion", lambda form: fusion):
        optimizer = DistributedOptimizer(engine.buffers, config.optimizer, config.precision, is_compiled=True)
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        fusion.calls = 0
        for owned in optimizer.owned:
            owned.grads.copy_(torch.randn(owned.grads.shape, generator=generator, dtype=torch.float64))
        optimizer.step(1e-2 / (step + 1), torch.tensor(0.7), skip=torch.tensor(False))
    return (
        [t for each in optimizer.owned for t in (each.parameters, *each.state.beside.values())],
        fusion.calls,
        optimizer,
    )


@pytest.mark.parametrize(
    "case", [Case("gpt", dtype="bf16", narrow=True), Case("gpt", num_layers=2, groups=True)], ids=str
)
def test_one_launch_has_the_bits_of_one_for_each_run(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    found, launches, optimizer = updated(case)
    runs = sum(len(piece.runs) for piece in optimizer.resident.pieces)
    assert launches == sum(len(piece.launches) for piece in optimizer.resident.pieces) <= len(optimizer.trained) < runs

    def apart(runs: list[Run], numbers: dict[UpdateRule, int], device: torch.device) -> list[Stretch]:
        return [Stretch.of([run], numbers, device) for run in runs]

    monkeypatch.setattr(distributed, "stretches", cast(Callable[..., Any], apart))
    wanted, one_by_one, _ = updated(case)
    assert one_by_one == runs
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
