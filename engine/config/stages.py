"""The stages of a run: parts of its tokens, each with fields of its own (no torch here).

    stages:                                            a stage begins where the one before it ends; the last one ends the run
      - {name: main, until: 8T}
      - {name: long, until: 8.1T, model.seq_length: 131072, train.global_batch_size: 32}

    tokens     0 ............................ 8T ......... 8.1T
    step       0 ...................... end of main ...... end       `RunStage`: where a stage begins and ends, in all three counts
    samples    0 ...................... of 4,096 .. of 131,072

Reading completes the entries (`engine/config/load.py`): each then has every field that any of them names, with the value of the
config itself where it names none. So the config of one stage holds those of all, and `at_stage` puts the fields of another one in
place. `train.stage` names the stage whose fields a config has.

A stage ends with the first step that reaches `until`, so it is whole steps. All numbers follow from the config alone.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any, Required

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from triaxis.engine.config.counts import Count

if TYPE_CHECKING:
    from triaxis.engine.config.tree import Config

STAGE_FIELDS = (
    *("data.train", "data.attention", "data.positions", "data.count_document_starts"),
    *("model.seq_length", "model.rope_base", "model.rope_scaling"),
    *("train.global_batch_size", "train.micro_batch_size"),
)
"""Fields that a stage may have, besides those of `STAGE_SECTIONS`."""

STAGE_SECTIONS = ("parallel", "schedule", "recompute", "offload", "kernels")
"""Sections of which a stage may have any field: they decide where the work is done, not what is trained."""

BATCH = "train.global_batch_size"
SEQ_LENGTH = "model.seq_length"
CORPORA = "data.train"


class StageFields(TypedDict, total=False):
    """A stage: its name, its end in consumed tokens of the run, and fields of the configuration by their dotted names."""

    __pydantic_config__ = ConfigDict(extra="allow", allow_inf_nan=False)  # type: ignore[misc]

    name: Required[Annotated[str, Field(min_length=1)]]
    until: Required[Annotated[Count, Field(gt=0)]]


@dataclass(frozen=True, slots=True)
class RunStage:
    """The place of a stage in its run; a run without stages is one stage without a name.

    Attributes:
        number: from 0.
        samples_per_step, tokens_per_step: of its steps.
        first_step: steps of the run before it.
        end_step: steps of the run by its end.
        first_sample, first_token: consumed before it, over all stages.
    """

    name: str
    number: int
    samples_per_step: int
    tokens_per_step: int
    first_step: int
    end_step: int
    first_sample: int
    first_token: int

    def samples_before(self, step: int) -> int:
        """Return the samples that the run has consumed before step number `step` (from 0), which is in this stage or ends it."""
        return self.first_sample + (step - self.first_step) * self.samples_per_step

    def tokens_before(self, step: int) -> int:
        """Return the tokens that the run has consumed before step number `step` (from 0), which is in this stage or ends it."""
        return self.first_token + (step - self.first_step) * self.tokens_per_step

    def step_after(self, consumed_samples: int) -> int:
        """Return the number (from 0) of the step that follows so many samples of the run."""
        return self.first_step + (consumed_samples - self.first_sample) // self.samples_per_step

    @property
    def end_token(self) -> int:
        return self.tokens_before(self.end_step)


@dataclass(frozen=True, slots=True)
class DataSegment:
    """A part of a run whose samples are cut alike, from one blend.

    Attributes:
        train: `data.train` of it.
        first_position: samples of the run before it.
    """

    train: tuple[tuple[float, str], ...]
    seq_length: int
    first_position: int


def run_stages(config: "Config") -> tuple[RunStage, ...]:
    """Return the stages of a run in order; empty where its length is not given, or given twice."""
    train, found = config.train, list[RunStage]()
    lengths = [train.steps is not None, train.tokens is not None, bool(config.stages)]
    if sum(lengths) != 1:
        return ()
    step = sample = token = 0
    for number, entry in enumerate(_entries(config)):
        samples_per_step = int(entry[BATCH])
        tokens_per_step = samples_per_step * int(entry[SEQ_LENGTH])
        num_steps = train.steps or 0
        if entry["until"] is not None:
            num_steps = max(0, -(-(entry["until"] - token) // tokens_per_step))
        stage = RunStage(
            entry["name"], number, samples_per_step, tokens_per_step, step, step + num_steps, sample, token
        )
        found.append(stage)
        step, sample, token = stage.end_step, stage.samples_before(stage.end_step), stage.end_token
    return tuple(found)


def _entries(config: "Config") -> list[dict[str, Any]]:
    """Return the stages with the fields that decide what is read, those of the config where they have none."""
    train = config.train
    own = {BATCH: train.global_batch_size, SEQ_LENGTH: config.model.seq_length, CORPORA: config.data.train}
    return [{**own, **entry} for entry in config.stages] or [{"name": "", "until": train.tokens, **own}]


def current_stage(config: "Config") -> RunStage:
    """Return the stage whose fields a checked config has."""
    stages = run_stages(config)
    return next((stage for stage in stages if stage.name == config.train.stage), stages[0])


def stage_at(config: "Config", consumed_tokens: int) -> RunStage:
    """Return the stage of the step that follows so many tokens of the run; behind the last step, the last stage."""
    stages = run_stages(config)
    return next((stage for stage in stages if consumed_tokens < stage.end_token), stages[-1])


def at_stage(config: "Config", name: str) -> "Config":
    """Return the config with the fields of its stage `name` in place."""
    entry = next(entry for entry in config.stages if entry["name"] == name)
    return with_fields(config, {**fields_of(entry), "train.stage": name})


def as_a_run(tree: dict[str, Any], num_steps: int) -> None:
    """Make a configuration, as JSON, a run of so many steps of the stage that it is in, without validation."""
    tree["stages"] = []
    tree["train"] |= {"stage": None, "steps": num_steps, "tokens": None, "eval_interval": None}


def fields_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the configuration that a stage has, by dotted name."""
    return {key: value for key, value in entry.items() if key not in StageFields.__annotations__}


