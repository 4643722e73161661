"""A step brings no number to the host, and none from its pageable memory: norm, clipping and skipping stay on the device.

One form of dispatch of tokens to experts is the named exception: an all-to-all of rows needs their numbers on the host.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._inductor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import run_ranks
from tests.parity.cases import Case, build_rank
from tests.parity.test_parity import SMALL
from triaxis.engine.checkpoint.shards import fingerprint
from triaxis.engine.errors import DivergenceError
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.step import Engine
from triaxis.engine.telemetry.timing.clocks import HostClock
from triaxis.engine.telemetry.timing.marks import TimeMarks
from triaxis.engine.telemetry.timing.time_split import span_of

pytestmark = pytest.mark.distributed

READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "index.Tensor_hat")
"""Operators whose result the host must see before it can go on: a value, or how large a tensor is."""


class Reads(TorchDispatchMode):
    """Collects the operators that make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().removeprefix("aten::")
        indices = args[1] if name == "index.Tensor" else ()
        if name in READS or any(index is not None and index.dtype == torch.bool for index in indices):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


COPIES = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.new_tensor, torch.tensor, torch.as_tensor)
"""Calls that copy a tensor to the host, or numbers to a tensor's device."""


class Copies(TorchFunctionMode):
    """Collects the copies that wait for a GPU, and reach no operator on a CPU. From pinned memory (`to_device`) none waits."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in COPIES and "pin_memory" not in kwargs:
            self._names.append(func.__name__)
        return func(*args, **kwargs)


def waits_of_a_step(rank: int, case: Case, plant: bool) -> list[str]:
    return waits_and_marks(rank, case, plant)[0]


def waits_and_marks(rank: int, case: Case, plant: bool) -> tuple[list[str], int]:
    """Return what waits in a step and the number of its marks in the ledger; each is a part of the step's time."""
    times = TimeMarks(HostClock())
    # Compiled functions run as they are written: what they compute on the device makes nobody wait.
    with patch.object(torch._inductor, "compile", lambda graph, inputs, **options: graph):
        engine, batches = build_rank(rank, case, [times])
        engine.train_step(batches.next_step(), 1e-3)
    microbatches = batches.next_step()
    times.begin(1, is_marked=True)
    times.enter(StepPart.FORWARD_BACKWARD)
    with Reads() as reads, Copies(reads.names):
        losses = engine.forward_backward(microbatches)
        result = engine.update(losses, 1e-3)
        if plant:
            float(losses.sums[0])
            losses.sums.tolist()
            losses.sums.new_tensor(1.0)
            torch.tensor([1.0], device=losses.sums.device)
    batches.close()
    result.wait()
    marks = [event for event in engine.topology.ledger.events if event.op == "host_read"]
    times.end_step(next_is_marked=False)
    marked = times.take(2)
    assert marked is not None
    assert [span_of(each) for each in marked.activities].count("host_read") == len(marks)
    return reads.names, len(marks)


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt_dropout", pp=2, dp=2, recompute=("selective", "uniform", 1), **SMALL),
        Case("qwen", tp=2, pp=2, vpp=2, sequence_parallel=True, dtype="bf16", num_layers=4, global_batch_size=2),
        Case(
            "llama",
            recompute=("full", "block", 2),
            modules=("norm", "rope", "activation"),
            offload=4,
            num_layers=4,
            global_batch_size=2,
        ),
        Case("deepseek", dp=2, ep=2, dtype="bf16", dispatch="all_gather", experts="grouped", global_batch_size=4),
        Case("llama", num_layers=2, micro_batch_size=8, dtype="fp16", compiled=True, groups=True),
    ],
    ids=str,
)
def test_a_step_waits_for_no_number(case: Case) -> None:
    assert run_ranks(waits_of_a_step, case.world_size, case, False) == [[]] * case.world_size


def test_a_planted_wait_is_seen() -> None:
    (names,) = run_ranks(waits_of_a_step, 1, Case("gpt"), True)
    assert names == ["_local_scalar_dense", "tolist", "new_tensor", "tensor"]


