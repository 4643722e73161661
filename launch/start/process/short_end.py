"""Shorten the delay between SIGTERM and SIGKILL for ranks that end because another has failed.

torchrun gives them 30 seconds. Its option --shutdown-timeout does not apply here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from signal import Signals

from torch.distributed.elastic.multiprocessing import PContext

TORCHRUN_SECONDS = 30


@contextmanager
def short_end(seconds: int) -> Iterator[None]:
    """Inside the block, let torchrun kill a rank that is still running `seconds` after SIGTERM."""
    close = PContext.close

    def close_soon(self: PContext, death_sig: Signals | None = None, timeout: int = TORCHRUN_SECONDS) -> None:
        close(self, death_sig, min(timeout, seconds))

    PContext.close = close_soon  # type: ignore[method-assign]
    try:
        yield
    finally:
        PContext.close = close  # type: ignore[method-assign]
