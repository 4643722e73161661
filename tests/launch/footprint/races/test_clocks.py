"""Vector clocks against reachability in a graph, and regions against a history of every byte."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from triaxis.launch.footprint.races.clocks import Clocks, Operator, Region, Stream, VectorClock, is_over

NUM_STREAMS = 3
NUM_BYTES = 8

stream_numbers = st.integers(0, NUM_STREAMS)
"""The last is the host."""
spans = st.tuples(st.integers(0, NUM_BYTES - 1), st.integers(1, NUM_BYTES)).filter(lambda span: span[0] < span[1])
posts = st.tuples(st.just("post"), stream_numbers, spans, st.booleans())
records = st.tuples(st.just("record"), stream_numbers)
waits = st.tuples(st.just("wait"), stream_numbers, st.integers(0, 20))
programs = st.lists(st.one_of(posts, records, waits), max_size=40)


@dataclass
class Oracle:
    """What every stream and the host come after, as sets of operators; an operator comes after all that its stream does."""

    after: dict[int, set[int]] = field(default_factory=lambda: {number: set() for number in range(NUM_STREAMS + 1)})
    before: list[set[int]] = field(default_factory=list)
    events: list[set[int]] = field(default_factory=list)

    def post(self, stream: int) -> int:
        number = len(self.before)
        self.after[stream] |= self.after[NUM_STREAMS]
        self.before.append(set(self.after[stream]))
        self.after[stream].add(number)
        return number

    def record(self, stream: int) -> None:
        self.after[stream] |= self.after[NUM_STREAMS]
        self.events.append(set(self.after[stream]))

    def wait(self, stream: int, event: int) -> None:
        self.after[stream] |= self.events[event]


@given(programs)
def test_an_operator_is_over_where_a_chain_of_waits_leads_to_it(program: list[tuple]) -> None:  # type: ignore[type-arg]
    clocks, oracle = Clocks(), Oracle()
    streams: list[Stream] = [*(clocks.stream(str(number)) for number in range(NUM_STREAMS)), clocks.host]
    events: list[VectorClock] = []
    operators: list[Operator] = []
    region = Region(NUM_BYTES, streams[0])
    history: list[tuple[int, tuple[int, int], bool]] = []
    found = expected = False
    for kind, stream, *rest in program:
        if kind == "record":
            events.append(clocks.record(streams[stream]))
            oracle.record(stream)
        elif kind == "wait":
            if rest[0] < len(events):
                clocks.wait(streams[stream], events[rest[0]])
                oracle.wait(stream, rest[0])
        else:
            span, writes = rest
            operators.append(clocks.post(streams[stream], "op", "here"))
            number = oracle.post(stream)
            for earlier in range(number):
                assert is_over(operators[earlier], streams[stream].clock) == (earlier in oracle.before[number])
            races = [
                earlier
                for earlier, other, other_writes in history
                if (writes or other_writes)
                and other[0] < span[1]
                and span[0] < other[1]
                and earlier not in oracle.before[number]
            ]
            conflicts = region.use(operators[-1], *span, writes=writes)
            for conflict in conflicts:
                assert operators.index(conflict.first) in races
                assert span[0] <= conflict.start < conflict.stop <= span[1]
            # What a write without an order has replaced may be forgotten; the race of that write was found.
            found, expected = found or bool(conflicts), expected or bool(races)
            history.append((number, span, writes))
            assert found == expected


def test_neighbours_are_no_conflict() -> None:
    clocks = Clocks()
    one, two = clocks.stream("one"), clocks.stream("two")
    region = Region(100, one)
    assert not region.use(clocks.post(one, "left", ""), 0, 50, writes=True)
    assert not region.use(clocks.post(two, "right", ""), 50, 100, writes=True)
    (conflict,) = region.use(clocks.post(two, "over", ""), 49, 51, writes=False)
    assert (conflict.first.name, conflict.start, conflict.stop) == ("left", 49, 50)


def test_memory_is_in_use_until_its_owner_has_waited() -> None:
    clocks = Clocks()
    owner, other = clocks.stream("owner"), clocks.stream("other")
    region = Region(10, owner)
    reading = clocks.post(other, "read", "")
    region.use(reading, 0, 10, writes=False)
    assert region.in_use(clocks.record(owner)) == [reading]
    clocks.wait(owner, clocks.record(other))
    assert region.in_use(clocks.record(owner)) == []


def test_what_the_host_has_waited_for_is_before_all_that_it_posts() -> None:
    clocks = Clocks()
    one, two = clocks.stream("one"), clocks.stream("two")
    first = clocks.post(one, "first", "")
    assert not is_over(first, clocks.record(two))
    clocks.wait(clocks.host, clocks.record(one))
    assert is_over(first, clocks.record(two))