def put_fields(tree: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Set fields by their dotted names in a nested mapping."""
    for dotted, value in fields.items():
        *sections, name = dotted.split(".")
        at = tree
        for section in sections:
            at[section] = at.get(section) or {}
            at = at[section]
        at[name] = value


def get_field(tree: Mapping[str, Any], dotted: str) -> Any:
    """Return the value of a dotted name in a nested mapping; None where there is none."""
    value: Any = tree
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def refused_field(key: str, known: Collection[str]) -> str | None:
    """Return why a stage cannot have a field, as words that follow its name; None: it can."""
    if key in STAGE_FIELDS or (key.split(".")[0] in STAGE_SECTIONS and key in known):
        return None
    if key not in known:
        return ": there is no such field; a stage has a name, an end (until) and dotted names of the configuration"
    return (
        " is one field of the whole run: it cannot change at the edge of a stage. A stage may have "
        f"{', '.join(STAGE_FIELDS)}, and fields of {', '.join(STAGE_SECTIONS)}"
    )


def data_segments(config: "Config") -> tuple[DataSegment, ...]:
    """Return the parts of the run whose samples are cut alike, up to that of the config's stage; at least one."""
    found: list[DataSegment] = []
    for stage in run_stages(config)[: current_stage(config).number + 1]:
        entry = _entries(config)[stage.number]
        train = tuple((float(weight), str(prefix)) for weight, prefix in entry[CORPORA])
        segment = DataSegment(train, int(entry[SEQ_LENGTH]), stage.first_sample)
        # An edge that changes neither blend nor cut is none for the data: the blend goes on where it is.
        if not found or replace(segment, first_position=found[-1].first_position) != found[-1]:
            found.append(segment)
    return tuple(found)


READING = (
    *(
        "data.train",
        "data.valid",
        "data.split",
        "data.synthetic",
        "train.seed",
        "train.stage",
        "train.steps",
        "train.tokens",
    ),
    *(BATCH, SEQ_LENGTH),
)
"""Fields that decide which samples a step reads, besides the stages."""


def reading_fields(config: "Config") -> dict[str, Any]:
    """Return the fields of a config that decide which samples a step reads, by dotted name."""
    tree = config.model_dump(mode="json")
    return {**{key: get_field(tree, key) for key in READING}, "stages": tree["stages"]}


def with_fields(config: "Config", fields: Mapping[str, Any]) -> "Config":
    """Return the config with fields set by their dotted names."""
    tree = config.model_dump(mode="json")
    put_fields(tree, fields)
    return type(config).model_validate(tree)


def past_differs(there: "Config", here: "Config", consumed_tokens: int) -> str | None:
    """Return in which way two configs read different samples, or batches, in the first tokens of a run; None: in none."""
    pasts = []
    for config in (there, here):
        last = stage_at(config, max(0, consumed_tokens - 1))
        stages = run_stages(config)[: last.number + 1]
        config = at_stage(config, last.name) if config.stages else config
        batches: list[tuple[int, int]] = []
        for stage in stages:
            if not batches or batches[-1][1] != stage.samples_per_step:
                batches.append((stage.first_token, stage.samples_per_step))
        pasts.append((data_segments(config), batches))
    (segments, batches), (new_segments, new_batches) = pasts
    for was, now in zip_longest(segments, new_segments):
        if was != now:
            return f"part of the data: {was or 'none'} there, {now or 'none'} here"
    if batches != new_batches:
        return f"(tokens, samples per step from there on): {batches} there, {new_batches} here"
    return None
