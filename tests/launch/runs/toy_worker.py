"""A rank that opens its log as the trainer does and then does as TOY says: finish | sleep | save | die R | raise R | deaf R.

`save`: a signal asks it to stop, it writes that it has saved, and ends with the code for it. `deaf R`: all but rank R ignore
SIGTERM, as a rank that waits in a collective would.
"""

import os
import signal
import sys
import time
from pathlib import Path

from triaxis.engine.comm.stop import Stop, StopRequest
from triaxis.launch.start.process.failure import AFTER
from triaxis.launch.start.process.parent_death import end_with_parent

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(argv: list[str]) -> int:
    action, _, culprit = os.environ["TOY"].partition(" ")
    rank = int(os.environ["RANK"])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if action == "deaf" and rank != int(culprit):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    request = StopRequest(rank)
    if action == "save":
        request.listen()

    folder = Path(os.environ["TOY_FOLDER"])
    log = folder / "logs" / "attempt_00" / f"rank_{rank:05d}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(" ".join(f"{name}={os.environ[name]}" for name in VARIABLES) + f" argv={argv}\n")
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    while len(list(folder.glob("pid_*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)

    if action == "finish":
        return 0
    if action in ("die", "raise") and rank == int(culprit):
        with log.open("a") as file:
            file.write("the last words of this rank\n")
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return 2
    for _ in range(1200):
        time.sleep(0.1)
        preempted, interrupted = request.flags()
        if preempted or interrupted:
            time.sleep(0.5)
            with log.open("a") as file:
                file.write("saved\n")
            return AFTER[Stop.INTERRUPTED if interrupted else Stop.PREEMPTED]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
