"""Memory as text: the letters of a bar are the shares of its kinds, with and without colours."""

from io import StringIO

import pytest
from rich.console import Console

from triaxis.launch.planning.memory_text import COLUMNS, MOST_RANKS, memory_bar, memory_lines
from triaxis.models.predict.rank_memory import Memory, Prediction

HELD = Memory(
    parameters=10 * 10**9,
    gradients=20 * 10**9,
    optimizer=5 * 10**9,
    activations=12 * 10**9,
    messages=0,
    communicators=1 * 10**9,
    host=9 * 10**9,
)


def test_a_letter_is_an_equal_share_of_the_usable_memory() -> None:
    """48 GB of 96 in 48 columns: a letter is 2 GB, the host's memory has none, and half of the bar is free."""
    bar = memory_bar(HELD, 96 * 10**9).plain
    assert bar == "|" + "p" * 5 + "g" * 10 + "o" * 3 + "a" * 6 + "." * 24 + "|"
    assert len(bar) == COLUMNS + 2


@pytest.mark.parametrize("usable", [47_999_999_999, 50 * 10**9, 80 * 10**9, 999 * 10**9])
def test_each_bar_is_as_wide(usable: int) -> None:
    bar = memory_bar(HELD, usable, columns=24).plain
    assert len(bar) == 26


def test_ranks_and_the_meaning_of_letters() -> None:
    lines = [line.plain for line in memory_lines(Prediction((HELD,) * 3), 96 * 10**9)]
    assert [line.split()[:2] for line in lines[:3]] == [["pp", "0"], ["pp", "1"], ["pp", "2"]]
    assert lines[0].endswith("48.0 GB")
    meaning = "p parameters  g gradients  o optimizer  a activations  c communicators  . free, of 96.0 GB"
    assert lines[3].strip() == meaning
    many = memory_lines(Prediction((HELD,) * (MOST_RANKS + 5)), 96 * 10**9)
    assert len(many) == MOST_RANKS + 2 and many[MOST_RANKS // 2].plain == "  ... 5 more ..."
    assert many[-2].plain.split()[1] == str(MOST_RANKS + 4)


def test_kinds_have_colours_in_a_terminal_and_none_in_a_pipe() -> None:
    for is_terminal in (True, False):
        console = Console(
            file=StringIO(), force_terminal=is_terminal, color_system="truecolor" if is_terminal else None
        )
        console.print(memory_bar(HELD, 96 * 10**9))
        written = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("\x1b[38;2;255;255;255;48;2;47;111;176mppppp" in written) is is_terminal
        assert ("\x1b" in written) is is_terminal
