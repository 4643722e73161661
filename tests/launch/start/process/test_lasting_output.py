"""Standard streams of a launcher whose terminal is paused."""

import os
import pty
import select
import sys
import termios

import pytest

from triaxis.launch.start.process import lasting_output


def test_a_launcher_ends_while_its_terminal_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = pty.openpty()
    termios.tcflow(writing, termios.TCOOFF)
    monkeypatch.setattr(lasting_output, "PATIENCE_SECONDS", 0.05)
    with os.fdopen(writing, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with lasting_output.lasting_output():
            print("the last words")
            termios.tcflow(writing, termios.TCOON)
            print("the end")
        read = b""
        # A terminal hands over what it has, which may be a part of a line.
        while not read.endswith(b"the end\r\n") and select.select([reading], [], [], 10)[0]:
            read += os.read(reading, 100)
        assert read.splitlines() == [b"[1 line is missing here: the terminal was paused]", b"the end"]
    os.close(reading)
