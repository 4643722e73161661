"""The rules of the stages of a run (no torch here)."""

from collections.abc import Iterator

from triaxis.engine.config.section import Problem, Rule, Subject
from triaxis.engine.config.stages import run_stages


def stages_follow_each_other(subject: Subject) -> Iterator[Problem]:
    config = subject.config
    seen: set[str] = set()
    for number, entry in enumerate(config.stages):
        if entry["name"] in seen:
            yield Problem(
                f"stages.{number}.name",
                entry["name"],
                "is the name of two stages: a report could not say which of them it means",
                advice="Give each a name of its own.",
            )
        seen.add(entry["name"])
    for stage in run_stages(config):
        if config.stages and stage.end_step == stage.first_step:
            yield Problem(
                f"stages.{stage.number}.until",
                config.stages[stage.number]["until"],
                f"must be more than {stage.first_token:,}, the tokens at the end of the stage before it (whole steps): the stage "
                "would have no step",
                advice="`until` counts tokens from the start of the run.",
            )
    if config.stages and config.train.stage not in (None, *seen):
        yield subject.problem("train.stage", f"must be one of the stages {', '.join(sorted(seen))}")
    if not config.stages and config.train.stage is not None:
        yield subject.problem(
            "train.stage", "names a stage, and the run has none: it would have no effect", {"train.stage": [None]}
        )


def stages_can_change(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each field that stages cannot do with."""
    config, stages = subject.config, run_stages(subject.config)
    if len(config.stages) > 1 and not config.checkpoint.saves:
        yield subject.problem(
            "checkpoint.interval",
            "saves nothing, and a run of several stages is saved at the edge of each: the next one begins from there",
            {"checkpoint.interval": [None, 1000]},
        )
    sizes = {stage.tokens_per_step for stage in stages}
    if len(sizes) > 1:
        for key, tokens in (("warmup_steps", "warmup_tokens"), ("decay_steps", None)):
            if getattr(config.optimizer, key):
                instead = f"Give optimizer.{tokens}." if tokens else "Leave it out: the decay ends with the run."
                yield subject.problem(
                    f"optimizer.{key}",
                    f"counts steps, and steps of the stages have {' or '.join(f'{size:,}' for size in sorted(sizes))} tokens: the "
                    "learning rate would jump at an edge",
                    {f"optimizer.{key}": [type(config.optimizer).model_fields[key].default]},
                    instead,
                )
    lengths = {stage.tokens_per_step // stage.samples_per_step for stage in stages}
    if len(lengths) > 1 and config.model.position == "learned":
        yield subject.problem(
            "model.position",
            f"is a table of one row per position, and stages have samples of {' or '.join(map(str, sorted(lengths)))} tokens: "
            "the rows of longer samples would be random",
            {"model.position": ["rope"]},
        )


STAGE_RULES: tuple[Rule, ...] = (stages_follow_each_other, stages_can_change)
