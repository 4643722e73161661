"""Steps of a rank while a checkpoint is written, executed in an order; and the same with something taken out of the engine."""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cuda_stub.one_rank import built
from tests.cuda_stub.plants import NEEDLESS, PLANTS
from tests.cuda_stub.values import executed
from tests.harness import run_ranks
from triaxis.engine.checkpoint.writer import RankWriter

AT_ONCE = ""
ORDERS = ("late", "early", "1", "2", "3", "4", "5")

PLAIN = ("kernels.elementwise=eager", "kernels.optimizer=torch")
"""Nothing is compiled: a process is needed for each order."""

Found = list[object]
"""Each step's numbers, the loss of validation, and the digest of the checkpoint's file."""


def layout(**sizes: int) -> list[str]:
    """Return settings of `parallel`, with sequence parallelism where tp cuts."""
    axes = [f"parallel.{axis}={sizes.get(axis, 1)}" for axis in ("tp", "pp", "vpp", "dp", "cp", "ep")]
    return [*axes, f"parallel.sequence_parallel={'tp' in sizes}".lower()]


OFFLOAD = ["offload.num_layers=2", "offload.min_bytes=1"]

LAYOUTS: dict[str, tuple[int, str, list[str]]] = {
    "tp": (2, "gpt_tiny", layout(tp=2)),
    "pp": (2, "gpt_tiny", layout(pp=2, vpp=2)),
    "zbv": (2, "gpt_tiny", [*layout(pp=2, vpp=2), "schedule.name=zbv"]),
    "cp": (2, "gpt_tiny", layout(cp=2)),
    "ep": (2, "moe_tiny", [*layout(dp=2, ep=2), "kernels.dispatch=all_to_all"]),
    "zero 3": (2, "gpt_tiny", [*layout(dp=2), "parallel.zero=3"]),
    "offload": (2, "gpt_tiny", [*layout(dp=2), *OFFLOAD, "optimizer.offload=cpu"]),
    "gloo": (2, "gpt_tiny", [*layout(pp=2), "runtime.collectives=gloo"]),
}
"""Ranks, configuration and settings."""

MORE_LAYOUTS = {
    "zero 2": (2, "gpt_tiny", [*layout(dp=2), "parallel.zero=2"]),
    "replicas": (4, "gpt_tiny", [*layout(dp=4), "parallel.dp_replicas=2"]),
    "tp zbv": (4, "gpt_tiny", [*layout(tp=2, pp=2, vpp=2), "schedule.name=zbv"]),
    "ep by gather": (2, "moe_tiny", [*layout(dp=2, ep=2), "kernels.dispatch=all_gather"]),
    "expert dp": (4, "moe_tiny", [*layout(dp=4, ep=2), "kernels.dispatch=all_to_all"]),
    "fp8": (2, "gpt_tiny", [*layout(tp=2), "precision.fp8.recipe=tensorwise"]),
    "fp8 dp": (4, "gpt_tiny", [*layout(dp=4), "parallel.dp_replicas=2", "precision.fp8.recipe=tensorwise"]),
}
"""Others, in which something is taken out that those above do not have."""


def run_layout(name: str, order: str, plant: str | None = None, limit: float = 400) -> list[Found]:
    """Run the ranks of a layout in an order; return what each found."""
    size, model, settings = (LAYOUTS | MORE_LAYOUTS)[name]
    is_staged = "runtime.collectives=gloo" in settings
    dtype = "bf16" if any("fp8" in word for word in settings) else "fp32"
    given = (model, [f"precision.dtype={dtype}", *PLAIN, *settings], order, plant)
    return run_ranks(found_in_order, size, *given, device="cuda", staged=is_staged, timeout_seconds=limit)


@cache
def at_once(name: str) -> list[Found]:
    return run_layout(name, AT_ONCE)


def found_in_order(rank: int, name: str, settings: Sequence[str], order: str, plant: str | None = None) -> Found:
    """Train three steps in an order, and validate. After the first, the state is saved in the background.

    Args:
        plant: name in `plants.py` of what is taken out of the engine, before the steps.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        engine, batches = stack.enter_context(built(rank, name, settings, "cuda"))
        writer = RankWriter(engine.optimizer, rank, in_background=True, on_retry=_raise)
        stack.callback(writer.close)
        stack.enter_context(executed(order))
        if plant is not None:
            (PLANTS | NEEDLESS)[plant][1](patch)
        posted = [engine.update(engine.forward_backward(batches.next_step()), 1e-3)]
        saved = writer.save(folder)
        # As in training, the host reads a step when more are posted: nothing it has filled may be filled anew before.
        posted += [engine.update(engine.forward_backward(batches.next_step()), 1e-3) for _ in range(2)]
        steps = [each.wait() for each in posted]
        validated = engine.evaluate([batches.next_step()])
        saved.result()
        (file,) = folder.glob("*.safetensors")
        return [*steps, validated, hashlib.sha256(file.read_bytes()).hexdigest()]


def _raise(error: OSError) -> None:
    raise error
