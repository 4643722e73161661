"""Recreate the run directory if it is removed or moved during the run.

    removed    rm -r runs/demo            earlier metrics, events, logs and checkpoints are lost
    moved      mv runs/demo runs/old      earlier files are in the moved folder

The lock is gone with the folder, so rank 0 takes the locks again. Metrics, events, logs and checkpoints continue in a new folder
with the old name. Logs on a node that shares no folder with rank 0 are not restored. If another run has taken the path meanwhile,
this run ends.
"""

import time
from collections.abc import Callable

from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.run.step_parts import StepPart, StepWatcher
from triaxis.engine.telemetry.outlets.hub import Telemetry

LOOK_SECONDS = 1.0
"""Time between two checks, each of which costs two stat calls."""


class DirectoryWatch(StepWatcher):
    """A step watcher on rank 0 that restores the run directory and its locks if they are removed or moved.

    Args:
        directory: run directory in which this attempt has begun.
        telemetry: telemetry that reports the loss of the directory; its files are reopened in the new one.
        clock: function () -> seconds.
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
        """Restore the directory and its locks if they are gone. Look at most once per `LOOK_SECONDS`.

        After a restoration, the telemetry's files are reopened and the directory's loss is reported. A failed restoration is
        reported once and tried again.

        Raises:
            TriaxisError: the directory was removed, and another live run has taken its path.
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
                    f"{path} was removed or moved and cannot be created again ({error}); trying again", "yellow"
                )
            self._failed = True
            return
        self._failed, self._num_said = False, self._directory.num_losses
        message = (
            f"{path} or its checkpoints were removed or moved while this run writes there: training goes on in a new "
            "folder of that name, without the old one's files"
        )
        self._telemetry.notice("directory_put_back", message)
