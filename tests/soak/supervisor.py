"""The scheduler of a soak: it starts the run, does to it what was drawn, looks at what comes of it, starts it again.

    start -> wait for the step -> fault -> told? ended? nothing left? -> start again -> where did it go on? -> verdict

The run is never asked to wait: a fault comes when metrics.jsonl says that its step is made, and all moments are those of the files.
"""

import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.soak.faults import Fault, Kind
from tests.soak.judge import Expected, Seen, expected_of, names_as_awaited, names_the_link, problems, step_of
from tests.soak.output_faults import fill_log_disk, pause_terminal, reader_ends, remove_run_directory
from tests.soak.preemptions import check_repeated_validation, preempt, stop_in_validation
from tests.soak.run import Run, Stuck
from tests.soak.scene import (
    LOG_INTERVAL,
    SAMPLES_PER_STEP,
    SAVE_INTERVAL,
    START_SECONDS,
    STEPS_AFTER_THE_LAST_FAULT,
    Settings,
    host_of,
)
from tests.soak.watcher import PATIENCE, Watcher, filling
from triaxis.engine.checkpoint.history import read_history
from triaxis.engine.data.skipped import SkippedRanges

_QUIET_REPORTS = 4
"""After a rank is no longer slow, nobody may be called slow for so many reports."""
_ENDED = re.compile(r"(rank (\d+) ended with signal \w+)")


@dataclass(frozen=True)
class Verdict:
    """One fault and what came of it."""

    fault: Fault
    expected: Expected
    seen: Seen
    problems: list[str]