MOE_LAYERS, MICROBATCHES = 3, 2


@pytest.mark.parametrize(
    ("case", "reads"),
    [
        # Numbers of rows, once per layer and microbatch; the ends of the experts come with them.
        (Case("deepseek", dp=2, ep=2, dispatch="all_to_all"), 1),
        # With full recompute the replay exchanges rows again.
        (Case("deepseek", dp=2, ep=2, dispatch="all_to_all", recompute=("full", "uniform", 1)), 2),
        # A loop over experts is for the CPU: it reads their ends, which a dispatch by all-gather leaves on the device.
        (Case("deepseek", dispatch="all_gather"), 1),
    ],
    ids=str,
)
def test_reads_of_experts_are_named(case: Case, reads: int) -> None:
    case = replace(case, global_batch_size=MICROBATCHES * case.dp)
    for names, marked in run_ranks(waits_and_marks, case.world_size, case, False):
        assert names == ["tolist"] * (reads * MOE_LAYERS * MICROBATCHES)
        assert marked == len(names)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Every call that waits for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steps_on_a_gpu(rank: int, case: Case) -> int:
    engine, batches = build_rank(rank, case)
    engine.train_step(batches.next_step(), 1e-3)
    with no_synchronisation():
        results = [engine.update(engine.forward_backward(batches.next_step()), 1e-3) for _ in range(3)]
    batches.close()
    return len([result.wait() for result in results])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "dtype"), [("gpt_dropout", "bf16"), ("llama", "bf16"), ("qwen", "bf16"), ("llama", "fp16")]
)
def test_a_step_on_a_gpu_never_waits(model: str, dtype: str) -> None:
    assert run_ranks(steps_on_a_gpu, 1, Case(model, dtype=dtype, device="cuda")) == [3]


# What is not finite ------------------------------------------------------------------------------------------------------


def state(engine: Engine) -> tuple[dict[str, int], int, list[torch.Tensor]]:
    """Fingerprints of masters and moments, the number of updates, and every weight of this rank."""
    engine.buffers.wait_all()
    weights = [parameter.value.detach().clone() for parameter in engine.parameters.values()]
    return dict(fingerprint(engine)), engine.optimizer.num_updates, weights


def diverge(rank: int, case: Case, where: str) -> tuple[list[str], bool, int]:
    """(errors of the bad step and of a good one after it, whether anything changed, updates) with inf or nan on one rank."""
    engine, batches = build_rank(rank, case)
    engine.train_step(batches.next_step(), 1e-2)
    before = state(engine)
    errors = []
    for step in range(2):
        losses = engine.forward_backward(batches.next_step())
        if step == 0 and where == "gradient" and rank == case.world_size - 1:
            # Replicas are equal, so the norm counts the first one only.
            next(owned for owned in engine.optimizer.owned if owned.buffer.is_first).grads[0] = torch.inf
        if step == 0 and where == "loss":
            losses.sums[0] = torch.nan
        result = engine.update(losses, 1e-2)
        try:
            result.wait()
        except DivergenceError as error:
            errors.append(str(error))
    after = state(engine)
    batches.close()
    is_same = before[:2] == after[:2] and all(torch.equal(a, b) for a, b in zip(before[2], after[2], strict=True))
    return errors, is_same, after[1]


@pytest.mark.parametrize("where", ["gradient", "loss"])
@pytest.mark.parametrize("case", [Case("gpt", **SMALL), Case("llama", tp=2, pp=2, dtype="bf16", **SMALL)], ids=str)
def test_what_is_not_finite_changes_nothing_on_any_rank(case: Case, where: str) -> None:
    for errors, is_same, num_updates in run_ranks(diverge, case.world_size, case, where):
        assert is_same and num_updates == 1
        bad, good = errors
        assert "tokens are not finite" in bad and "those of a step before were not" in good
        assert "Nothing was changed" in bad
