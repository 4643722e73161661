"""A watch over the run directory on rank 0: removed or moved under a live run, it is made again, and that is reported once.

    removed    rm -r runs/demo            earlier metrics, events, logs and checkpoints are lost
    moved      mv runs/demo runs/old      they are in the moved folder

Either way the lock went with the folder, and a second start of the run would write in the same place. So the locks are taken again,
config.yaml is written, and metrics, events, logs and checkpoints go on in a new folder of the old name. Logs of a node that
shares no folder with rank 0 do not. Another run that has taken the place since keeps it: this one ends.
"""

import time
from collections.abc import Callable

from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.run.step_parts import StepPart, StepWatcher
from triaxis.engine.telemetry.outlets.hub import Telemetry

LOOK_SECONDS = 1.0
"""Time between two looks, each of two calls of stat."""


class DirectoryWatch(StepWatcher):
    """A watcher of steps that looks after the run directory.

    Args:
        directory: of the run, in which this attempt has begun.
        telemetry: reports a loss; its files are opened again.
        clock: returns seconds.
    """

    def __init__(
        self, directory: RunDirectory, telemetry: Telemetry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._telemetry = telemetry
        self._clock = clock
        self._next_look_seconds = clock()
        self._failed = False
        self._num_said = 0

    def enter(self, part: StepPart) -> None:
        """Look at the directory, at most once in `LOOK_SECONDS`.

        Raises:
            TriaxisError: the directory was removed, and another run is alive in its place.
        """
        if self._clock() < self._next_look_seconds:
            return
        self._next_look_seconds = self._clock() + LOOK_SECONDS
        path = self._directory.path
        try:
            self._directory.put_back()
            if self._directory.num_losses == self._num_said:
                return
            self._telemetry.reopen_files()
        except OSError as error:
            if not self._failed:
                self._telemetry.say(
                    f"{path} was removed or moved, and cannot be made again ({error}); it is tried again", "yellow"
                )
            self._failed = True
            return
        self._failed, self._num_said = False, self._directory.num_losses
        message = (
            f"{path} or its checkpoints were removed or moved while this run writes there: training goes on in a new folder of "
            "that name. What the old one held is missing in it"
        )
        self._telemetry.notice("directory_put_back", message)
