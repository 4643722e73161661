"""Build the first epochs' sample orders before the ranks meet, so that no group times out.

before any group     the first process on each node builds, the others wait for its lock; progress on standard error
in the run           a later epoch is built ahead in the background (`engine/data/samples.py`)

If an epoch begins before its order is built, the heartbeat shows that the rank builds (`engine/resilience/hang`).
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from triaxis.engine.config.quantities.run_phases import at_phase
from triaxis.engine.config.tree import Config
from triaxis.engine.data.datasets import Datasets, open_orders, open_run_datasets
from triaxis.engine.data.index_cache import Progress
from triaxis.engine.data.order_pieces import pieces_done
from triaxis.engine.errors import TriaxisError
from triaxis.engine.resilience.hang.heartbeat import Heartbeat
from triaxis.engine.telemetry.outlets.format import duration
from triaxis.launch.rank.phase import phase_after, to_go_on_with

QUIET_SECONDS = 5.0
SAY_AGAIN_SECONDS = 10.0


class OrderProgress(Progress):
    """Progress reports for a build, as printed lines and as beats of this rank's heartbeat.

    Args:
        clock: function () -> seconds.

    Attributes:
        heartbeat: this rank's heartbeat; None: no watch follows it yet.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.heartbeat: Heartbeat | None = None
        self._clock = clock
        self._began_seconds = self._say_at_seconds = 0.0
        self._others_done = (0, 0)

    def piece(self, path: Path, done: int, of: int) -> None:
        self.hashes(path)
        now = self._clock()
        if not self._began_seconds:
            self._began_seconds, self._say_at_seconds = now, now + QUIET_SECONDS
        if now >= self._say_at_seconds:
            self._say_at_seconds = now + SAY_AGAIN_SECONDS
            since = duration(now - self._began_seconds)
            text = f"building the order of an epoch, once per node: {done:,} of {of:,} pieces in {since} ({path})"
            print(text, file=sys.stderr, flush=True)

    def hashes(self, path: Path) -> None:
        if self.heartbeat is not None:
            self.heartbeat.builds()

    def waits(self, path: Path) -> None:
        """Send a heartbeat if another process, which builds the sample order `path`, has progressed.

        Progress is counted from the last call.
        """
        if (done := pieces_done(path)) != self._others_done:
            self._others_done = done
            self.hashes(path)

    def ends(self) -> None:
        self._began_seconds = 0.0
        if self.heartbeat is not None:
            self.heartbeat.has_built()


class FirstOrders:
    """A run's datasets and the orders of their first epochs, opened before the ranks meet.

    Args:
        stem: stem of the config's file name, which names an unnamed run.
        from_scratch, is_first_start: see `triaxis.launch.rank.directory.open_directory`.
    """

    def __init__(self, stem: str, *, from_scratch: bool, is_first_start: bool) -> None:
        self.progress = OrderProgress()
        self._stem, self._from_scratch, self._is_first_start = stem, from_scratch, is_first_start
        self._opened: tuple[Config, Datasets] | None = None

    def build(self, config: Config) -> None:
        """Open datasets and build missing sample orders. Errors are ignored; the ranks report them once they meet."""
        try:
            newest = to_go_on_with(
                config, self._stem, from_scratch=self._from_scratch, is_first_start=self._is_first_start
            )
            if config.phases:
                config = at_phase(config, phase_after(config, newest))
            datasets = open_run_datasets(config, self.progress)
            open_orders(datasets.train, 0 if newest is None else newest.manifest.state.consumed_samples)
            if datasets.valid is not None:
                open_orders(datasets.valid, 0)
        except (TriaxisError, OSError):
            return
        self._opened = config, datasets

    def datasets(self, config: Config) -> Datasets:
        """Return the run's datasets for the phase in `config`.

        Raises:
            DataError: a corpus is missing, damaged, too small for its split, or has another vocabulary.
        """
        if self._opened is not None and self._opened[0] == config:
            return self._opened[1]
        return open_run_datasets(config, self.progress)
