"""Find races between streams, and memory that is freed too early, on the CPU.

On a GPU operators run on several streams. On the CPU each operator ends before the next begins, so nothing goes wrong there.
`RaceWatch` sees every operator while the engine's own code runs. Stand-ins for the other streams
(`triaxis.launch.footprint.races.streams`) post a GPU's overlapped work to `RaceWatch`. Any two uses of the same bytes must be
ordered by the clocks (`triaxis.launch.footprint.races.clocks`), or both operators are reported.

Freed memory goes back to the stream that allocated it, which may use it again at once (torch's caching allocator). So memory may be
freed only after that stream has waited for all other streams that use the memory. Host memory is exempt, since torch's allocator
waits for copies.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from triaxis.launch.footprint.races.clocks import Clocks, Operator, Region, Stream
from triaxis.launch.footprint.races.report import Origins, Race, RaceKind

_SHAPE_ONLY = ("new_", "empty_like", "zeros_like", "ones_like", "full_like")
"""Operators that use only a tensor's shape and dtype."""


@dataclass(slots=True)
class _Memory:
    """A live storage.

    Attributes:
        region: the storage's uses, byte by byte.
        watcher: weak reference that reports when the storage is freed.
        on_host: whether the storage is in host memory.
        shape: shape and dtype of the first tensor in the storage.
        name, parts: name for reports, and the storage's named byte ranges as (first byte, end byte, name).
        lent: `Stream.number` of each stream that the allocator waits for before it reuses the memory.
    """

    region: Region
    watcher: Any
    on_host: bool
    shape: str
    name: str = ""
    parts: Sequence[tuple[int, int, str]] = ()
    lent: set[int] = field(default_factory=set)


