"""Run one training step of one rank in any layout, in one process.

The engine's own code runs on fake tensors in a fake process group. So a rank out of thousands runs on a laptop. Three things are
counted: calls and bytes of collectives, memory by kind, and dispatched operators.

If there are many microbatches, only some of them run. The others' calls and memory are added up from those that ran
(`triaxis.launch.footprint.parts`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from triaxis.engine.comm.ledger import Event
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import batch_plan, parallel_sizes, part_length, rank_grid, stages_of
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.cut import ContextCut
from triaxis.engine.data.documents import Documents
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.errors import TopologyError
from triaxis.engine.layout.rank_grid import Coordinates, ParallelSizes
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.lowering import Program, lower
from triaxis.engine.step import Engine
from triaxis.engine.train import ModelBuilder, build
from triaxis.launch.footprint.memory import Extremes, MemoryKind, MemoryWatch, NewTensor, Peak, SavedTensor
from triaxis.launch.footprint.parts import PartBook, Recorder, covers, likenesses
from triaxis.launch.footprint.routing import Counts, counts_in_turn, know_rows, known_rows
from triaxis.models.predict.rank_memory import resolve_recompute

HEAD_MODULES = ("head", "losses")
"""Modules in the last chunk whose saved tensors are logits."""

PLACES = {
    "": "positions",
    "embedding": "embedding",
    "blocks": "blocks",
    "ahead": "tokens ahead",
    "final_norm": "loss",
    "head": "loss",
    "losses": "loss",
}
"""An operator's place, by the chunk's child that needs it; "" is a chunk's work before any child runs (RoPE tables)."""

FEWEST_MICROBATCHES = 4

AS_WRITTEN = {
    "kernels.elementwise": "eager",
    "kernels.weight_grad": "separate",
    "kernels.optimizer": "torch",
    "kernels.linear": "torch",
    "kernels.graphs": "off",
}
"""Settings under which operators are counted as written: compiled and third-party kernels need a device, and there is none."""

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Footprint:
    """One rank's work and memory in a step.

    Attributes:
        coordinates: the rank's coordinates.
        stages: numbers of the rank's pipeline stages.
        num_microbatches: microbatches in the step.
        run_microbatches: number of microbatches that were run; the others were added up.
        state: bytes of parameters, gradients and optimizer between steps, by kind, without host memory.
        peak: live bytes by kind at the moment with the most.
        most: peak bytes of each kind; the peaks may be at different moments.
        largest: largest tensor that an operator in the step created.
        saved: tensors that each chunk's first forward keeps for its backward, in order.
        log: communication events, posts and waits in order.
        ops: number of dispatches, by place and operator name. Places are the values in `PLACES`; outside the model, `pipeline`,
            `gradients` and `optimizer`.
    """

    coordinates: Coordinates
    stages: tuple[int, ...]
    num_microbatches: int
    run_microbatches: int
    state: dict[MemoryKind, int]
    peak: Peak
    most: dict[MemoryKind, int]
    largest: NewTensor
    saved: tuple[SavedTensor, ...]
    log: tuple[Event, ...]
    ops: dict[str, Counter[str]]

    @property
    def events(self) -> tuple[Event, ...]:
        """The step's communication calls: the `post` events in `log`, without its `wait` events."""
        return tuple(event for event in self.log if event.phase == "post")


