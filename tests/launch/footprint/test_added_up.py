"""A step added up from few microbatches is the whole step: every call, wait, operator and byte."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch

from tests.harness import RankFailedError, run_ranks
from tests.parity.cases import Case
from triaxis.engine.config.tree import Config
from triaxis.launch.footprint.run import Footprint, Footprints
from triaxis.models.gpt.chunk import build_chunks

CI = ((Case("llama", pp=2, vpp=2, dp=2, global_batch_size=16, dtype="bf16"), (3,)),)
SLOW = (
    (Case("llama", tp=2, pp=2, schedule="gpipe", global_batch_size=6, dtype="fp32"), (0,)),
    (Case("gpt", tp=2, pp=4, dp=2, sequence_parallel=True, global_batch_size=14, dtype="bf16"), (5, 15)),
    (Case("gpt", tp=2, pp=4, dp=2, sequence_parallel=True, global_batch_size=24, dtype="bf16"), (0, 5, 9, 15)),
    (Case("gpt_dropout", global_batch_size=10, micro_batch_size=2, dtype="bf16"), (0,)),
    (Case("mqa_rope_bias", tp=4, vpp=2, pp=2, global_batch_size=15, sequence_parallel=True), (0, 7)),
    (Case("qwen", tp=2, pp=4, global_batch_size=20, recompute=("full", "block", 1), dtype="bf16"), (0, 2, 7)),
    (Case("llama", pp=2, dp=2, layers_per_stage=(1, 3), global_batch_size=20, dtype="bf16"), tuple(range(4))),
    (Case("gpt", tp=2, pp=2, vpp=2, global_batch_size=19, recompute=("selective", "uniform", 1)), (0, 3)),
    (Case("gpt", tp=2, pp=2, vpp=2, schedule="interleaved", global_batch_size=20, dtype="bf16"), (0, 3)),
)


def thin(case: Case) -> Config:
    """The case with four layers and fewer buckets: fewer operators show the same."""
    config = case.config()
    model = config.model.model_copy(update={"num_layers": 4})
    optimizer = config.optimizer.model_copy(update={"bucket_bytes": 2**15})
    return config.model_copy(update={"model": model, "optimizer": optimizer})


def both(rank: int, config: Config, ranks: Sequence[int]) -> list[tuple[Footprint, Footprint]]:
    """(added up, run in full) of some ranks, in a process without a group of its own."""
    short, full = (Footprints(config, build_chunks, full=full) for full in (False, True))
    return [(short.of(one), full.of(one)) for one in ranks]


def differences(got: Footprint, want: Footprint) -> list[str]:
    """Names of the attributes that differ, how many microbatches ran apart."""
    names = [each.name for each in fields(Footprint) if each.name != "run_microbatches"]
    return [name for name in names if getattr(got, name) != getattr(want, name)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        *(pytest.param(*each, id=str(each[0])) for each in CI),
        *(pytest.param(*each, id=str(each[0]), marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_it_equals_the_full_run(case: Case, ranks: Sequence[int]) -> None:
    (found,) = run_ranks(both, 1, thin(case), ranks, timeout_seconds=600)
    for rank, (short, full) in zip(ranks, found, strict=True):
        assert short.run_microbatches < short.num_microbatches == full.run_microbatches
        assert differences(short, full) == [], f"rank {rank}"
        # So that equality is of something: there are waits, and operators of every place.
        assert {"post", "wait"} <= {event.phase for event in full.log} or case.world_size == 1
        assert {"blocks", "optimizer", "pipeline"} <= full.ops.keys()


def stages(rank: int, config: Config) -> tuple[list[Footprint], list[Footprint]]:
    full = Footprints(config, build_chunks, full=True)
    ranks = [full.grid.rank(pp=pp) for pp in range(full.sizes.pp)]
    return Footprints(config, build_chunks).of_stages(), [full.of(one) for one in ranks]


@pytest.mark.distributed
@pytest.mark.slow
def test_a_stage_stands_for_those_with_equal_contents() -> None:
    config = thin(Case("gpt", tp=2, pp=4, dp=2, global_batch_size=24, dtype="bf16"))
    ((found, full),) = run_ranks(stages, 1, config, timeout_seconds=600)
    for pp, (got, want) in enumerate(zip(found, full, strict=True)):
        assert differences(got, want) == [], f"stage {pp}"


def with_an_odd_microbatch(rank: int, config: Config) -> None:
    """A chunk that makes one tensor more in its third forward."""

    def build(*args: Any) -> Any:
        chunks, parameters = build_chunks(*args)
        forwards: list[int] = []

        def one_more(module: Any, inputs: Any) -> None:
            forwards.append(0)
            if len(forwards) == 3:
                torch.zeros(8)

        for chunk in chunks:
            chunk.register_forward_pre_hook(one_more)
        return chunks, parameters

    Footprints(config, build).of(0)


@pytest.mark.distributed
def test_microbatches_that_are_not_alike_are_not_added_up() -> None:
    with pytest.raises(RankFailedError, match=r"0F2 did not cost what an earlier instruction of its kind did.*--full"):
        run_ranks(with_an_odd_microbatch, 1, thin(Case("gpt", pp=4, global_batch_size=8)))


def first_rank(rank: int, config: Config) -> Footprint:
    return Footprints(config, build_chunks).of(0)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param(("none", "uniform", 1), id="kept", marks=pytest.mark.slow),
        pytest.param(("full", "uniform", 2), id="again"),
    ],
)
def test_an_operator_belongs_to_the_module_that_needs_it(recompute: tuple[str, str, int]) -> None:
    (found,) = run_ranks(first_rank, 1, thin(Case("gpt", tp=2, global_batch_size=3, recompute=recompute)))
    reduced = {place: counts["c10d::allreduce_"] for place, counts in found.ops.items()}
    # A layer's two forward (twice if computed again) and two backward; the embedding's forward; the head's backward, and two of
    # the cross-entropy; the step's small ones, of its labels and at its end. Four layers, three microbatches.
    per_layer = 6 if recompute[0] == "full" else 4
    expected = {"embedding": 3, "blocks": 3 * 4 * per_layer, "loss": 3 * 3, "gradients": 1, "optimizer": 1}
    assert {place: count for place, count in reduced.items() if count} == expected
