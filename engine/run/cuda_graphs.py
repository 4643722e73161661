"""Records a microbatch's work as CUDA graphs, and replays them in later steps: a replay is one call of the host.

The first run calls each operator, so that everything is compiled and loaded. From the second run on, the first microbatch of each
kind records its forward, backward and weight gradients; every later one of that kind replays them. Microbatches are of one kind if
they ask for the same operators on the same memory:

    chunk   which of the rank's chunks computes
    slot    memory that no other microbatch uses between this one's forward and its last weight gradient
    ends    whether it is the chunk's first or last in a step: the first one's gradients overwrite the main grads, and the last
            one's are reduced

Each slot has a memory pool of its own, in which activations have fixed addresses; all backwards that defer nothing share another.
Inputs are copied to a fixed place before a replay, and outputs are copied from theirs after it. Messages between stages, gathers of
weights and the update stay outside. If a step's microbatches have more boundaries of documents, all graphs are recorded again.

A graph has only the device's part. What the engine notes on the host, counts of gradients and the ledger's events, is noted again
at each replay. Observers of collectives do not see those inside a graph.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from triaxis.engine.comm.ledger import Event, Ledger
from triaxis.engine.errors import ConfigError
from triaxis.engine.linear.weight_grads import WeightGradQueue
from triaxis.engine.optimizer.bucket import Bucket
from triaxis.engine.optimizer.grad_buffer import GradBuffers
from triaxis.engine.pipeline.actions import Action, Kind
from triaxis.engine.pipeline.lowering import Instruction
from triaxis.engine.pipeline.work import ChunkFunction, EagerWork, Work, WorkOf, eager_works
from triaxis.engine.tensor_parallel.parameter import ShardedParameter


class Ends(NamedTuple):
    """Whether a microbatch is the first or the last of its chunk in a step, by the action that adds gradients (B or I; W)."""

    first: bool = False
    first_deferred: bool = False
    last: bool = False
    last_deferred: bool = False


class Place(NamedTuple):
    """What microbatches of one kind have in common (see the module); `defers`: they have a W."""

    chunk: int
    slot: int
    defers: bool
    ends: Ends


def places(instructions: Sequence[Instruction]) -> dict[tuple[int, int], Place]:
    """Return the place of each (chunk, microbatch) in one rank's run, with as few slots as are live at once."""
    actions = [each for each in instructions if isinstance(each, Action)]
    last_action = {(action.chunk, action.microbatch): number for number, action in enumerate(actions)}
    # For each chunk, the microbatches whose gradients are added by a B or I, in order; then those with a W.
    added: dict[tuple[int, bool], list[int]] = {}
    for action in actions:
        if action.kind is not Kind.F:
            added.setdefault((action.chunk, action.kind is Kind.W), []).append(action.microbatch)
    found: dict[tuple[int, int], Place] = {}
    free: list[int] = []
    num_slots = 0
    for number, action in enumerate(actions):
        chunk, microbatch = key = action.chunk, action.microbatch
        if action.kind is Kind.F:
            at_once, deferred = (added.get((chunk, is_w), [-1]) for is_w in (False, True))
            ends = Ends(*(microbatch == each for each in (at_once[0], deferred[0], at_once[-1], deferred[-1])))
            if not free:
                free.append(num_slots)
                num_slots += 1
            found[key] = Place(chunk, free.pop(0), microbatch in deferred, ends)
        if last_action[key] == number:
            free = sorted([*free, found[key].slot])
    return found


class _Slot:
    """One slot's memory pool, and the fixed places of inputs, which its microbatches use in turn."""

    def __init__(self) -> None:
        self._fixed: dict[object, Any] = {}
        self.empty()

    def empty(self) -> None:
        """Take another pool. The graphs of the old one are gone."""
        self.pool = torch.cuda.graph_pool_handle()

    def put(self, name: str, value: Any) -> Any:
        """Copy a tensor or a microbatch to its fixed place, and return it there."""
        key = name, *(tensor.shape for tensor in _tensors(value))
        if key not in self._fixed:
            self._fixed[key] = _cloned(value)
        fixed = self._fixed[key]
        for to, given in zip(_tensors(fixed), _tensors(value), strict=True):
            to.copy_(given)
        return fixed


