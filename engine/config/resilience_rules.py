"""The rules of the `resilience` section, and of what belongs to it elsewhere (no torch here)."""

from collections.abc import Iterator

from engine.config.problems import Problem, Rule, Subject


def rollback_has_a_checkpoint(subject: Subject) -> Iterator[Problem]:
    config = subject.config
    if config.resilience.on_nonfinite == "rollback" and config.checkpoint.interval is None:
        yield Problem(
            "resilience.on_nonfinite",
            "rollback",
            "goes back to a checkpoint, but checkpoint.interval = null saves none: the first bad step would end the run",
            {"resilience.on_nonfinite": ["stop", "skip"], "checkpoint.interval": [100]},
        )


def hang_is_seen_before_the_timeout(subject: Subject) -> Iterator[Problem]:
    runtime = subject.config.runtime
    if runtime.hang_seconds is not None and runtime.hang_seconds >= runtime.timeout_seconds:
        yield Problem(
            "runtime.hang_seconds",
            runtime.hang_seconds,
            f"must be below runtime.timeout_seconds = {runtime.timeout_seconds:g}: the collectives would fail before anybody says "
            "who waits for whom",
            {
                "runtime.hang_seconds": [runtime.timeout_seconds / 2, None],
                "runtime.timeout_seconds": [2 * runtime.hang_seconds],
            },
        )


def skipped_samples_are_ranges(subject: Subject) -> Iterator[Problem]:
    given = subject.config.data.skip_samples
    if wrong := [pair for pair in given if not 0 <= pair[0] < pair[1]]:
        yield Problem(
            "data.skip_samples",
            given,
            f"must be ranges [first id, id after the last] from 0: {', '.join(str(list(pair)) for pair in wrong)} "
            "names no sample, so nothing would be left out",
            {"data.skip_samples": [[pair for pair in given if pair not in wrong]]},
        )


RESILIENCE_RULES: tuple[Rule, ...] = (
    rollback_has_a_checkpoint,
    hang_is_seen_before_the_timeout,
    skipped_samples_are_ranges,
)
