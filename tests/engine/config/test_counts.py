"""Counts in a configuration: what people write for large whole numbers is read exactly, and what is no count is refused."""

import string
from collections.abc import Iterable
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.launch.command_line import ROOT
from triaxis.engine.config.load import load_config
from triaxis.engine.config.schema.section import Section
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.counts import LIMIT, SUFFIXES, Count, count
from triaxis.engine.config.write import to_yaml
from triaxis.engine.errors import ConfigError

TINY = ROOT / "configs" / "gpt_tiny.yaml"
NEITHER_STEPS = "train.steps=null"
NO_WARM_UP = "optimizer.warmup_steps=0"  # a rule: it ends before the run does


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("8e12", 8 * 10**12),
        ("8E+12", 8 * 10**12),
        ("8.0e+12", 8 * 10**12),
        ("8T", 8 * 10**12),
        ("20B", 20 * 10**9),
        ("500M", 500 * 10**6),
        ("10k", 10_000),
        ("10K", 10_000),
        ("1.5B", 1_500_000_000),
        ("0.5k", 500),
        ("1_000k", 10**6),
        ("300_000_000_000", 300 * 10**9),
        ("123456789012345678", 123_456_789_012_345_678),
    ],
)
def test_tokens_are_read_as_they_are_written(written: str, meant: int) -> None:
    config = load_config(TINY, [NEITHER_STEPS, NO_WARM_UP, f"train.tokens={written}"])
    assert config.train.tokens == meant
    assert type(config.train.tokens) is int
    assert f"tokens: {meant}\n" in to_yaml(config)
    assert config.model_dump(mode="json")["train"]["tokens"] == meant


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("1.5", "must be a whole number; a part of one cannot be counted"),
        ("1.0001k", "a part of one"),
        ("1.00000000000000000000000000001k", "a part of one"),
        ("8G", "such as 10000, 10k, 500M, 20B, 8T or 8e12"),
        ("8m", "suffixes are k, K, M, B, T"),
        ("8e-2", "must be a whole number, such as"),
        ("many", "must be a whole number, such as"),
        ("1e18", "must be below 10^18"),
        ("1000000000000000000", "must be below 10^18"),
        ("-1000000000000000000", "must be below 10^18"),
        ("1.0e+300", "must be below 10^18"),
        ("1e999999999", "must be a whole number, such as"),
        ("'-10k'", "must be a whole number, such as"),
        ("-5", "must be greater than 0"),
        ("0k", "must be greater than 0"),
        (".inf", "finite"),
        ("on", "a yes or no"),
    ],
)
def test_what_is_no_count_is_refused(written: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(TINY, [NEITHER_STEPS, f"train.tokens={written}"])
    # Rules that need the number are skipped, so it is the only problem.
    assert len(refused.value.problems) == 1
    assert refused.value.problems[0].startswith("train.tokens = ") and said in refused.value.problems[0]


def test_files_and_the_environment_are_read_alike(tmp_path) -> None:
    path = tmp_path / "counts.yaml"
    text = (
        TINY.read_text()
        .replace("steps: 240 ", "tokens: 20M ")
        .replace("global_batch_size: 32 ", "global_batch_size: 1k ")
    )
    path.write_text(text)
    config = load_config(path, ["checkpoint.interval=1k"], {"GLOBAL_BATCH_SIZE": "2k"})
    assert (config.train.tokens, config.train.global_batch_size, config.checkpoint.interval) == (20 * 10**6, 2000, 1000)


def is_count(parts: Iterable[object]) -> bool:
    """Whether one of these parts of a field's annotation reads counts."""
    return get_args(Count)[1] in parts


def counts(section: type[Section], prefix: str = ""):
    """Dotted names of the fields that are counts, one number each."""
    for name, about in section.model_fields.items():
        inner = section.section_type(name)
        if inner is not None:
            yield from counts(inner, f"{prefix}{name}.")
        elif is_count(about.metadata) or any(
            is_count(get_args(kind)) for kind in (about.annotation, *get_args(about.annotation))
        ):
            yield f"{prefix}{name}"


def test_every_field_that_counts_tokens_samples_or_steps_is_a_count() -> None:
    found = set(counts(Config))
    expected = {
        name
        for name in Config.dotted_names()
        if name.rpartition(".")[2] in ("steps", "tokens", "interval", "start", "global_batch_size", "micro_batch_size")
        or name.endswith(("_steps", "_tokens", "_interval"))
    }
    assert expected <= found, sorted(expected - found)
    assert {"train.tokens", "optimizer.decay_steps", "checkpoint.interval", "telemetry.timeline.start"} <= found
    assert not {"model.seq_length", "model.hidden_size", "parallel.tp", "train.seed"} & found


@given(st.integers(0, LIMIT - 1), st.sampled_from(["", *SUFFIXES]), st.booleans())
def test_any_number_survives_any_way_of_writing_it(number: int, suffix: str, through_yaml: bool) -> None:
    power = len(str(SUFFIXES.get(suffix, 1))) - 1
    whole, part = divmod(number, 10**power)
    text = f"{whole}.{part:0{power}d}{suffix}" if power else f"{whole}"
    given = yaml.safe_load(text) if through_yaml else text
    assert count(given) == number


@given(st.text(string.digits + "._eE+-kKMBTG ", max_size=12))
def test_a_text_is_a_count_or_refused(text: str) -> None:
    try:
        read = count(text)
    except ValueError:
        return
    assert type(read) is int and 0 <= read < LIMIT
    assert count(str(read)) == read
