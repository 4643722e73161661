"""List the legal layouts of a run on a cluster: the candidates for a search (`launch/planning/search.py`).

Sizes come first (`models/predict/axis_sizes.py`), and what breaks a rule about sizes alone is left out at once:

    tp x cp x pp x dp x ep x etp, sequence parallelism  ->  rules  ->  micro batch x (chunks, schedule, layers per stage)

No rule reads both a micro batch and stages, so each is checked alone.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Literal

from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of, work_of_cut
from triaxis.engine.config.rules.check import RULES, broken_keys
from triaxis.engine.config.rules.layout import (
    layers_fill_stages,
    schedule_file_fits,
    schedule_matches_chunks,
    schedule_problems,
)
from triaxis.engine.config.rules.needs import NEEDS
from triaxis.engine.config.rules.problem import Rule, Subject, divisors
from triaxis.engine.config.rules.sizes import LIMITS, TOKENS_IN_FP8
from triaxis.engine.config.rules.training import batch_is_whole_microbatches, microbatches_can_be_listed
from triaxis.engine.config.schema.layout import IS_INTERLEAVED, RUNS_IN_A_V
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.axis_sizes import in_all_sizes
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

RULES_OF_MICRO_BATCHES: tuple[Rule, ...] = (
    *(batch_is_whole_microbatches, microbatches_can_be_listed, schedule_file_fits, TOKENS_IN_FP8),
)
RULES_OF_STAGES: tuple[Rule, ...] = (
    *(layers_fill_stages, schedule_matches_chunks, schedule_file_fits),
    *(row for row in (*NEEDS, *LIMITS) if row.key in ("schedule.name", "offload.num_layers")),
)
RULES_OF_SIZES = tuple(rule for rule in RULES if rule not in (*RULES_OF_MICRO_BATCHES, *RULES_OF_STAGES))
"""Of the searched fields, a rule reads the sizes of axes, and besides them the micro batch or the stages at most."""


@dataclass(frozen=True, slots=True)
class Block:
    """The legal layouts with the same sizes of axes: each micro batch with each way to run the pipeline.

    Attributes:
        config: the run with these sizes, without recomputation.
        micro_batches: samples per forward, smallest first.
        stages: ways to run the pipeline.
    """

    config: Config
    micro_batches: Sequence[int]
    stages: Sequence[Stages]

    def __len__(self) -> int:
        return len(self.micro_batches) * len(self.stages)

    @property
    def sizes(self) -> ParallelSizes:
        """The axes' sizes."""
        return parallel_sizes(self.config)

    @property
    def deepest(self) -> list[Stages]:
        """The stages with most chunks of each schedule: no others of the same schedule wait less in its bubble."""
        by_chunks = sorted(self.stages, key=lambda each: each[0])
        return list({name: (vpp, name, cut) for vpp, name, cut in by_chunks}.values())

    def run(self, micro: int, stages: Stages) -> Config:
        """Build the run's configuration in one of these layouts."""
        vpp, name, cut = stages
        whole = self.config
        return whole.model_copy(
            update={
                "parallel": whole.parallel.model_copy(update={"vpp": vpp, "layers_per_stage": cut}),
                "schedule": whole.schedule.model_copy(update={"name": name}),
                "train": whole.train.model_copy(update={"micro_batch_size": micro}),
            }
        )

    def layout(self, micro: int, stages: Stages) -> tuple[Config, ParallelSizes]:
        """Build the run in one of these layouts, which must be legal, and its sizes."""
        trial = self.run(micro, stages)
        return trial, parallel_sizes(trial)


def legal_layouts(config: Config, cluster: Cluster) -> Iterator[tuple[Config, ParallelSizes]]:
    """Yield the run in every legal layout on all of a cluster's devices, without recomputation."""
    for block in blocks(config, cluster):
        yield from (block.layout(micro, stages) for micro, stages in product(block.micro_batches, block.stages))


def blocks(config: Config, cluster: Cluster) -> Iterator[Block]:
    """Yield the legal layouts of a run on all of a cluster's devices, without recomputation, by their axes' sizes."""
    for block in _all_blocks(config, cluster):
        if len(legal := _legal_part(block, cluster)):
            yield legal


def broken_fields(config: Config, cluster: Cluster) -> Counter[str]:
    """Count the sizes of axes that break a rule, by the rule's field."""
    firsts = (block.run(block.micro_batches[0], block.stages[0]) for block in _all_blocks(config, cluster))
    broken = (broken_keys(Subject(first, cluster.num_gpus, cluster.gpus_per_node), RULES) for first in firsts)
    return Counter(key for keys in broken for key in {key for _, key in keys})


def _all_blocks(config: Config, cluster: Cluster) -> Iterator[Block]:
    """Yield the layouts of a run on all of a cluster's devices, illegal ones too."""
    runtime = config.runtime.model_copy(update={"ranks_per_node": cluster.gpus_per_node})
    config = config.model_copy(update={"recompute": RecomputeConfig(), "runtime": runtime})
    memo = Memo()
    stages = cache(lambda pp: list(_stages(config, pp, memo)))
    for whole in in_all_sizes(config, cluster.num_gpus, cluster.gpus_per_node):
        yield Block(whole, _micro_batches(whole), stages(whole.parallel.pp))


def _legal_part(block: Block, cluster: Cluster) -> Block:
    """Return the block without its illegal layouts."""
    micro, stages = block.micro_batches[0], block.stages[0]

    def keeps(rules: Sequence[Rule], micro: int = micro, stages: Stages = stages) -> bool:
        return not broken_keys(Subject(block.run(micro, stages), cluster.num_gpus, cluster.gpus_per_node), rules)

    if not keeps(RULES_OF_SIZES):
        return replace(block, stages=())
    return replace(
        block,
        micro_batches=[each for each in block.micro_batches if keeps(RULES_OF_MICRO_BATCHES, micro=each)],
        stages=[each for each in block.stages if keeps(RULES_OF_STAGES, stages=each)],
    )


def _micro_batches(config: Config) -> list[int]:
    """List the micro batch sizes that divide a pipeline's samples per step and have at most `MOST_TOKENS` tokens per rank.

    The size is 1 alone if pipelines have unequally many samples, which breaks a rule.
    """
    samples, rest = divmod(config.train.global_batch_size, config.parallel.dp or 1)
    most = max(1, MOST_TOKENS * config.parallel.cp // config.model.seq_length)
    return [1] if rest else [size for size in divisors(samples, 1) if size <= most]


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
