"""What people read: a line for each fault as it comes, a summary, and a page."""

import os
import platform
import textwrap
from collections.abc import Sequence
from importlib.metadata import version

from tests.soak.faults import WORDS, Kind
from tests.soak.judge import Bound, most_lost
from tests.soak.scene import (
    EVAL_INTERVAL,
    EVAL_STEPS,
    LAYERS_PER_STAGE,
    LOG_INTERVAL,
    PACE_SECONDS,
    SAVE_INTERVAL,
    SIZES,
    STEPS_AFTER_THE_LAST_FAULT,
    Settings,
)
from tests.soak.supervisor import Verdict
from triaxis.engine.resilience.hang.watch import SLOWER

HEADINGS = ("#", "fault", "where", "step", "reported by", "after", "ended", "bound", "exit codes", "lost", "verdict")
WIDTHS = (2, 18, 38, 5, 24, 8, 7, 8, 7, 7, 7)

RIGHT, WRONG = "right", "WRONG"


def cells(verdict: Verdict) -> tuple[str, ...]:
    """One fault, as the columns of `HEADINGS`."""
    fault, expected, seen = verdict.fault, verdict.expected, verdict.seen
    codes = "goes on" if seen.exit_codes is None else " ".join("-" if it is None else str(it) for it in seen.exit_codes)
    unit = expected.bound.unit
    after = "-"
    if seen.source:
        after = f"{seen.after:.1f} s" if unit == "s" else f"{seen.after:.0f} {unit}"
    lost = "?" if seen.lost is None else f"{seen.lost} of {expected.most_lost}"
    return (
        str(fault.number),
        fault.kind.value,
        fault.where,
        str(seen.step),
        seen.source or "not reported",
        after,
        "-" if seen.ended_after is None else f"{seen.ended_after:.1f} s",
        str(expected.bound),
        codes,
        lost,
        WRONG if verdict.problems else RIGHT,
    )


def line(columns: Sequence[str]) -> str:
    return "  ".join(f"{text:<{width}}" for text, width in zip(columns, WIDTHS, strict=True)).rstrip()


def lines(verdict: Verdict) -> str:
    """One fault for the terminal; what is wrong stands below."""
    return "\n".join([line(cells(verdict)), *(f"      {problem}" for problem in verdict.problems)])


def summary(verdicts: Sequence[Verdict], is_same: bool | None, steps: int, seconds: float) -> list[str]:
    """What it came to; `is_same`: the final weights are those of the undisturbed run (None: that was not reached)."""
    num_right = sum(not verdict.problems for verdict in verdicts)
    lost = [verdict.seen.lost or 0 for verdict in verdicts]
    weights = {
        True: f"After {steps} steps the weights, moments and validation losses are, bit by bit, those of an undisturbed run.",
        False: f"After {steps} steps the weights, moments or validation losses are NOT those of an undisturbed run.",
        None: "The run did not reach its last step, so its weights were compared with nothing.",
    }[is_same]
    return [
        f"{num_right} of {len(verdicts)} faults came out right, in {seconds / 60:.0f} minutes.",
        f"Steps made again: {sum(lost)} in all, {max(lost, default=0)} at most after one fault.",
        weights,
    ]