class Footprints:
    """Computes each rank's footprint in a layout: its work and memory in one training step.

    Kernels are replaced by those in `AS_WRITTEN`, and Transformer Engine's attention by torch's.

    Args:
        config: the run's configuration; `parallel.dp` is set.
        build_model: model builder, as for training.
        full: whether every microbatch is run; with ZeRO-3 it always is.
        counts: expert choices in every layer and microbatch; None: experts take turns (`launch/footprint/routing.py`).
    """

    def __init__(
        self, config: Config, build_model: ModelBuilder, *, full: bool = False, counts: Counts | None = None
    ) -> None:
        for key, choice in AS_WRITTEN.items():
            config = with_value(config, key, choice)
        if config.kernels.attention == "te":
            config = with_value(config, "kernels.attention", "sdpa")
        self.sizes = sizes = parallel_sizes(config)
        self.config = config = resolve_recompute(config, sizes)
        self.build_model = build_model
        self.grid = rank_grid(config, sizes)
        self.stages = stages_of(config)
        self.num_microbatches = batch_plan(config, sizes.dp).num_microbatches
        # Which weights are in their slots depends on more than an action's likeness.
        self.full = full or config.parallel.zero > 2
        self._has_slots = config.parallel.zero > 1
        self._counts = counts
        self.program = self._lowered(self.num_microbatches)
        self._short_programs: dict[int, Program] = {}
        self._steps: dict[tuple[object, ...], list[tuple[Footprint, PartBook]]] = {}

    def counts_of(self, rank: int) -> Counts | None:
        """Return the assumed expert choices of the ranks that share experts with `rank`. None if the model has no experts."""
        if not self.config.model.has_experts or self._counts is not None:
            return self._counts
        return counts_in_turn(self.config, self.grid, rank, assumed_rows(self.config))

    def of(self, rank: int) -> Footprint:
        """Run one training step of this rank on fake tensors, and return its footprint.

        If only some microbatches run, the others' calls and memory are computed from those that ran.

        Raises:
            TopologyError: there is no such rank, or this process already belongs to a process group.
            ScheduleError: the microbatches that ran are not alike (see `PartBook.of`).
        """
        require_rank(rank, self.sizes)
        at = self.grid.coordinates(rank)
        enough = self.num_microbatches if self.full else self.enough_microbatches(at.pp)
        if enough == self.num_microbatches:
            return self._run(rank, enough)[0]
        found, recorder = self._run(rank, enough)
        return self._added_up(found, PartBook.of(recorder, has_slots=self._has_slots), at)

    def of_stages(self) -> list[Footprint]:
        """Return the footprints of the ranks with tp, cp and dp index 0, by pp index.

        Ranks with equal chunks do the same work. So one of them runs, and the others' footprints are computed from its
        instructions. A rank with an instruction unlike all of these runs too. If all microbatches run (`full`), all ranks run.

        Raises:
            ScheduleError: the microbatches that ran are not alike (see `PartBook.of`).
        """
        return [self._like(pp) for pp in range(self.sizes.pp)]

    def enough_microbatches(self, pp: int) -> int:
        """Return how many microbatches must run so that the others' work and memory follow (see `covers`)."""
        whole = likenesses(self.program, pp, has_slots=self._has_slots)
        # An interleaved schedule's partial last group has the same size in the short step.
        group = self.sizes.pp if self.sizes.vpp > 1 and not self.sizes.is_v else 1
        num_groups = FEWEST_MICROBATCHES if group == 1 else 1
        while (count := num_groups * group + self.num_microbatches % group) < self.num_microbatches:
            if covers(likenesses(self._short_program(count), pp, has_slots=self._has_slots), whole):
                return count
            num_groups += (num_groups + 1) // 2
        return self.num_microbatches

    def _like(self, pp: int) -> Footprint:
        rank = self.grid.rank(pp=pp)
        if self.full:
            return self.of(rank)
        mine = [self.stages[stage] for stage in self.program.schedule.placement.stages_on(pp)]
        kinds = self.config.model.kinds
        contents = tuple(
            (tuple(kinds[layer] for layer in stage.layers), stage.has_embedding, stage.has_head) for stage in mine
        )
        steps = self._steps.setdefault(contents, [])
        at = self.grid.coordinates(rank)
        for found, book in steps:
            if book.covers(self.program, pp):
                return self._added_up(found, book, at)
        found, recorder = self._run(rank, self.enough_microbatches(pp))
        steps.append((found, PartBook.of(recorder, has_slots=self._has_slots)))
        return self._added_up(*steps[-1], at)

    def _run(self, rank: int, num_microbatches: int) -> tuple[Footprint, Recorder]:
        config = self.config
        if num_microbatches != self.num_microbatches:
            samples = num_microbatches * config.train.micro_batch_size * self.sizes.dp
            train = config.train.model_copy(update={"global_batch_size": samples})
            config = config.model_copy(update={"train": train})
        with self.watched_engine(config, rank) as (engine, watch):
            return watch_step(engine, microbatches(engine), watch)

    @contextmanager
    def watched_engine(self, config: Config, rank: int) -> Iterator[tuple[Engine, MemoryWatch]]:
        """Build a rank's engine on fake tensors under an active memory watch; yield both."""
        # Counting needs real tensors, so it happens outside FakeTensorMode.
        counts = self.counts_of(rank)
        with fake_world(rank, self.sizes.world_size), FakeTensorMode(allow_non_fake_inputs=True):
            topology = Topology(
                self.grid, rank, CPU, kv_heads=config.model.kv_heads, has_experts=config.model.has_experts
            )
            with MemoryWatch() as watch:
                engine = build(
                    config, topology, self.build_model, fill=lambda parameters, seed: None, on_saved=watch.on_saved
                )
                if counts is not None:
                    know_rows(engine, known_rows(counts, self.grid, rank))
                yield engine, watch
            topology.close()

    def _added_up(self, ran: Footprint, book: PartBook, at: Coordinates) -> Footprint:
        total = book.add_up(self.program, at.pp)
        return _footprint(
            at,
            self.program.schedule.placement.stages_on(at.pp),
            self.num_microbatches,
            ran.num_microbatches,
            ran.state,
            total.extremes,
            ran.saved,
            total.log,
        )

    def _lowered(self, num_microbatches: int) -> Program:
        return lower(schedules.of_config(self.config, self.sizes.pp, self.sizes.vpp, num_microbatches))

    def _short_program(self, num_microbatches: int) -> Program:
        if num_microbatches not in self._short_programs:
            self._short_programs[num_microbatches] = self._lowered(num_microbatches)
        return self._short_programs[num_microbatches]