class _Added(NamedTuple):
    """The gradients that one recorded part adds to a bucket, and whether the bucket's round begins and ends with them."""

    bucket: Bucket
    counts: Mapping[ShardedParameter, int]
    begins: bool
    ends: bool

    def repeat(self) -> None:
        """Count the gradients again. If they complete the bucket, the graph has reduced it."""
        bucket = self.bucket
        is_here = self.begins == (bucket.num_missing == 0)
        bucket.overwrites(next(iter(self.counts)))
        for parameter, number in self.counts.items():
            bucket.missing[parameter] -= number
        bucket.num_missing -= sum(self.counts.values())
        assert is_here and self.ends == (bucket.num_missing == 0), "a graph was recorded for another place in the step"


class Events:
    """The ledger's events of one recorded part, to be written again.

    Args:
        ledger: the ledger, before the part is recorded.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._first, self._start = ledger.num_calls, len(ledger.events)
        self._events: list[Event] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep the events that are written in this `with` block. The ledger's observers do not hear of them."""
        with self._ledger.unheard():
            yield
        self._events = self._ledger.events[self._start :]

    def repeat(self) -> None:
        """Write the events again; their calls get the next numbers."""
        ledger, shift = self._ledger, self._ledger.num_calls - self._first
        for event in self._events:
            is_call = event.phase != "mark"
            moved = event._replace(call=event.call + shift, group_call=event.group_call + shift) if is_call else event
            ledger.events.append(moved)
            ledger.num_calls += event.phase == "post"


class _Counts(NamedTuple):
    """How many rounds and gradients a bucket waits for, and of each parameter; before a round begins, of all in it."""

    rounds_left: int
    num_missing: int
    missing: Mapping[ShardedParameter, int]

    @classmethod
    def of(cls, bucket: Bucket) -> "_Counts":
        missing = bucket.missing if bucket.num_missing else bucket.expected
        return cls(bucket.rounds_left, bucket.num_missing, dict(missing))


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One recorded part of a microbatch's work: its graph, its result at a fixed address, and what it notes on the host."""

    graph: torch.cuda.CUDAGraph
    result: torch.Tensor | None
    added: Sequence[_Added]
    events: Events

    def replay(self) -> None:
        self.graph.replay()
        for each in self.added:
            each.repeat()
        self.events.repeat()


class CudaGraphs:
    """The graphs of one rank's chunks, recorded when they are first needed (a `WorksOf`).

    Runs with a function that watches each gradient call each operator. So does a chunk's first microbatch if weights are gathered:
    the gathers run under its forward.

    Args:
        buffers: the engine's buffers, whose counts of gradients a replay continues.
        ledger: the ledger of this rank's collectives.

    Attributes:
        temporary: memory pool for what no later part of a microbatch needs, which all slots share.
    """

    def __init__(self, buffers: GradBuffers, ledger: Ledger) -> None:
        self._buffers = buffers
        self._ledger = ledger
        self._gathers = any(bucket.owners.size > 1 for bucket in buffers.buckets)
        self._stream = torch.cuda.Stream(buffers.device)
        self._slots: list[_Slot] = []
        self._works: dict[Place, _GraphedWork] = {}
        self.temporary: Any = None
        self._num_runs = 0
        self._shapes: Sequence[torch.Size] = ()

    def __call__(
        self, instructions: Sequence[Instruction], function: ChunkFunction, queues: Sequence[WeightGradQueue]
    ) -> WorkOf:
        self._num_runs += 1
        eager = eager_works(instructions, function, queues)
        if self._num_runs == 1 or self._buffers.is_watched:
            return eager
        found = places(instructions)
        if not self._slots:
            self._slots = [_Slot() for _ in range(1 + max(place.slot for place in found.values()))]

        def work_of(chunk: int, microbatch: int) -> Work:
            place = found[chunk, microbatch]
            if self._gathers and place.ends.first:
                return eager(chunk, microbatch)
            if place not in self._works:
                work = EagerWork(partial(function, chunk), queues[chunk])
                self._works[place] = _GraphedWork(self, work, place, self._slots[place.slot])
            return self._works[place]

        return work_of

    def fitted(self, microbatch: Any) -> Any:
        """Return what graphs read of a microbatch. Forget all graphs if it has tensors of other shapes than they read."""
        if microbatch.documents is not None:
            microbatch = replace(microbatch, documents=microbatch.documents.unread())
        shapes = [tensor.shape for tensor in _tensors(microbatch)]
        if shapes != self._shapes:
            self._shapes = shapes
            for work in self._works.values():
                work.forget()
            # The pools cannot use memory that runs without graphs, or other pools, have left in torch's cache.
            for slot in self._slots:
                slot.empty()
            torch.cuda.empty_cache()
            # In the only slot, a backward takes the memory of activations that it has freed.
            self.temporary = self._slots[0].pool if len(self._slots) == 1 else torch.cuda.graph_pool_handle()
        return microbatch

    def release(self) -> None:
        """Free the graphs. NCCL's groups must not be destroyed before graphs that call them."""
        self._works.clear()
        self._slots.clear()

    def gather_weights(self) -> None:
        """Wait for the weights' gathers: a graph cannot wait for a call that was posted outside of it."""
        for bucket in self._buffers.buckets:
            if not bucket.is_complete:
                bucket.complete()

    def begin(self, place: Place) -> None:
        """Prepare the record of a microbatch's forward."""
        for bucket in self._buffers.buckets:
            # A leaf that is in a graph of a microbatch without CUDA graphs has a node of that one's stream.
            for parameter in bucket.expected:
                parameter.renew()
            # Layers make anew what they keep of the weights: the first microbatch's graph does it in every step.
            bucket.version += place.ends.first

    def record(self, part: Callable[[], torch.Tensor | None], place: Place, pool: Any, name: str) -> _Recorded:
        """Record one part of a microbatch's work without running it.

        Raises:
            ConfigError: the part does what CUDA refuses in a graph.
        """
        graph, before, events = torch.cuda.CUDAGraph(), self._counts(), Events(self._ledger)
        reducing = {id(bucket) for bucket in self._buffers.buckets if bucket.reducing is not None}
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), events.recorded():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = part()
                # Reductions that this part posted end in the graph, too: nothing outside can wait for them.
                for bucket in self._buffers.buckets:
                    if bucket.reducing is not None and id(bucket) not in reducing:
                        bucket.keep_sum()
            except RuntimeError as error:
                with suppress(RuntimeError):
                    graph.capture_end()
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                problem = (
                    f"kernels.graphs: on, but a CUDA graph cannot record the {name} of chunk {place.chunk}: {error}. In a graph, "
                    f"the host reads no device value and no copy comes from pageable memory. Set kernels.graphs: off."
                )
                raise ConfigError([problem]) from error
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return _Recorded(graph, result, list(self._added(before)), events)

    def _counts(self) -> list[_Counts]:
        return [_Counts.of(bucket) for bucket in self._buffers.buckets]

    def _added(self, before: Sequence[_Counts]) -> Iterator[_Added]:
        for bucket, counts in zip(self._buffers.buckets, before, strict=True):
            now = _Counts.of(bucket)
            if now[:2] != counts[:2]:
                added = {one: number - bucket.missing[one] for one, number in counts.missing.items()}
                added = {one: number for one, number in added.items() if number}
                yield _Added(bucket, added, counts.num_missing == 0, now.num_missing == 0)


