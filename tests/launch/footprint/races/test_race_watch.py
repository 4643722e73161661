"""Which uses of memory the watch sees, on streams that the test itself makes."""

from collections.abc import Iterator

import pytest
import torch

from triaxis.launch.footprint.races.clocks import Stream
from triaxis.launch.footprint.races.report import Race
from triaxis.launch.footprint.races.streams import HostReads
from triaxis.launch.footprint.races.watch import RaceWatch


@pytest.fixture
def watch() -> Iterator[RaceWatch]:
    with RaceWatch() as entered:
        yield entered


@pytest.fixture
def side(watch: RaceWatch) -> Stream:
    return watch.stream("the side stream")


def joined(watch: RaceWatch, first: Stream, then: Stream) -> None:
    watch.clocks.wait(then, watch.clocks.record(first))


def only(watch: RaceWatch) -> Race:
    (race,) = watch.races
    return race


def test_both_operators_are_named_with_stream_and_line(watch: RaceWatch, side: Stream) -> None:
    x = torch.zeros(2, 3)
    joined(watch, watch.current, side)
    watch.during = "0F1"
    with watch.on(side):
        x.mul_(2)
    y = x + 1
    race = only(watch)
    assert (race.kind, race.first.name, race.second.name) == ("unordered read", "aten::mul_.Tensor", "aten::add.Tensor")
    assert (race.first.stream.name, race.second.stream.name) == ("the side stream", "the computation's stream")
    here = "tests/launch/footprint/races/test_race_watch.py"
    assert race.first.place.startswith(here) and race.second.place.startswith(here)
    assert race.first.place != race.second.place and race.second.during == "0F1"
    assert race.tensor == "[2, 3] float32"
    assert y is not None and "Nothing orders the second after the first" in str(race)


def test_a_pair_of_lines_is_reported_once_and_counted(watch: RaceWatch, side: Stream) -> None:
    tensors = [torch.zeros(3) for _ in range(4)]
    joined(watch, watch.current, side)
    for x in tensors:
        with watch.on(side):
            x.mul_(2)
        x.add_(1)
    assert (only(watch).kind, only(watch).times) == ("unordered writes", 4)


def test_an_order_is_no_race(watch: RaceWatch, side: Stream) -> None:
    x = torch.zeros(3)
    joined(watch, watch.current, side)
    with watch.on(side):
        x.mul_(2)
    joined(watch, side, watch.current)
    x.add_(1)
    assert not watch.races


def test_shapes_and_views_use_no_memory(watch: RaceWatch, side: Stream) -> None:
    x = torch.zeros(4, 3)
    joined(watch, watch.current, side)
    with watch.on(side):
        x.mul_(2)
    made = [torch.zeros_like(x), x.new_zeros(2), torch.empty_like(x), x.new_empty(3), x.view(3, 4).t()[1:], x.detach()]
    assert len(made) == 6 and not watch.races
    assert x.t().contiguous() is not None and only(watch).second.name == "aten::clone"


def test_neighbours_in_a_buffer_are_no_race_and_parts_have_names(watch: RaceWatch, side: Stream) -> None:
    flat = torch.zeros(10, dtype=torch.float64)
    watch.call(flat, "the flat buffer", [(0, 4, "left"), (4, 10, "right")])
    joined(watch, watch.current, side)
    with watch.on(side):
        flat[:4].mul_(2)
    flat[4:].add_(1)
    assert not watch.races
    flat[3:5].add_(1)
    assert only(watch).tensor == "[2] float64 (bytes 24 to 32 of the flat buffer: left)"


def test_memory_is_freed_too_early(watch: RaceWatch, side: Stream) -> None:
    kept, dropped = torch.zeros(3), torch.zeros(3)
    joined(watch, watch.current, side)
    with watch.on(side):
        outs = [kept + 1, dropped + 1]
    del dropped
    race = only(watch)
    assert (race.kind, race.first.stream.name, race.second.name) == ("early free", "the side stream", "free")
    assert race.second.stream.name == "the computation's stream"
    # What the side stream made is its own, and may go at once; the other waits.
    outs.clear()
    joined(watch, side, watch.current)
    del kept
    assert watch.races == [race]


def test_host_memory_may_be_freed_but_not_read_too_early(watch: RaceWatch, side: Stream) -> None:
    with watch.host_memory():
        buffer = torch.empty(3)
    x = torch.ones(3)
    buffer.copy_(x)
    with HostReads(watch):
        buffer.tolist()
    assert (only(watch).first.name, only(watch).second.stream.name) == ("aten::copy_", "the host")
    joined(watch, watch.current, side)
    with watch.on(side):
        x.copy_(buffer)
    del buffer
    assert len(watch.races) == 1


def test_to_ask_for_a_number_makes_the_host_wait(watch: RaceWatch, side: Stream) -> None:
    x = torch.ones(3)
    with watch.on(side):
        x.mul_(2)
        float(x[0])
    x.add_(1)
    # Only the first write was too early: the side stream did not wait for what made x.
    assert only(watch).first.name == "aten::ones" and only(watch).second.name == "aten::mul_.Tensor"


def test_memory_that_is_lent_may_be_freed(watch: RaceWatch, side: Stream) -> None:
    x = torch.zeros(3)
    joined(watch, watch.current, side)
    with watch.on(side):
        y = x + 1
    watch.lend(x, side)
    del x
    assert y is not None and not watch.races


def test_a_thread_that_waits_does_not_hold_up_the_host(watch: RaceWatch, side: Stream) -> None:
    x = torch.zeros(3)
    joined(watch, watch.current, side)
    with watch.on(side):
        x.mul_(2)
    with watch.as_thread(watch.stream("the thread")):
        watch.clocks.wait(watch.thread, watch.clocks.record(side))
        x.sum()
    assert not watch.races
    x.add_(1)
    assert {race.first.stream.name for race in watch.races} == {"the side stream", "the thread"}
