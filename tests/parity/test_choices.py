"""Choices that `auto` makes together train together: each pair of them is in one of these runs of a model with experts.

`auto` decides by facts about the device. A CPU takes most of what it decides for a GPU, and what it lacks falls as on a GPU that
lacks it. Attention is not among the pairs: its kernel follows from the model, and reads nothing of the others. Nor is float64,
where `auto` takes the reference's operators: `test_experts.py` has them in both forms of dispatch.

The ranks of a run have 16 microbatches, with all_to_all of unequal rows for their experts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.harness import compiler, run_ranks
from tests.parity.cases import Case, RankResult, assemble, is_trained, run_case, weights_of
from triaxis.engine.config.rules.check import problems
from triaxis.engine.config.schema.fp8 import BLOCKS
from triaxis.engine.config.schema.kernels import KernelsConfig
from triaxis.engine.config.schema.loss_scale import LossScaleConfig
from triaxis.engine.kernels.activations import ActivationKernel
from triaxis.engine.kernels.attention_trials import AttentionShape
from triaxis.engine.kernels.inductor import MOST_GRAPHS
from triaxis.engine.kernels.registry import DeviceFacts, Trials, device_trials, resolve, try_out
from triaxis.engine.numerics.precision import DTYPES

MODEL = "experts_of_128"
STEPS, RANKS, BATCH = 2, 2, 16


@dataclass(frozen=True)
class Run:
    """The choices of a run; its attention is what `auto` takes on a CPU."""

    dtype: str
    fp8: str | None
    elementwise: str
    optimizer: str
    experts: str
    dispatch: str

    def __str__(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())

    @property
    def values(self) -> set[tuple[str, str | None]]:
        """Return (name, value) of each choice; recipes with scales of blocks differ in sizes alone."""
        fp8 = "blocks" if self.fp8 in BLOCKS else self.fp8
        return set((asdict(self) | {"fp8": fp8}).items())

    def case(self, num_ranks: int = RANKS) -> Case:
        return Case(
            MODEL,
            dp=num_ranks,
            ep=num_ranks,
            global_batch_size=BATCH,
            dtype=self.dtype,
            fp8=self.fp8,
            compiled=self.elementwise == "compiled",
            compiled_update=self.optimizer == "compiled",
            experts=self.experts,
            dispatch=self.dispatch,
        )


RUNS = [
    Run("bf16", None, "compiled", "compiled", "grouped", "all_to_all"),
    Run("bf16", "tensorwise", "eager", "compiled", "grouped", "all_gather"),
    Run("bf16", "mxfp8", "eager", "torch", "grouped", "all_to_all"),
    Run("bf16", "tensorwise", "compiled", "compiled", "loop", "all_to_all"),
    Run("fp32", None, "eager", "compiled", "loop", "all_to_all"),
    Run("fp32", "tensorwise", "eager", "torch", "loop", "all_gather"),
    Run("fp32", "blockwise", "compiled", "compiled", "loop", "all_gather"),
    Run("fp16", None, "compiled", "compiled", "loop", "all_gather"),
    Run("fp16", None, "eager", "torch", "loop", "all_to_all"),
]

CAPABILITIES = (None, (7, 5), (8, 0), (9, 0), (10, 0), (12, 0))


def made_by_auto() -> Iterator[Run]:
    """Yield the choices on each kind of device, with a compiler and without, as they fall on this CPU; all are legal."""
    for dtype, has_compiler in product(("bf16", "fp16", "fp32"), (False, True)):
        trials = trials_of(dtype, "" if has_compiler else "no compiler")
        for capability, deterministic, dispatch in product(CAPABILITIES, (False, True), ("all_gather", "all_to_all")):
            facts = DeviceFacts(capability, (2, 13), 92000, DTYPES[dtype], 4, deterministic, dispatch=dispatch)
            choices, _ = try_out(KernelsConfig(), resolve(KernelsConfig(), facts), trials)
            assert choices.experts is not None and choices.dispatch is not None
            for fp8 in (None, "tensorwise", *BLOCKS):
                run = Run(dtype, fp8, choices.elementwise, choices.optimizer, choices.experts, choices.dispatch)
                if not problems(run.case().config()):
                    yield run


def trials_of(dtype: str, of_compiler: str) -> Trials:
    """Return this CPU's trials, of the compiler with that result."""
    trials = device_trials(AttentionShape(2, 2, 64, DTYPES[dtype], torch.device("cpu")), torch.float32)
    tried = cache(trials.failure)
    return replace(trials, failure=lambda name, choice: of_compiler if choice == "compiled" else tried(name, choice))