class RaceWatch(TorchDispatchMode):
    """A race detector that records each dispatched operator in the vector clocks of `Clocks`.

    Attributes:
        current: stream on which dispatched operators run.
        thread: host thread that runs now, as a stream.
        during: current pipeline instruction, for reports.
        sends_end: True: a send has ended when it is first queried. False: a send ends only when it is waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clocks = Clocks()
        self._streams: list[Stream] = []
        self.current = self.stream("the computation's stream")
        self.thread = self.clocks.host
        self.during = ""
        self.sends_end = False
        self.num_operators = 0
        self._memories: dict[int, _Memory] = {}
        self._making_for_host = False
        self._found: dict[tuple[object, ...], Race] = {}
        self._times: Counter[tuple[object, ...]] = Counter()
        self._origins = Origins()
        self._arguments: dict[Any, Sequence[tuple[str, bool]]] = {}

    def stream(self, name: str) -> Stream:
        self._streams.append(self.clocks.stream(name))
        return self._streams[-1]

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams on which operators were posted."""
        return tuple(stream.name for stream in self._streams if stream.number in stream.clock)

    @property
    def races(self) -> list[Race]:
        """The races found, one for each pair of program lines; `times` counts its repetitions."""
        return [replace(race, times=self._times[key]) for key, race in self._found.items()]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._memories.clear()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":  # queries, not work
            return result
        arguments = self._arguments.get(func)
        if arguments is None:
            arguments = self._arguments[func] = _arguments(func)
        read, written = _operands(arguments, args, kwargs)
        if func.namespace == "c10d":  # a thread makes these calls on its own memory
            written = read
        storages = {id(tensor.untyped_storage()) for tensor in (*read, *written)}
        made = [value for value in tree_iter(result) if isinstance(value, torch.Tensor)]
        new = [tensor for tensor in made if id(tensor.untyped_storage()) not in storages]
        name = func.name()
        if name.startswith(_SHAPE_ONLY, len("aten::")):
            read = []
        if name.startswith(("empty", "new_empty"), len("aten::")):
            for tensor in new:
                self._know(tensor)
        elif name == "aten::_local_scalar_dense":
            self.read_on_host(*read)
        elif written or new or not made:  # a view is no work
            self.post(self.current, name, read, (*written, *new))
        return result

    def post(
        self, stream: Stream, name: str, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]
    ) -> Operator:
        """Post an operator on a stream. Record a race with each unordered earlier use of the same bytes."""
        operator = self.clocks.post(stream, name, self._origins.of_caller(), self.during)
        self.num_operators += 1
        for tensor in read:
            self._use(operator, tensor, writes=False)
        for tensor in written:
            self._use(operator, tensor, writes=True)
        return operator

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Post the block's operators on another stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def as_thread(self, thread: Stream) -> Iterator[None]:
        """Run the block as the host thread `thread`; operators and waits use that thread's clock."""
        before, self.thread = self.thread, thread
        try:
            with self.on(thread):
                yield
        finally:
            self.thread = before

    def lend(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Make the allocator wait for the stream before it reuses the tensor's memory.

        The stream must finish everything that was posted before the tensor was freed, as with `Tensor.record_stream`.
        """
        self._know(tensor).lent.add(stream.number)

    def is_host_memory(self, tensor: torch.Tensor) -> None:
        """Treat the tensor's storage as host memory that only the present thread has used so far."""
        memory = self._know(tensor)
        memory.on_host, memory.region = True, Region(memory.region.num_bytes, self.thread)

    @contextmanager
    def host_memory(self) -> Iterator[None]:
        """Treat storages created in the block as host memory. The block's operators run on the present thread."""
        before, self._making_for_host = self._making_for_host, True
        try:
            with self.on(self.thread):
                yield
        finally:
            self._making_for_host = before

    def read_on_host(self, tensor: torch.Tensor) -> None:
        """Record that the host reads values.

        For device memory, the current stream copies the values and the host waits for the copy.
        """
        if self._know(tensor).on_host:
            self.post(self.thread, "a read", [tensor], ())
        else:
            self.post(self.current, "a copy to the host", [tensor], ())
            self.clocks.wait(self.thread, self.clocks.record(self.current))

    def call(self, tensor: torch.Tensor, name: str, parts: Sequence[tuple[int, int, str]] = ()) -> None:
        """Name a tensor's storage for reports. `parts` names element ranges in the storage, as (start, stop, name)."""
        memory = self._know(tensor)
        size = tensor.element_size()
        memory.name, memory.parts = name, [(start * size, stop * size, part) for start, stop, part in parts]

    def _know(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._memories.get(key)
        if known is None:
            region = Region(storage.nbytes(), self.current)
            watcher = ref(storage, lambda _: self._freed(key))
            known = _Memory(region, watcher, self._making_for_host, _shape(tensor))
            self._memories[key] = known
        return known

    def _use(self, operator: Operator, tensor: torch.Tensor, *, writes: bool) -> None:
        if not tensor.numel():
            return
        memory = self._know(tensor)
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        extent = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        stop = start + int(extent) * size
        for other, other_writes, first, last in memory.region.use(operator, start, stop, writes=writes):
            kind: RaceKind = "unordered read"
            if writes:
                kind = "unordered writes" if other_writes else "unordered overwrite"
            self._report(kind, other, operator, f"{_shape(tensor)}{_named(memory, first, last)}")

    def _freed(self, key: int) -> None:
        memory = self._memories.pop(key)
        owner = memory.region.owner
        if memory.on_host:
            return
        for operator in memory.region.in_use(self.clocks.record(owner)):
            if operator.stream.number in memory.lent:
                continue
            tick = owner.clock.get(owner.number, 0)
            free = Operator("free", self._origins.of_caller(), self.during, owner, tick)
            size = memory.region.num_bytes
            self._report("early free", operator, free, f"{memory.shape}{_named(memory, 0, size)}")

    def _report(self, kind: RaceKind, first: Operator, second: Operator, tensor: str) -> None:
        key = (kind, *((each.name, each.place, each.stream.number) for each in (first, second)))
        self._times[key] += 1
        self._found.setdefault(key, Race(kind, first, second, tensor))


def _arguments(func: Any) -> list[tuple[str, bool]]:
    """List (name, whether the operator writes to it) for each of an operator's arguments."""
    return [
        (argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for argument in func._schema.arguments
    ]


def _operands(
    arguments: Sequence[tuple[str, bool]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operator reads and those that it writes in place."""
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    for place, (name, writes) in enumerate(arguments):
        value = args[place] if place < len(args) else kwargs.get(name)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                (written if writes else read).append(each)
    return read, written


def _shape(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _named(memory: _Memory, start: int, stop: int) -> str:
    """Format the name of a storage and of its parts in [start, stop). The result begins with a space."""
    if not memory.name:
        return ""
    inside = [name for first, last, name in memory.parts if first < stop and start < last]
    more = f" and {len(inside) - 2} more" if len(inside) > 2 else ""
    parts = f": {', '.join(inside[:2])}{more}" if inside else ""
    return f" (bytes {start:,} to {stop:,} of {memory.name}{parts})"