def page(verdicts: Sequence[Verdict], told: Sequence[str], command: str, settings: Settings) -> str:
    """Every fault with its verdict, and the summary."""
    limits = settings.limits
    bounds: dict[Kind, Bound] = {}
    for verdict in verdicts:  # that of a hang is longer after slow steps
        bounds[verdict.fault.kind] = min(bounds.get(verdict.fault.kind, verdict.expected.bound), verdict.expected.bound)
    what = [
        f"| `{kind.value}` | {WORDS[kind]} | {bounds[kind]} | {bounds[kind].reason} |"
        for kind in Kind
        if kind in bounds
    ]
    rows = [f"| {' | '.join(cells(verdict))} |" for verdict in verdicts]
    wrong = [f"- {verdict.fault.number}: {problem}" for verdict in verdicts for problem in verdict.problems]
    machine = (
        f"{os.cpu_count()} cores, {platform.system()} on {platform.machine()}, Python {platform.python_version()}, "
        f"torch {version('torch')}, gloo"
    )
    parts = [
        "# The soak",
        _wrapped(
            """One run is disturbed by random faults. It must notice and name each fault, and survive it or end in bounded time. Its
            last weights must equal those of an undisturbed run. The command itself writes this page:"""
        ),
        f"```\n{command}\n```",
        *told,
        f"Machine: {machine}.",
        "## What is done",
        _wrapped(
            f"""Four ranks on two hosts (network namespaces of one machine, each with its own launcher, joined by a link):
            pp={SIZES.pp} across the link, dp={SIZES.dp} inside, {SIZES.pp * LAYERS_PER_STAGE} small layers in fp32, a checkpoint
            every {SAVE_INTERVAL} steps, a line every {LOG_INTERVAL}, a validation of {EVAL_STEPS} batches every {EVAL_INTERVAL},
            `runtime.hang_seconds={settings.hang_seconds:g}`, `resilience.on_nonfinite=rollback`, replicas compared in every step.
            Each forward takes {PACE_SECONDS * 1e3:.0f} ms longer, so that a slow rank is visible on a busy machine. Every second
            attempt saves in the background. Checkpoints and run directories are on two small disks (tmpfs)."""
        ),
        _wrapped(
            """A supervisor acts as the scheduler. It starts `triaxis train` on both hosts, causes the fault when metrics.jsonl has
            the drawn step, and gives the same command again after the run has ended. Kind, rank, step and details of a fault follow
            from the seed. A module that Python loads into the ranks of a soak makes NaNs, flipped bits and slowness, prints the
            lines for a paused terminal, and sends the signal during a validation. The product has no hook for it."""
        ),
        "A fault is right if",
        _listed(
            """the run reported it within its bound, with the right rank, host, module, weight, samples or step, and no other;""",
            "all launchers ended with the documented exit codes within the bound and no process outlived them; or the run went on;",
            f"""no more steps were lost than a checkpoint interval, {most_lost(in_background=False)}, or, where saves are written in
            the background, {most_lost(in_background=True)}: those that were made during a save count too. None after a preemption;
            after a NaN, those between the checkpoint that was loaded and the flagged step;""",
            "a rollback went to a checkpoint from before the flagged step, and skipped.json names its samples;",
            f"""a paused terminal held no step for as long as a hang, at least {2 * LOG_INTERVAL} steps were made meanwhile, and the
            terminal later gave the exact number of lines that only the log has;""",
            f"""on the full disk of the run directory at least {2 * LOG_INTERVAL} more steps were made after the terminal reported
            it, and metrics.jsonl has the row of every step, in order and once;""",
            """a validation that a signal broke off reported no loss, and the next attempt made it first and once;""",
            """a removed run directory was made again within a second and a step that does not hang, with one event; later steps
            are in its metrics.jsonl without a gap, and the next attempt has the next number and resumes from the last step.""",
        ),
        _wrapped(
            f"""After the last fault the run is preempted once more and goes on for {STEPS_AFTER_THE_LAST_FAULT} steps. Then the
            same steps are made from the start in one undisturbed attempt, with the left-out samples in `data.skip_samples`, and
            both fingerprints (weights and both moments) and the loss of each validation must be equal."""
        ),
        "| kind | what is done | bound | where the bound comes from |\n|---|---|---|---|\n" + "\n".join(what),
        _wrapped(
            f"""The end of a hang: hang_seconds + two looks + three times the grace = {limits.end_seconds:.1f} s. A rank may stand
            still for longer than hang_seconds, up to {SLOWER:g} times its longest time so far. Where two steps of an attempt were
            further apart than {settings.hang_seconds / SLOWER:g} s, the bound of a hang grows by {SLOWER:g} times the excess."""
        ),
        "## What came of it",
        f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}\n" + "\n".join(rows),
        _wrapped(
            """"after" is the time from the fault to the report that names it. Three kinds differ. For a full disk of checkpoints,
            it begins at the step whose save was due. For a full disk of the run directory, it is the number of steps. For a paused
            terminal, it is the longest time between two steps meanwhile. "ended" is the time to the end of the last launcher; the
            bound is for both. Exit codes are those of the launchers of host 0 and host 1; -9 is a launcher that the soak killed."""
        ),
    ]
    if wrong:
        parts += ["What was wrong:", "\n".join(wrong)]
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str, indent: str = "") -> str:
    words = " ".join(text.split())
    return textwrap.fill(words, 130, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _listed(*texts: str) -> str:
    return "\n".join(_wrapped(f"- {text}", indent="  ") for text in texts)
