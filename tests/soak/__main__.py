"""The soak: one small run on two hosts, disturbed by random faults, judged, and compared with an undisturbed run.

    python -m tests.soak --faults 40 --seed 1 --table soak.md
    python -m tests.soak --faults 4 --kinds nan full-disk

Needs root, `ip` and about 20 seconds for each fault on an idle machine with two cores. Exit code 0: every verdict is right and the
weights are equal; 1: something is wrong; 2: two hosts cannot be made here.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import netns
from tests.soak import table
from tests.soak.faults import WORDS, Kind, draw
from tests.soak.run import MARK, NAME, Run, Stuck, environment, train_command
from tests.soak.scene import DISK_BYTES, NUM_HOSTS, RANKS, RUNS_DISK_BYTES, Settings, config_text
from tests.soak.supervisor import Supervisor, Verdict
from triaxis.engine.checkpoint.directory import CheckpointDirectory
from triaxis.engine.checkpoint.format.manifest import read_manifest
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.engine.telemetry.record.events import read_events

UNDISTURBED = "undisturbed"
"""Name of the run that is compared with."""

_UNDISTURBED_SECONDS_PER_STEP = 1.0


def main(argv: Sequence[str]) -> int:
    """Run the soak that was asked for; returns the exit code."""
    asked = _parse(argv)
    settings = Settings(hang_seconds=asked.hang_seconds)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    disk, runs = folder / "disk", folder / "runs"
    disk.mkdir()
    runs.mkdir()
    os.environ[MARK] = str(folder)
    is_right = False
    try:
        # First the disks: the hosts are then made where all are seen, and all are gone with this process.
        netns.mount_another_disk(disk, num_bytes=DISK_BYTES)
        netns.mount_another_disk(runs, num_bytes=RUNS_DISK_BYTES)
        with netns.hosts(NUM_HOSTS) as hosts:
            is_right = _soak(asked, settings, folder, hosts, disk)
    except (OSError, pytest.skip.Exception, pytest.fail.Exception) as error:
        print(f"error: the soak cannot be made here: {error}", file=sys.stderr)
        return 2
    finally:
        if not is_right:
            shutil.copytree(runs, folder / "left", dirs_exist_ok=True)
            print(f"{folder}/left and {folder}/said hold the files and the output of the run", file=sys.stderr)
        subprocess.run(["umount", str(disk), str(runs)], capture_output=True, check=False)
        if is_right:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if is_right else 1


def _soak(asked: argparse.Namespace, settings: Settings, folder: Path, hosts: list[str], disk: Path) -> bool:
    config = folder / f"{NAME}.yaml"
    config.write_text(config_text(settings, str(disk)))
    faults = draw(asked.seed, asked.faults, [Kind(word) for word in asked.kinds])
    verdicts: list[Verdict] = []
    is_same, steps, began = None, 0, time.monotonic()
    print(table.line(table.HEADINGS), flush=True)
    with _ended(Run(folder, hosts, disk)) as run:
        supervisor = Supervisor(run, settings)
        try:
            supervisor.begin()
            for fault in faults:
                verdicts.append(supervisor.strike(fault))
                print(table.lines(verdicts[-1]), flush=True)
            steps = supervisor.finish()
            seconds = time.monotonic() - began
            disturbed, skipped = _saved(disk, steps)
            if skipped != supervisor.skipped:
                raise Stuck(f"the last checkpoint leaves out {skipped.ranges}, not {supervisor.skipped.ranges}")
            fingerprint = _undisturbed(folder, hosts[0], supervisor.skipped, steps)
            undisturbed = read_events(folder / "runs" / UNDISTURBED).events
            losses = dict(_validation_losses(event.to_record() for event in undisturbed))
            is_same = fingerprint == disturbed
            is_same &= all(losses.get(step) == loss for step, loss in _validation_losses(run.events))
        except Stuck as stuck:
            print(f"the soak ends here: {stuck}", file=sys.stderr, flush=True)
            seconds = time.monotonic() - began
    told = table.summary(verdicts, is_same, steps, seconds)
    print("\n" + "\n".join(told), flush=True)
    if asked.table is not None:
        asked.table.write_text(table.page(verdicts, told, _command(asked), settings))
    return is_same is True and len(verdicts) == len(faults) and not any(verdict.problems for verdict in verdicts)


@contextmanager
def _ended(run: Run) -> Iterator[Run]:
    try:
        yield run
    finally:
        run.end()


def _saved(disk: Path, step: int) -> tuple[dict[str, str], SkippedRanges]:
    """Fingerprint and left-out samples of the newest checkpoint, which must be that of the last step."""
    folder = CheckpointDirectory(disk).latest()
    if folder is None or folder != CheckpointDirectory(disk).step_folder(step):
        raise Stuck(f"the newest checkpoint is {folder}, not that of step {step}")
    manifest = read_manifest(folder)
    return dict(manifest.fingerprint), SkippedRanges.of(manifest.state.skipped)


def _validation_losses(events: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return (step, loss) of each validation that was made to its end."""
    return [(event["step"], event["val_loss"]) for event in events if event["kind"] == "validation"]


def _undisturbed(folder: Path, host: str, skipped: SkippedRanges, steps: int) -> dict[str, str]:
    """The fingerprint of the same config's steps, made in one attempt on one host."""
    place = folder / UNDISTURBED
    overrides = [
        f"train.steps={steps}",
        f"checkpoint.dir={place}",
        f"checkpoint.interval={steps}",
        f"data.skip_samples={[list(pair) for pair in skipped.ranges]}",
    ]
    made = subprocess.run(
        train_command(folder, overrides),
        env=environment(folder, disturbed=False) | {"RUN_NAME": UNDISTURBED, "NPROC_PER_NODE": str(len(RANKS))},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120.0 + _UNDISTURBED_SECONDS_PER_STEP * steps,
        check=False,
        preexec_fn=lambda: netns.enter(host),
    )
    if made.returncode:
        raise Stuck(f"the undisturbed run ended with {made.returncode}: {made.stderr[-2000:]}")
    return _saved(place, steps)[0]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    kinds = "\n".join(f"  {kind.value:<18} {words}" for kind, words in WORDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description="Disturb one small run on two hosts, judge what comes of it, compare it with an undisturbed one.",
        epilog=f"kinds:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=40, help="how many (40)")
    parser.add_argument("--seed", type=int, default=1, help="of kinds, ranks, steps and details (1)")
    parser.add_argument("--table", type=Path, default=None, help="write the page there")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=[kind.value for kind in Kind],
        default=[kind.value for kind in Kind],
        metavar="KIND",
        help="only these (all)",
    )
    parser.add_argument("--hang-seconds", type=float, default=Settings().hang_seconds, help="runtime.hang_seconds (5)")
    return parser.parse_args(argv)


def _command(asked: argparse.Namespace) -> str:
    """What was asked for, without where the page goes."""
    words = ["python -m tests.soak", f"--faults {asked.faults}", f"--seed {asked.seed}"]
    if asked.hang_seconds != Settings().hang_seconds:
        words.append(f"--hang-seconds {asked.hang_seconds:g}")
    if set(asked.kinds) != {kind.value for kind in Kind}:
        words.append(f"--kinds {' '.join(asked.kinds)}")
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
