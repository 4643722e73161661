"""List the legal layouts of a run on a cluster: the candidates for a search (`launch/planning/search.py`).

Sizes come first, and what breaks a rule about sizes alone is left out at once:

    tp x cp x pp x dp x ep x etp, sequence parallelism  ->  micro batch  ->  chunks, schedule, layers per stage  ->  rules
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal

from triaxis.engine.config.activations import RecomputeConfig
from triaxis.engine.config.layout import (
    IS_INTERLEAVED,
    RUNS_IN_A_V,
    ParallelConfig,
    schedule_problems,
)
from triaxis.engine.config.plan import parallel_sizes, stages_of, work_of_cut
from triaxis.engine.config.section import Subject, divisors
from triaxis.engine.config.sizes import SEQUENCE_OVER_RANKS
from triaxis.engine.config.tree import RULES, Config, broken_keys
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.cut import Memo
from triaxis.models.predict.step_time.cluster import Cluster

MOST_TOKENS = 65536
"""Largest microbatch per rank, in tokens; larger ones fill a GPU no better."""

NEVER_FASTER = frozenset({"gpipe"})
"""Schedules that wait as long as another one and need more memory: GPipe's ranks hold all microbatches, 1F1B's rank r of p
holds p - r."""


Cut = Literal["auto"] | None
"""A value of `parallel.layers_per_stage` to try."""

CUTS: tuple[Cut, Cut] = (None, "auto")

Stages = tuple[int, str, Cut]
"""Chunks per rank, schedule, layers per stage."""


def legal_layouts(config: Config, cluster: Cluster, illegal: Counter[str]) -> Iterator[tuple[Config, ParallelSizes]]:
    """Yield the run in every legal layout on all of a cluster's devices, without recomputation.

    Illegal layouts are counted in `illegal`, by the field whose rule they break.
    """
    n, per_node = cluster.num_gpus, cluster.gpus_per_node
    train, memo = config.train, Memo()
    of_pp = {pp: list(_stages(config, pp, memo)) for pp in divisors(n, 1) if pp <= config.model.num_layers}
    for tp, cp, pp in product(divisors(per_node, 1), divisors(n, 1), of_pp):
        if n % (tp * cp * pp):
            continue
        dp = n // (tp * cp * pp)
        if train.global_batch_size % dp:
            illegal["train.global_batch_size"] += 1
            continue
        of_pipeline = list(product(_micro_batches(config, dp, cp), of_pp[pp]))
        for is_cut, (ep, etp) in product((True, False) if tp > 1 else (False,), _expert_cuts(config, tp, cp * dp)):
            whole = config.parallel.model_copy(
                update={"tp": tp, "cp": cp, "pp": pp, "dp": dp, "sequence_parallel": is_cut, "ep": ep, "etp": etp}
            )
            # Rules about these sizes alone, which most sizes of cp break.
            coarse = Subject(config.model_copy(update={"parallel": whole}), n, per_node)
            if any(problem for rule in SEQUENCE_OVER_RANKS for problem in rule(coarse)):
                illegal["model.seq_length"] += len(of_pipeline)
                continue
            yield from _of_pipeline(config, cluster, whole, of_pipeline, illegal)


def _of_pipeline(
    config: Config,
    cluster: Cluster,
    whole: ParallelConfig,
    of_pipeline: Sequence[tuple[int, Stages]],
    illegal: Counter[str],
) -> Iterator[tuple[Config, ParallelSizes]]:
    """Yield the legal combinations of micro batch and stages for the axes' sizes in `whole`; count the illegal ones."""
    n, per_node, nothing = cluster.num_gpus, cluster.gpus_per_node, RecomputeConfig()
    runtime = config.runtime.model_copy(update={"ranks_per_node": per_node})
    for micro, (vpp, name, cut) in of_pipeline:
        trial = config.model_copy(
            update={
                "parallel": whole.model_copy(update={"vpp": vpp, "layers_per_stage": cut}),
                "schedule": config.schedule.model_copy(update={"name": name}),
                "train": config.train.model_copy(update={"micro_batch_size": micro}),
                "recompute": nothing,
                "runtime": runtime,
            }
        )
        if broken := broken_keys(Subject(trial, n, per_node), RULES):
            illegal[min(key for _, key in broken)] += 1
        else:
            yield trial, parallel_sizes(trial)


def _expert_cuts(config: Config, tp: int, others: int) -> list[tuple[int, int]]:
    """List the pairs (ep, etp) whose product divides a stage's tp x `others` ranks, where `others` is cp x dp.

    Only then do the ranks of a stage hold whole sets of experts. A dense model has (1, 1) alone.
    """
    moe = config.model.moe
    if moe is None:
        return [(1, 1)]
    cuts = product(divisors(moe.num_experts, 1), dict.fromkeys((1, tp)))
    return [(ep, etp) for ep, etp in cuts if tp * others % (ep * etp) == 0]


def _micro_batches(config: Config, dp: int, cp: int) -> list[int]:
    """List the micro batch sizes that divide a pipeline's samples per step and have at most `MOST_TOKENS` tokens per rank."""
    most = max(1, MOST_TOKENS * cp // config.model.seq_length)
    return [size for size in divisors(config.train.global_batch_size // dp, 1) if size <= most]


def _stages(config: Config, pp: int, memo: Memo) -> Iterator[Stages]:
    """Yield each (vpp, schedule, layers per stage) to try for a pipeline of `pp` ranks; a single one for one rank.

    A vpp is skipped if a smaller one has at most as much work on its busiest rank, and in its deepest chunk, as this one. It would
    add time slots to the schedule, and no slot would be shorter.
    """
    if pp == 1:
        yield 1, "auto", None
        return
    for name in IS_INTERLEAVED:
        if name in NEVER_FASTER:
            continue
        fewer: dict[Cut, list[tuple[int, int]]] = {None: [], "auto": []}
        for vpp in range(1, config.model.num_layers // pp + 1):
            if any(schedule_problems(name, vpp)):
                continue
            even, balanced = (_counts(config, pp, vpp, name, cut, memo) for cut in CUTS)
            for cut, counts in zip(CUTS, (even, balanced), strict=True):
                # All ranks wait for the busiest one, and in a slot for the deepest chunk.
                work = work_of_cut(config, pp, vpp, counts, memo, is_v=name in RUNS_IN_A_V)
                if any(load <= work[0] and depth <= work[1] for load, depth in fewer[cut]):
                    continue
                fewer[cut].append(work)
                if cut is None or balanced != even:
                    yield vpp, name, cut


def _counts(config: Config, pp: int, vpp: int, name: str, cut: Cut, memo: Memo) -> tuple[int, ...]:
    """Count the layers in each of a pipeline's stages."""
    parallel = config.parallel.model_copy(update={"pp": pp, "vpp": vpp, "layers_per_stage": cut})
    schedule = config.schedule.model_copy(update={"name": name})
    trial = config.model_copy(update={"parallel": parallel, "schedule": schedule})
    return tuple(stage.num_own for stage in stages_of(trial, memo))
