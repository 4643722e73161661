"""Rules about traces and tools that measure."""

from collections.abc import Iterator
from dataclasses import replace

from triaxis.engine.config.quantities.plan import planned_steps
from triaxis.engine.config.rules.problem import Problem, Rule, Subject
from triaxis.engine.config.schema.telemetry import TelemetryConfig


def traced_steps_are_in_the_run(subject: Subject) -> Iterator[Problem]:
    telemetry, num_steps = subject.config.telemetry, planned_steps(subject.config)
    for name, traced in (("profile", telemetry.profile), ("timeline", telemetry.timeline)):
        if traced is None or num_steps is None or traced.start + traced.steps - 1 <= num_steps:
            continue
        last = traced.start + traced.steps - 1
        yield subject.problem(
            f"telemetry.{name}.start",
            f"asks for a trace of steps {traced.start} to {last}, but the run has {num_steps}: it would never be whole",
            {
                f"telemetry.{name}.start": [num_steps - traced.steps + 1] if traced.steps <= num_steps else [],
                f"telemetry.{name}.steps": [num_steps - traced.start + 1] if traced.start <= num_steps else [],
                "train.steps": [last] if subject.config.train.steps is not None else [],
            },
        )


def profiled_ranks_are_in_the_run(subject: Subject) -> Iterator[Problem]:
    profile = subject.config.telemetry.profile
    if profile is None:
        return
    world_size, dp = subject.world_size, subject.dp
    if world_size is None and dp is not None:
        world_size = subject.config.parallel.tp * subject.config.parallel.pp * dp
    missing = [rank for rank in profile.ranks if rank < 0 or (world_size is not None and rank >= world_size)]
    if missing or not profile.ranks:
        legal = [rank for rank in profile.ranks if rank not in missing]
        yield subject.problem(
            "telemetry.profile.ranks",
            f"must name ranks of the run{'' if world_size is None else f', 0 to {world_size - 1}'}: no trace would be written"
            + (f" of {', '.join(map(str, missing))}" if missing else ""),
            {"telemetry.profile.ranks": [legal or [0]], "telemetry.profile": [None]},
        )


def gpu_tools_have_a_gpu(subject: Subject) -> Iterator[Problem]:
    if subject.config.runtime.device == "cpu":
        for problem in gpu_tool_problems(subject.config.telemetry, "runtime.device = cpu"):
            yield replace(problem, candidates={**problem.candidates, "runtime.device": ["auto", "cuda"]})


def gpu_tool_problems(telemetry: TelemetryConfig, why: str) -> Iterator[Problem]:
    """Yield a problem for each field that is on and needs a GPU; `why` explains why there is none."""
    for name in ("nvtx", "memory_history"):
        if getattr(telemetry, name):
            field = f"telemetry.{name}"
            yield Problem(field, True, f"looks at a GPU, but {why}: it would show nothing", {field: [False]})


TELEMETRY_RULES: tuple[Rule, ...] = (traced_steps_are_in_the_run, profiled_ranks_are_in_the_run, gpu_tools_have_a_gpu)