def require_rank(rank: int, sizes: ParallelSizes) -> None:
    """Raise TopologyError if there is no such rank."""
    if not 0 <= rank < sizes.world_size:
        raise TopologyError(
            f"rank {rank} does not exist: {sizes} has {sizes.world_size:,} ranks, counted from 0. Choose one below."
        )


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Open, for the block, a default process group in which only this rank exists.

    Raises:
        TopologyError: this process already belongs to a process group.
    """
    if dist.is_initialized():
        raise TopologyError(
            "this process belongs to a process group already; a footprint makes one of its own. Use a new process."
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def assumed_documents(config: Config) -> list[int] | None:
    """Return the document lengths in every sample.

    All documents are `data.synthetic_document_length` long, or an eighth of the sample if that is not given. The last may be
    shorter. None: attention crosses documents.
    """
    if config.data.attention == "across":
        return None
    s = config.model.seq_length
    length = config.data.synthetic_document_length or -(-s // 8)
    return [min(length, s - start) for start in range(0, s, length)]


def assumed_rows(config: Config) -> list[list[int]]:
    """Return the document lengths in each sample of a microbatch. If attention crosses documents, a sample is one document."""
    lengths = assumed_documents(config)
    return [[config.model.seq_length] if lengths is None else lengths] * config.train.micro_batch_size


def microbatches(engine: Engine) -> list[MicroBatch]:
    """Build a step's microbatches, all equal: every token is 0, and no label is masked.

    With `data.attention: within`, their documents are `assumed_documents`.
    """
    config, topology = engine.config, engine.topology
    b, device = engine.plan.micro_batch_size, topology.device
    rows = assumed_rows(config)
    part = ContextCut.of(config, topology.sizes, topology.coordinates.cp).part(rows)
    shape = (b, part_length(config))
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    counted = torch.ones(shape, dtype=torch.bool, device=device)
    documents = None if config.data.attention == "across" else Documents.of(rows).map(lambda tensor: tensor.to(device))
    part = None if part is None else part.map(lambda tensor: tensor.to(device))
    num_ahead = config.model.num_mtp_layers
    samples = torch.arange(b, device=device)
    one = MicroBatch(ids, ids, counted, ids, [*range(b)], ids.numel(), documents, part, samples=samples)
    if num_ahead:
        ahead, mask_ahead = (each.repeat(num_ahead, 1, 1) for each in (ids, counted))
        one = replace(one, ahead=ahead, mask_ahead=mask_ahead, num_ahead=(ids.numel(),) * num_ahead)
    return [one] * engine.plan.num_microbatches


def watch_step(engine: Engine, batches: Sequence[MicroBatch], watch: MemoryWatch) -> tuple[Footprint, Recorder]:
    """Run a whole training step under a watch. Return (footprint, recorder of each instruction's cost).

    Enter the watch before the engine is built. If the process group is real, the network decides when sends end. Instructions with
    the same work may then differ in memory.
    """
    for buffer in engine.buffers.buffers:
        for tensor in buffer.weights:
            watch.label(tensor, "parameters")
        for tensor in buffer.grads:
            watch.label(tensor, "gradients")
    for tensor in engine.optimizer.resident.tensors:
        watch.label(tensor, "optimizer")
    for tensor in engine.optimizer.resident.host_tensors:
        watch.leave_out(tensor)
    between_steps: tuple[MemoryKind, ...] = ("parameters", "gradients", "optimizer")
    state = {kind: watch.live[kind] for kind in between_steps}
    # A step like all but the first: receives are posted early.
    engine.train_programs.receive_early()
    topology, program = engine.topology, engine.train_programs.early
    at = topology.coordinates
    watch.forget_peak()
    recorder = Recorder(watch, topology.ledger, program, at.pp)
    watch.phase = "gradients"
    with looking_at(engine, watch):
        losses = engine.forward_backward(batches, observers=[recorder])
    recorder.begin_update()
    watch.phase = "optimizer"
    engine.update(losses, lr=1e-3)
    engine.buffers.wait_all()
    recorder.end()
    num_microbatches = engine.plan.num_microbatches
    found = _footprint(
        at,
        program.schedule.placement.stages_on(at.pp),
        num_microbatches,
        num_microbatches,
        state,
        watch.step,
        tuple(watch.saved),
        [event for event in topology.ledger.events if event.phase != "mark"],
    )
    return found, recorder


def looking_at(engine: Engine, watch: MemoryWatch) -> AbstractContextManager[None]:
    """Return a context in which the watch sees the tensors that the engine's chunks save.

    The watch also counts each operator under the chunk's child module that runs it. A backward operator counts under the child
    whose forward it belongs to.
    """
    modules, saving = [cast(nn.Module, chunk) for chunk in engine.chunks], {chunk.saved for chunk in engine.chunks}
    return watch.looking_at(modules, list(saving), HEAD_MODULES, PLACES)


def _footprint(
    at: Coordinates,
    stages: tuple[int, ...],
    num_microbatches: int,
    run_microbatches: int,
    state: dict[MemoryKind, int],
    extremes: Extremes,
    saved: tuple[SavedTensor, ...],
    log: Sequence[Event],
) -> Footprint:
    assert extremes.peak is not None and extremes.largest is not None
    ops: dict[str, Counter[str]] = {}
    for (place, name), count in extremes.ops.items():
        ops.setdefault(place, Counter())[name] = count
    return Footprint(
        coordinates=at,
        stages=stages,
        num_microbatches=num_microbatches,
        run_microbatches=run_microbatches,
        state=state,
        peak=Peak({kind: count for kind, count in extremes.peak.by_kind.items() if count}, extremes.peak.site),
        most={kind: most for kind, most in extremes.most.items() if most},
        largest=extremes.largest,
        saved=saved,
        log=tuple(log),
        ops=ops,
    )
