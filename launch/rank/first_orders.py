"""The orders of the first epochs, built before the ranks meet: groups would time out, and a watch would see ranks stand still.

before any group     the first process of each node builds, the others wait for its lock; progress on standard error
in the run           a later epoch, ahead in the background (`engine/data/samples.py`); where the epoch begins before it is done,
                     the heartbeat says that the rank builds (`engine/resilience/hang`)
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from triaxis.engine.config.phases import at_phase
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
    """The progress of a build: lines of the process that builds, and beats of this rank once it has a heartbeat.

    Args:
        clock: returns seconds.

    Attributes:
        heartbeat: of this rank; None: no watch looks at it yet.
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
        """Beat only where the other process has made a piece: one that hangs is to be seen."""
        if (done := pieces_done(path)) != self._others_done:
            self._others_done = done
            self.hashes(path)

    def ends(self) -> None:
        self._began_seconds = 0.0
        if self.heartbeat is not None:
            self.heartbeat.has_built()


class FirstOrders:
    """The datasets of a run, opened before its ranks meet, with the orders of the epochs that they read first.

    Args:
        stem: of the config's file, after which a run without a name is named.
        from_scratch, is_first_start: as in `triaxis.launch.rank.directory.open_directory`.
    """

    def __init__(self, stem: str, *, from_scratch: bool, is_first_start: bool) -> None:
        self.progress = OrderProgress()
        self._stem, self._from_scratch, self._is_first_start = stem, from_scratch, is_first_start
        self._opened: tuple[Config, Datasets] | None = None

    def build(self, config: Config) -> None:
        """Build what is missing. What is wrong is reported after the ranks have met, where they name the node that differs."""
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
        """Return the datasets of the run in the phase of `config`.

        Raises:
            DataError: a corpus is missing, damaged, too small for its split or of another vocabulary.
        """
        if self._opened is not None and self._opened[0] == config:
            return self._opened[1]
        return open_run_datasets(config, self.progress)