def pairs_of(runs: Iterable[Run]) -> set[frozenset[tuple[str, str | None]]]:
    return {frozenset(pair) for run in runs for pair in combinations(sorted(run.values, key=str), 2)}


def test_the_runs_have_each_pair_that_auto_makes() -> None:
    made = set(made_by_auto())
    assert set(RUNS) <= made and len(RUNS) <= 10
    assert not (missing := pairs_of(made) - pairs_of(RUNS)), sorted(map(sorted, missing))


# The runs ----------------------------------------------------------------------------------------------------------------


def run_and_count(rank: int, case: Case, weights: Mapping[str, torch.Tensor]) -> tuple[RankResult, int]:
    """Return the results of a rank, and how many different numbers of rows its experts had."""
    numbers, plain = set(), ActivationKernel.__call__

    def counted(self: ActivationKernel, x: torch.Tensor) -> torch.Tensor:
        numbers.add(len(x))
        return plain(self, x)

    with patch.object(ActivationKernel, "__call__", counted):
        return run_case(rank, case, weights, STEPS), len(numbers)


@cache
def weights() -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in weights_of(MODEL).items()}


@cache
def reference(dtype: str, fp8: str | None) -> RankResult:
    """Train one rank by plain operators, expert by expert."""
    return run_case(0, Run(dtype, fp8, "eager", "torch", "loop", "all_gather").case(1), weights(), STEPS)


def gradients(results: Sequence[RankResult], dtype: str) -> dict[str, torch.Tensor]:
    """Return whole gradients; those of fp16 come out times the loss scale."""
    scale = LossScaleConfig().initial if dtype == "fp16" else 1.0
    shapes = {name: tuple(weight.shape) for name, weight in weights().items() if is_trained(name)}
    found = assemble(shapes, [piece for result in results for piece in result.grads], tolerance=0.0)
    return {name: grad.double() / scale for name, grad in found.items()}


def where_it_runs(run: Run) -> Any:
    """Mark what compiles; one of them, with every choice that is fast on an H100, is in the CI tier."""
    if "compiled" not in (run.elementwise, run.optimizer):
        return run
    return pytest.param(run, marks=[compiler(), *([] if run == RUNS[0] else [pytest.mark.slow])])


@pytest.mark.distributed
@pytest.mark.parametrize("run", [where_it_runs(run) for run in RUNS], ids=str)
def test_choices_train_as_plain_operators_do(run: Run) -> None:
    """Per tensor, the difference from plain operators in the same dtype is at most twice theirs from float64."""
    results, numbers = zip(*run_ranks(run_and_count, RANKS, run.case(), weights(), timeout_seconds=600), strict=True)
    if run.dispatch == "all_to_all":
        assert min(numbers) > MOST_GRAPHS["rows"], "the compiler would take as many"
    plain, exact = reference(run.dtype, run.fp8), reference("float64", run.fp8)
    wanted, wide = gradients([plain], run.dtype), gradients([exact], "float64")
    for name, grad in gradients(results, run.dtype).items():
        error, allowed = float((grad - wanted[name]).norm()), 2 * float((wide[name] - wanted[name]).norm())
        assert error <= allowed, f"{name}: {error} > {allowed}"
    # AdamW's first update is as large where a gradient is next to zero, of either sign.
    for result in results:
        assert [loss for loss, _ in result.steps] == pytest.approx([loss for loss, _ in plain.steps], rel=1e-2)
