"""An order that is built in pieces has the bits of one that is built at once, and a kill at any piece costs that piece."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from triaxis.engine.data import order_pieces, shuffle
from triaxis.engine.data.epoch_index import EpochIndex, EpochKey, build_epoch, open_epoch
from triaxis.engine.data.index_cache import Progress
from triaxis.engine.data.shuffle import random_bits

LENGTHS = np.arange(1, 102, dtype=np.int64) % 7
NUM_SAMPLES = 45
KEY = EpochKey("corpus", 0, len(LENGTHS), 8, 3, 1)
NUM_PIECES = 7 + 7 + 7 + 3 + 3
"""Of 16 numbers: two passes over each order, one over the offsets."""


class Kill(BaseException):
    """As kill -9 between two pieces."""


class Follower(Progress):
    def __init__(self, until: int = 10**6) -> None:
        self.until, self.made = until, list[int]()

    def piece(self, path: Path, done: int, of: int) -> None:
        assert of == NUM_PIECES
        self.made.append(done)
        if done == self.until:
            raise Kill


@pytest.fixture
def open_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Progress], EpochIndex]:
    monkeypatch.setattr(order_pieces, "PIECE", 16)
    return lambda progress: open_epoch(tmp_path / "cache", KEY, LENGTHS, NUM_SAMPLES, progress)


def is_whole(index: EpochIndex) -> bool:
    whole = build_epoch(KEY, LENGTHS, NUM_SAMPLES)
    return all(np.array_equal(getattr(index, name), getattr(whole, name)) for name in EpochIndex.__slots__)


def test_numbers_go_on_where_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_bits(100, "documents", 3, 1)
    monkeypatch.setattr(shuffle, "DRAWN_AT_ONCE", 7)
    assert np.array_equal(random_bits(100, "documents", 3, 1), whole)
    assert np.array_equal(random_bits(36, "documents", 3, 1, skip=64), whole[64:])


def test_pieces_have_the_bits_of_the_whole(open_in_pieces: Callable[[Progress], EpochIndex], tmp_path: Path) -> None:
    follower = Follower()
    assert is_whole(open_in_pieces(follower))
    assert follower.made == list(range(1, NUM_PIECES + 1))
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".lock", KEY.file_name()]


def test_a_kill_at_any_piece_costs_that_piece(
    open_in_pieces: Callable[[Progress], EpochIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    sorted_blocks = 0
    bits = order_pieces.random_bits

    def counted(*arguments: int | str, skip: int) -> np.ndarray:
        nonlocal sorted_blocks
        sorted_blocks += 1
        return bits(*arguments, skip=skip)

    monkeypatch.setattr(order_pieces, "random_bits", counted)
    for until in range(1, NUM_PIECES + 1):
        with pytest.raises(Kill):
            open_in_pieces(Follower(until))
    assert sorted_blocks == 7 + 3, "each block was made once"
    assert is_whole(open_in_pieces(Follower()))
    assert sorted_blocks == 7 + 3


@pytest.mark.parametrize("change", ["journal", "size", "gone"])
def test_pieces_of_another_order_are_not_taken_over(
    change: str, open_in_pieces: Callable[[Progress], EpochIndex], tmp_path: Path
) -> None:
    with pytest.raises(Kill):
        open_in_pieces(Follower(20))
    path = tmp_path / "cache" / KEY.file_name()
    building = path.with_name(f"{path.name}.building")
    building.write_bytes(b"\1" * (building.stat().st_size - (change == "size")))
    if change == "gone":
        building.unlink()
    if change == "journal":
        done = order_pieces.done_path(path)
        done.write_text(done.read_text().replace('"name": "', '"name": "0'))
    assert is_whole(open_in_pieces(Follower()))