class Supervisor:
    """Disturbs one run.

    Args:
        run: that is disturbed.
        settings: of the soak.

    Attributes:
        skipped: samples that rollbacks have left out.
    """

    def __init__(self, run: Run, settings: Settings) -> None:
        self.skipped = SkippedRanges()
        self._run = run
        self._watcher = Watcher(run, settings)
        self._settings = settings
        self._in_background = True

    def begin(self) -> None:
        """Start the run for the first time, and let it save once: before that there is nothing to go back to."""
        self._start()
        self._run.wait(
            lambda: list(self._run.of_kind("checkpoint_saved")), self._watcher.patience(), "the first checkpoint"
        )

    def strike(self, fault: Fault) -> Verdict:
        """Do it when its step is made, see what comes of it, and bring the run back."""
        run, seen = self._run, Seen(self._run.last_step())
        expected = self._expected(fault)
        try:
            self._watcher.make_steps(fault.after_steps, "its step")
            seen.step, expected = run.last_step(), self._expected(fault)
            self._act(fault, expected, seen)
        except Stuck as stuck:
            seen.wrong.append(str(stuck))
        if expected.exit_codes is not None or run.has_ended():
            self._go_on(seen)
            if fault.kind is Kind.STOP_IN_VALIDATION and seen.lost is not None:
                check_repeated_validation(self._watcher, seen)
        return Verdict(fault, expected, seen, problems(expected, seen))

    def _expected(self, fault: Fault) -> Expected:
        slowest_seconds = self._run.slowest_seconds()
        return expected_of(fault, self._settings, in_background=self._in_background, slowest_seconds=slowest_seconds)

    def finish(self) -> int:
        """Preempt the run, let it go on to a last step, and see it end with 0; returns that step.

        Raises:
            Stuck: it does not.
        """
        run = self._run
        run.rank(0).send_signal(signal.SIGTERM)
        run.wait(run.has_ended, self._watcher.patience(), "the last preemption")
        run.read()
        last = run.last_step() + STEPS_AFTER_THE_LAST_FAULT
        self._start(f"train.steps={last}")
        run.wait(run.has_ended, self._watcher.patience(), "the last steps")
        if run.exit_codes() != [0, 0] or run.last_step() != last:
            raise Stuck(
                f"the last attempt ended with {run.exit_codes()} after step {run.last_step()}, not after {last}"
            )
        return last

    # Starting and ending

    def _start(self, *overrides: str) -> None:
        """The next attempt, in which saves are written in the other way than in this one."""
        self._in_background = not self._in_background
        run = self._run
        run.start(f"checkpoint.async={str(self._in_background).lower()}", *overrides)
        run.wait(lambda: self._watcher.alive() and run.began() is not None, START_SECONDS, "the run to begin")
        run.wait(lambda: run.last_step() > (run.began() or 0) or run.has_ended(), START_SECONDS, "its first step")

    def _go_on(self, seen: Seen) -> None:
        """Start the run again and see what it has lost."""
        run = self._run
        run.end()
        run.read()
        last = run.last_step()
        try:
            self._start()
        except Stuck as stuck:
            run.end()
            seen.lost = None
            seen.wrong.append(str(stuck))
            return
        seen.lost = last - (run.began() or 0)

    # The faults

    def _act(self, fault: Fault, expected: Expected, seen: Seen) -> None:
        match fault.kind:
            case Kind.KILL_RANK:
                self._kill_rank(fault, expected, seen)
            case Kind.KILL_NODE:
                self._kill_node(fault, expected, seen)
            case Kind.STOP_RANK:
                self._stop_rank(fault, expected, seen)
            case Kind.CUT_LINK:
                self._cut_link(expected, seen)
            case Kind.PREEMPT:
                preempt(self._watcher, fault, expected, seen)
            case Kind.FLIP_BIT:
                self._flip_bit(fault, expected, seen)
            case Kind.NAN:
                self._nan(fault, expected, seen)
            case Kind.SLOW_RANK:
                self._slow_rank(fault, expected, seen)
            case Kind.FULL_DISK:
                self._full_disk(expected, seen)
            case Kind.READER_ENDS:
                reader_ends(self._watcher, expected, seen)
            case Kind.PAUSED_TERMINAL:
                pause_terminal(self._watcher, fault, seen)
            case Kind.FULL_LOG_DISK:
                fill_log_disk(self._watcher, seen)
            case Kind.STOP_IN_VALIDATION:
                stop_in_validation(self._watcher, fault, expected, seen)
            case Kind.REMOVED_RUN_DIR:
                remove_run_directory(self._watcher, self._settings, expected, seen)

    def _kill_rank(self, fault: Fault, expected: Expected, seen: Seen) -> None:
        run, host = self._run, host_of(fault.rank)
        since = time.time()
        run.rank(fault.rank).kill()

        def tells() -> bool:
            named = _ENDED.findall(run.launchers[host].words)
            seen.ranks = frozenset(int(rank) for _, rank in named) or None
            # Of the other host only the address is known: a connection to it has ended.
            seen.told = "\n".join([*(line for line, _ in named), run.launchers[1 - host].words])
            seen.source = "its launcher" if named else ""
            return bool(named)

        self._watcher.see_end(seen, expected.bound, since, tells)
        tells()

    def _kill_node(self, fault: Fault, expected: Expected, seen: Seen) -> None:
        run, host = self._run, host_of(fault.rank)
        since = time.time()
        run.launchers[host].process.kill()

        def tells() -> bool:
            seen.told = run.launchers[1 - host].words
            has_told = "so the job was stopped" in seen.told
            seen.source = "the other launcher" if has_told else ""
            return has_told

        self._watcher.see_end(seen, expected.bound, since, tells)

    def _stop_rank(self, fault: Fault, expected: Expected, seen: Seen) -> None:
        since = time.time()
        self._run.rank(fault.rank).send_signal(signal.SIGSTOP)
        self._watcher.see_end(seen, expected.bound, since, lambda: self._hang_is_told(seen))
        self._check_launchers(seen)
        report = self._run.hang_report()
        seen.ranks = None if report is None else frozenset(report["culprits"])
        if seen.source and not names_as_awaited(fault.rank, seen.told):
            seen.wrong.append(f"no rank is reported to wait for rank {fault.rank}")

    def _cut_link(self, expected: Expected, seen: Seen) -> None:
        since = time.time()
        self._run.cut()
        try:
            self._watcher.see_end(seen, expected.bound, since, lambda: self._hang_is_told(seen))
        finally:
            self._run.mend()
        self._check_launchers(seen)
        if seen.source and not names_the_link(seen.told):
            seen.wrong.append("nobody is said to wait for anybody across the link")
        if "does not answer" in seen.told:
            seen.wrong.append("a rank is said not to answer, and all could")

    def _hang_is_told(self, seen: Seen) -> bool:
        report = self._run.hang_report()
        if report is None or not list(self._run.of_kind("hang")):
            return False
        seen.source, seen.told = "hang report", report["text"]
        return True

    def _check_launchers(self, seen: Seen) -> None:
        """Who looks at one host alone has to learn there who waits for whom."""
        headline = seen.told.splitlines()[1].strip() if seen.source else ""
        for launcher in self._run.launchers:
            if headline not in launcher.words:
                seen.wrong.append(f"the launcher of host {launcher.host} does not say who waits for whom")

    def _flip_bit(self, fault: Fault, expected: Expected, seen: Seen) -> None:
        with self._watcher.plan(fault, weight=fault.weight_name, bit=fault.bit):
            act = self._watcher.wait_for_act(fault)
        seen.step = step_of(act["first_sample"], self.skipped)

        def tells() -> bool:
            for event in self._run.of_kind("replicas_differ"):
                seen.source, seen.told = "event replicas_differ", event["message"]
                found = re.search(r"ranks (\d+(?:, \d+)*) \(dp replicas\)", seen.told)
                seen.ranks = None if found is None else frozenset(map(int, found[1].split(", ")))
                if event["step"] != seen.step:
                    seen.wrong.append(f"step {event['step']} named, not {seen.step}")
                return True
            return False

        self._watcher.see_end(seen, expected.bound, act["unix_time_seconds"], tells)

    def _nan(self, fault: Fault, expected: Expected, seen: Seen) -> None:
        run = self._run
        with self._watcher.plan(fault, module=fault.module_name, microbatch=fault.microbatch):
            act = self._watcher.wait_for_act(fault)
        seen.step, since = step_of(act["first_sample"], self.skipped), act["unix_time_seconds"]
        wait_seconds = PATIENCE * expected.bound.most
        flagged = run.wait(lambda: list(run.of_kind("non_finite", since)), wait_seconds, "non_finite")[0]
        seen.source, seen.told = "event non_finite", flagged["message"]
        seen.ranks = None if flagged.get("first_rank") is None else frozenset({flagged["first_rank"]})
        seen.after = flagged["unix_time_seconds"] - since
        if flagged["step"] != seen.step:
            seen.wrong.append(f"step {flagged['step']} named, not {seen.step}")
        if sorted(flagged["first_samples"]) != sorted(act["samples"]):
            seen.wrong.append(f"samples {flagged['first_samples']} named, not {act['samples']}")
        back = run.wait(lambda: list(run.of_kind("rolled_back", since)), wait_seconds, "rolled_back")[0]
        # The flagged step itself was never made: what is made again are the steps before it.
        seen.lost = seen.step - 1 - back["to_step"]
        first = (seen.step - 1) * SAMPLES_PER_STEP
        left_out = self.skipped.span(first, SAMPLES_PER_STEP)
        self.skipped = self.skipped.with_([left_out])
        written = read_history(run.disk).skipped
        if written != self.skipped:
            seen.wrong.append(f"skipped.json leaves out {written.ranges}, not {self.skipped.ranges}")
        run.wait(
            lambda: self._watcher.alive() and run.last_step() > seen.step,
            self._watcher.patience(),
            "the steps after the rollback",
        )

    def _slow_rank(self, fault: Fault, expected: Expected, seen: Seen) -> None:
        run, name = self._run, self._run.host_name(host_of(fault.rank))
        with self._watcher.plan(fault):
            act = self._watcher.wait_for_act(fault)
            seen.step, since = step_of(act["first_sample"], self.skipped), act["unix_time_seconds"]
            patience = PATIENCE * expected.bound.most

            def all_told() -> bool:
                is_late = self._watcher.alive() and run.last_step() > seen.step + patience
                return is_late or any(event["rank"] == fault.rank for event in run.of_kind("slow_rank", since))

            run.wait(all_told, self._watcher.patience(), "a slow rank")
        over = time.time()
        told = list(run.of_kind("slow_rank", since))
        if told:
            seen.source, seen.told = "event slow_rank", "\n".join(event["message"] for event in told)
            seen.ranks = frozenset(event["rank"] for event in told)
            about = next((event for event in told if event["rank"] == fault.rank), told[-1])
            seen.after = about["step"] - seen.step
            if about["host"] != name:
                seen.wrong.append(f"host {about['host']} named, not {name}")
        self._watcher.make_steps(_QUIET_REPORTS * LOG_INTERVAL, "steps in which all are as fast")
        again = list(run.of_kind("slow_rank", over))
        if again:
            seen.wrong.append(f"when it was over: {again[0]['message']}")

    def _full_disk(self, expected: Expected, seen: Seen) -> None:
        run, began = self._run, time.time()
        with filling(run.disk) as fill:

            def failed_saves() -> list[Mapping[str, Any]]:
                self._watcher.alive()
                fill()
                return list(run.of_kind("checkpoint_failed", began))

            failed = run.wait(failed_saves, self._watcher.patience(), "a failed save")[0]
            complete = [path for path in run.disk.glob("step_*") if (path / "manifest.json").exists()]
        due = [record for record in run.steps if record["step"] == failed["step"]][-1]
        seen.step, seen.after = failed["step"], failed["unix_time_seconds"] - due["unix_time_seconds"]
        seen.source, seen.told = "event checkpoint_failed", failed["reason"]
        if not complete:
            seen.wrong.append("the older checkpoints are gone")
        saved = run.wait(
            lambda: self._watcher.alive() and list(run.of_kind("checkpoint_saved", failed["unix_time_seconds"])),
            self._watcher.patience(),
            "the next save",
        )[0]
        # A save that was due while the failed one was tried again waited for it.
        if saved["step"] > failed["step"] + 2 * SAVE_INTERVAL:
            seen.wrong.append(f"the next complete checkpoint is that of step {saved['step']}")
