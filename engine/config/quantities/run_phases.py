"""Where a run's phases begin and end, in tokens, steps and samples; a configuration in one of them; the data that they read.

    tokens     0 ............................ 8T ......... 8.1T
    step       0 ...................... end of main ...... end       `RunPhase`: where a phase begins and ends, in all three counts
    samples    0 ...................... of 4,096 .. of 131,072

A phase ends with the first step that reaches `until`, so it has whole steps. All numbers follow from the config alone.
"""

from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from triaxis.engine.config.schema.dotted import get_field, with_fields
from triaxis.engine.config.schema.phases import fields_of
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.sources import Source

BATCH = "train.global_batch_size"
SEQ_LENGTH = "model.seq_length"
CORPORA = "data.train"


@dataclass(frozen=True, slots=True)
class RunPhase:
    """A phase's place in its run; a run without phases is one phase without a name.

    Attributes:
        number: index of the phase, from 0.
        samples_per_step, tokens_per_step: samples and tokens in each of the phase's steps.
        first_step: index of the phase's first step in the run, from 0.
        end_step: index of the step after the phase's last one.
        first_sample, first_token: number of samples and tokens that the run consumes before the phase.
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
        """Samples that the run consumes before step number `step` (from 0), which is at least `first_step`, at most `end_step`."""
        return self.first_sample + (step - self.first_step) * self.samples_per_step

    def tokens_before(self, step: int) -> int:
        """Tokens that the run consumes before step number `step` (from 0), which is at least `first_step`, at most `end_step`."""
        return self.first_token + (step - self.first_step) * self.tokens_per_step

    def step_after(self, consumed_samples: int) -> int:
        """Index (from 0) of the step that begins once the run has consumed `consumed_samples` samples."""
        return self.first_step + (consumed_samples - self.first_sample) // self.samples_per_step

    @property
    def end_token(self) -> int:
        return self.tokens_before(self.end_step)


@dataclass(frozen=True, slots=True)
class DataSegment:
    """A part of a run with one sample length and one blend.

    Attributes:
        train: (weight, path) for each corpus.
        first_position: number of samples that the run consumes before the segment.
    """

    train: tuple[tuple[float, str], ...]
    seq_length: int
    first_position: int


def run_phases(config: Config) -> tuple[RunPhase, ...]:
    """List a run's phases in order; empty if the config gives no length for the run, or more than one."""
    train, found = config.train, list[RunPhase]()
    lengths = [train.steps is not None, train.tokens is not None, bool(config.phases)]
    if sum(lengths) != 1:
        return ()
    step = sample = token = 0
    for number, entry in enumerate(_entries(config)):
        samples_per_step = int(entry[BATCH])
        tokens_per_step = samples_per_step * int(entry[SEQ_LENGTH])
        num_steps = train.steps or 0
        if entry["until"] is not None:
            num_steps = max(0, -(-(entry["until"] - token) // tokens_per_step))
        phase = RunPhase(
            entry["name"], number, samples_per_step, tokens_per_step, step, step + num_steps, sample, token
        )
        found.append(phase)
        step, sample, token = phase.end_step, phase.samples_before(phase.end_step), phase.end_token
    return tuple(found)


def _entries(config: Config) -> list[dict[str, Any]]:
    """List the phases, or one unnamed phase if there are none; each has the batch size, sequence length and corpora too."""
    train = config.train
    own = {BATCH: train.global_batch_size, SEQ_LENGTH: config.model.seq_length, CORPORA: config.data.train}
    return [{**own, **entry} for entry in config.phases] or [{"name": "", "until": train.tokens, **own}]


def current_phase(config: Config) -> RunPhase:
    """Return the phase whose fields the config has (`train.phase`); the config must have passed the rules."""
    phases = run_phases(config)
    return next((phase for phase in phases if phase.name == config.train.phase), phases[0])


def phase_at(config: Config, consumed_tokens: int) -> RunPhase:
    """The phase that the step after `consumed_tokens` tokens belongs to; after the last step, the last phase."""
    phases = run_phases(config)
    return next((phase for phase in phases if consumed_tokens < phase.end_token), phases[-1])


def at_phase(config: Config, name: str) -> Config:
    """Switch the config to the fields of its phase `name`."""
    entry = next(entry for entry in config.phases if entry["name"] == name)
    return with_fields(config, {**fields_of(entry), "train.phase": name})


def as_a_run(tree: dict[str, Any], num_steps: int) -> None:
    """Change a JSON configuration, in place, to a run of `num_steps` steps in its current phase, without validation."""
    tree["phases"] = []
    tree["train"] |= {"phase": None, "steps": num_steps, "tokens": None}
    tree["eval"]["interval"] = None


def data_segments(config: Config) -> tuple[DataSegment, ...]:
    """List the run's data segments up to the config's phase; at least one."""
    found: list[DataSegment] = []
    for phase in run_phases(config)[: current_phase(config).number + 1]:
        entry = _entries(config)[phase.number]
        train = tuple((source.weight, source.path) for source in map(Source.model_validate, entry[CORPORA]))
        segment = DataSegment(train, int(entry[SEQ_LENGTH]), phase.first_sample)
        # If neither blend nor sample length changes, the data has no boundary here: the blend continues where it is.
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
        "train.phase",
        "train.steps",
        "train.tokens",
    ),
    *(BATCH, SEQ_LENGTH),
)
"""Fields that decide which samples a step reads, besides the phases."""


def reading_fields(config: Config) -> dict[str, Any]:
    """Collect the config fields that decide which samples a step reads, by dotted name."""
    tree = config.model_dump(mode="json")
    return {**{key: get_field(tree, key) for key in READING}, "phases": tree["phases"]}


def past_differs(there: Config, here: Config, consumed_tokens: int) -> str | None:
    """Describe how two configs read different samples or batches in a run's first `consumed_tokens`; None: they agree."""
    pasts = []
    for config in (there, here):
        last = phase_at(config, max(0, consumed_tokens - 1))
        phases = run_phases(config)[: last.number + 1]
        config = at_phase(config, last.name) if config.phases else config
        batches: list[tuple[int, int]] = []
        for phase in phases:
            if not batches or batches[-1][1] != phase.samples_per_step:
                batches.append((phase.first_token, phase.samples_per_step))
        pasts.append((data_segments(config), batches))
    (segments, batches), (new_segments, new_batches) = pasts
    for was, now in zip_longest(segments, new_segments):
        if was != now:
            return f"part of the data: {was or 'none'} there, {now or 'none'} here"
    if batches != new_batches:
        return f"(tokens, samples per step from there on): {batches} there, {new_batches} here"
    return None