@dataclass(eq=False, slots=True)
class _GraphedWork:
    """The works of microbatches of one kind (`Work`)."""

    graphs: CudaGraphs
    work: EagerWork
    place: Place
    slot: _Slot
    _parts: dict[str, _Recorded] = field(default_factory=dict, init=False)

    def forward(self, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor:
        batch = self.slot.put("microbatch", self.graphs.fitted(microbatch))
        given = None if x is None else self.slot.put("x", x)
        self.graphs.gather_weights()
        if not self._parts:
            self.graphs.begin(self.place)
        # Another leaf each time: a leaf's gradient belongs to one backward.
        forward = partial(self.work.forward, None if given is None else given.detach(), batch)
        return self._run("forward", forward, self.slot.pool)

    def backward(self, grad: torch.Tensor, *, defers: bool) -> torch.Tensor | None:
        fixed = self.slot.put("grad", grad)
        # What it defers lives until `weight_grads`.
        pool = self.slot.pool if defers else self.graphs.temporary
        return self._run("backward", partial(self.work.backward, fixed, defers=defers), pool)

    def weight_grads(self) -> None:
        self._run("weight gradients", self.work.weight_grads, self.graphs.temporary)

    def forget(self) -> None:
        """Record the work again."""
        self._parts.clear()

    def _run(self, name: str, part: Callable[[], torch.Tensor | None], pool: Any) -> Any:
        """Replay a part, or record it the first time; return a copy of its result, which the next replay overwrites."""
        recorded = self._parts.get(name)
        if recorded is None:
            recorded = self._parts[name] = self.graphs.record(part, self.place, pool, name)
            recorded.graph.replay()
        else:
            recorded.replay()
        return None if recorded.result is None else recorded.result.clone()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or those in a microbatch in the order of its fields."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        for one in fields(value):
            yield from _tensors(getattr(value, one.name))


def _cloned(value: Any) -> Any:
    """Copy a tensor, or a microbatch with its tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _cloned(getattr(value, one.name)) for one in fields(value)})
    return value
