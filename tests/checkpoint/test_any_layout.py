"""Saved in one layout, loaded in another: the same state to the bit, and the same next steps to rounding (float64)."""

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import triaxis.engine.checkpoint.writer
from tests.checkpoint.runs import Trace, run
from tests.harness import RankFailedError, run_ranks
from tests.parity.cases import Case
from tests.planting import run_planted
from triaxis.engine.optimizer.distributed import DistributedOptimizer, OwnedBucket

pytestmark = pytest.mark.distributed

LAYOUTS = (
    {"micro_batch_size": 12},
    {"dp": 3, "offload_state": True, "micro_batch_size": 4},
    {"tp": 4, "sequence_parallel": True, "micro_batch_size": 12},
    {"pp": 2, "vpp": 2, "dp": 2, "zero": 2, "layers_per_stage": (2, 1, 2, 1), "micro_batch_size": 4},
    {"tp": 2, "pp": 2, "dp": 2, "bucket_bytes": 700, "micro_batch_size": 6},
    {"tp": 8, "micro_batch_size": 24},
    {"dp": 8, "dp_replicas": 2, "zero": 3, "micro_batch_size": 1},
    {"pp": 4, "schedule": "gpipe", "layers_per_stage": (3, 0, 2, 1), "micro_batch_size": 8},
    {
        "tp": 2,
        "pp": 4,
        "sequence_parallel": True,
        "layers_per_stage": (3, 0, 1, 2),
        "recompute": ("full", "uniform", 1),
        "micro_batch_size": 8,
    },
    {"tp": 2, "dp": 3, "micro_batch_size": 8, "bucket_bytes": 100_000},
    {"cp": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 12},
    {"cp": 4, "dp": 2, "micro_batch_size": 6, "bucket_bytes": 700},
    {
        "pp": 2,
        "vpp": 2,
        "schedule": "zbv",
        "layers_per_stage": (2, 1, 2, 1),
        "dp": 2,
        "zero": 2,
        "offload_state": True,
        "micro_batch_size": 4,
    },
)
"""Uneven and empty stages, tied embeddings across stages, replicated kv heads (tp above 1), dp that does not divide a bucket."""

MODELS = ("mqa_rope_bias", "qwen")
NUM_BEFORE, NUM_AFTER = 2, 2
"""The loss of the second step after a load depends on all that was loaded: weights, both moments, lr and step."""
TOLERANCE = 1e-9

PAIRS = [(one, (one + by) % len(LAYOUTS)) for one in range(len(LAYOUTS)) for by in (3, 5, 6, 12)]
"""Each layout saves for four others, and loads what four others saved."""
IN_CI = {(0, 3), (2, 7), (4, 10), (10, 0)}
"""With the layers ahead, each axis saves or loads in one of them, in numbers that differ; both models are among them."""


def case_of(layout: int, model: str) -> Case:
    return Case(model, num_layers=6, global_batch_size=24, **LAYOUTS[layout])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="triaxis-any-layout-") as name:
        yield Path(name)


@functools.cache
def saved(folder: Path, layout: int, model: str) -> Trace:
    """Saves at step 2 in this layout, and how it goes on from there undisturbed."""
    case = case_of(layout, model)
    section = {"interval": NUM_BEFORE, "keep_last": None}
    name = str(folder / f"{model}-{layout}")
    trace: Trace = run_ranks(run, case.world_size, case, name, NUM_BEFORE + NUM_AFTER, 0, section, (NUM_BEFORE,))[0]
    # `latest` names the end; what the others are to load is the middle.
    (Path(name) / "latest").write_text("step_00000002\n")
    return trace


@pytest.mark.parametrize(
    ("one", "other"),
    [pytest.param(*pair, marks=() if pair in IN_CI else pytest.mark.slow, id=f"{pair[0]}-{pair[1]}") for pair in PAIRS],
)
def test_any_layout_loads_what_any_other_saved(folder: Path, one: int, other: int) -> None:
    goes_over(folder, MODELS[(one // 2 + other) % 2], one, other)


@pytest.mark.parametrize(
    ("one", "other"), [(9, 12), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((3, 4), (12, 0), (4, 12)))]
)
def test_layers_of_tokens_ahead_go_over(folder: Path, one: int, other: int) -> None:
    """The last stage has an embedding of its own, or with one rank the first one's."""
    goes_over(folder, "ahead two", one, other)


def goes_over(folder: Path, model: str, one: int, other: int) -> None:
    straight = saved(folder, one, model)
    case = case_of(other, model)
    traces: list[Trace] = run_ranks(
        run, case.world_size, case, str(folder / f"{model}-{one}"), NUM_BEFORE + NUM_AFTER, 1, {}, (NUM_BEFORE,)
    )
    assert {trace.began for trace in traces} == {NUM_BEFORE}
    assert traces[0].fingerprints == straight.fingerprints, "the state is the same to the bit"
    for trace in traces:
        assert trace.losses == pytest.approx(straight.losses[NUM_BEFORE:], rel=TOLERANCE, abs=0)
    for step in range(NUM_AFTER):
        read = {sample for trace in traces for sample in trace.sample_ids[step]}
        assert read == set(range((NUM_BEFORE + step) * 24, (NUM_BEFORE + step + 1) * 24)), (
            "the data go on where they were"
        )


def every_replica_saves_layers_ahead() -> None:
    """Plant a writer that takes the replicas of what only layers ahead have for parts."""
    found = triaxis.engine.checkpoint.writer.saved_buckets

    def with_replicas(optimizer: DistributedOptimizer) -> list[OwnedBucket]:
        ahead = [owned for owned in optimizer.owned if any(".mtp." in part.record.name for part in owned.segments)]
        return [*found(optimizer), *(owned for owned in ahead if not owned.buffer.is_first)]

    triaxis.engine.checkpoint.writer.saved_buckets = with_replicas


@pytest.mark.slow
def test_layers_ahead_that_are_saved_by_each_replica_are_not_loaded(tmp_path: Path) -> None:
    case = case_of(9, "ahead two")
    run_planted(
        every_replica_saves_layers_ahead,
        run,
        case.world_size,
        case,
        str(tmp_path),
        NUM_BEFORE,
        0,
        {"interval": NUM_BEFORE},
    )
    with pytest.raises(RankFailedError, match="elements saved of"):
        run_ranks(run, case.world_size, case, str(tmp_path), NUM_BEFORE + NUM_AFTER, 1, {})
