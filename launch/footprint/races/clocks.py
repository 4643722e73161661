"""Order operators by their streams' vector clocks, and keep each byte's last uses.

Two operators are ordered if they are on one stream. They are also ordered if a chain of events and waits leads from one to the
other. Unordered operators may run at the same time.

    clock[s] = n     the first n operators on stream s are over before the next operator on the clock's own stream
    event            a copy of a stream's clock, made when the event is recorded
    wait             sets each clock[s] of the waiting stream to the event's value, if that is larger

The host has a clock as well. The clocks are those in Mattern, "Virtual Time and Global States of Distributed Systems" (1989). For
each byte only the last write and later reads are kept, as in FastTrack (Flanagan and Freund, PLDI 2009, section 3).
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

VectorClock = dict[int, int]
"""Number of operators that are over, by stream number; a missing stream counts as 0."""


@dataclass(eq=False, slots=True)
class Stream:
    """A queue of operators that run one after another.

    Attributes:
        number: key in a vector clock.
        clock: operators that are over before this stream's next operator begins.
    """

    name: str
    number: int
    clock: VectorClock = field(default_factory=dict)


class Operator(NamedTuple):
    """One operator on a stream.

    Attributes:
        name: operator name such as `aten::mm`, or a collective with its axis and purpose.
        place: program line that posted the operator.
        during: pipeline instruction that was running, such as `0F1`; "" outside the pipeline.
        stream: stream that the operator runs on.
        tick: the operator's number on the stream, counted from 1.
    """

    name: str
    place: str
    during: str
    stream: Stream
    tick: int

    def __str__(self) -> str:
        during = f" during {self.during}" if self.during else ""
        return f"{self.name} on {self.stream.name}, posted at {self.place}{during}"


class Clocks:
    """The vector clocks of one rank's streams and host. A clock counts finished operators on each stream.

    Attributes:
        host: stream that stands for the host. An operator on this stream runs as soon as it is posted.
    """

    def __init__(self) -> None:
        self._num_streams = 0
        self.host = self.stream("the host")

    def stream(self, name: str) -> Stream:
        """Create a stream on which nothing has run."""
        self._num_streams += 1
        return Stream(name, self._num_streams - 1)

    def post(self, stream: Stream, name: str, place: str, during: str = "") -> Operator:
        """Post an operator on the stream. The operator begins after everything that the host has waited for."""
        self.wait(stream, self.host.clock)
        tick = stream.clock.get(stream.number, 0) + 1
        stream.clock[stream.number] = tick
        return Operator(name, place, during, stream, tick)

    def record(self, stream: Stream) -> VectorClock:
        """Return a copy of the stream's clock, after adding everything that the host has waited for."""
        self.wait(stream, self.host.clock)
        return dict(stream.clock)

    def wait(self, stream: Stream, event: VectorClock) -> None:
        """Make the stream's later operators begin after the event."""
        clock = stream.clock
        for number, tick in event.items():
            if clock.get(number, 0) < tick:
                clock[number] = tick


def is_over(operator: Operator, clock: VectorClock) -> bool:
    """Whether `clock`, a count of finished operators on each stream, includes this operator."""
    return operator.tick <= clock.get(operator.stream.number, 0)


class UnorderedUse(NamedTuple):
    """Two unordered operators that use the same bytes, at least one of them writing.

    The bytes are [start, stop) in a region.

    Attributes:
        first: operator that was posted first. The second is the operator passed to `Region.use`.
        first_writes: whether the first operator writes.
    """

    first: Operator
    first_writes: bool
    start: int
    stop: int


@dataclass(slots=True)
class _Cell:
    """The last operators that used some bytes.

    Attributes:
        write: the last write.
        reads: reads since the last write, one per stream.
    """

    write: Operator | None = None
    reads: dict[int, Operator] = field(default_factory=dict)


class Region:
    """The memory of one storage, cut into cells where the tensors in it begin and end.

    Args:
        num_bytes: size of the storage.
        owner: stream on which it was allocated.
    """

    def __init__(self, num_bytes: int, owner: Stream) -> None:
        self.num_bytes = num_bytes
        self.owner = owner
        self._starts = [0]
        self._cells = [_Cell()]

    def use(self, operator: Operator, start: int, stop: int, *, writes: bool) -> list[UnorderedUse]:
        """Record that an operator uses the bytes [start, stop), and return unordered earlier uses.

        A read is compared with the last write. A write is compared with the last write and the reads since.
        """
        first, last = self._cut(start), self._cut(stop)
        clock = operator.stream.clock
        conflicts = []
        for index in range(first, last):
            cell = self._cells[index]
            earlier = [] if cell.write is None else [cell.write]
            if writes:
                earlier += cell.reads.values()
            for other in earlier:
                if not is_over(other, clock):
                    end = self._starts[index + 1] if index + 1 < len(self._starts) else self.num_bytes
                    conflicts.append(UnorderedUse(other, other is cell.write, self._starts[index], end))
            if not writes:
                cell.reads[operator.stream.number] = operator
        if writes:
            self._starts[first:last] = [start]
            self._cells[first:last] = [_Cell(operator)]
        return conflicts

    def in_use(self, clock: VectorClock) -> list[Operator]:
        """List the operators on this memory that `clock` does not count as finished. They may still run."""
        found = {}
        for cell in self._cells:
            for operator in (*cell.reads.values(), *(() if cell.write is None else (cell.write,))):
                if not is_over(operator, clock):
                    found[operator.stream.number, operator.tick] = operator
        return list(found.values())

    def _cut(self, at: int) -> int:
        """Return the index of the cell (bytes with equal uses) that begins at byte `at`.

        If none begins there, split the cell that contains `at`.
        """
        index = bisect_left(self._starts, at)
        if at >= self.num_bytes or (index < len(self._starts) and self._starts[index] == at):
            return index
        before = self._cells[index - 1]
        self._starts.insert(index, at)
        self._cells.insert(index, _Cell(before.write, dict(before.reads)))
        return index
