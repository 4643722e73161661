"""A file of a schedule: read with the configuration, refused where it is not the run's, and gone where sizes change."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.engine.config.bad_configs import config_with
from triaxis.engine.checkpoint.resume_rules import changes
from triaxis.engine.config.load import load_config
from triaxis.engine.config.rules.check import problems
from triaxis.engine.config.tree import Config
from triaxis.engine.config.write import to_yaml
from triaxis.engine.errors import ConfigError, ScheduleError
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.programs import schedule_file_runs
from triaxis.engine.pipeline.text import from_text, to_text

# The legal configuration has 16 samples: 4 microbatches of 2 with dp 2.
SIZES = ("parallel.pp=2", "parallel.dp=2")
HEADER = "schedule=mine pp=2 vpp=1 microbatches=4 forward_only=no\n"
ROWS = ("0F0 0F1 0F2 0B0 0F3 0I1 0W1 0B2 0B3", "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3")

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(*rows: str, header: str = HEADER) -> Path:
        path = tmp_path / "mine.txt"
        path.write_text(header + "".join(f"rank {rank}: {row}\n" for rank, row in enumerate(rows)))
        return path

    return to_file


def with_file(path: Path, *words: str) -> Config:
    return config_with(*SIZES, f"schedule.file={path}", *words)


def found(config: Config) -> str:
    return "\n".join(problems(config, more_rules=[schedule_file_runs]))


def test_the_schedule_of_a_step_is_the_files(write: Write) -> None:
    config = with_file(write(*ROWS))
    assert found(config) == ""
    schedule = schedules.of_step(config, ParallelSizes(pp=2, dp=2))
    assert [" ".join(map(str, row)) for row in schedule.actions] == list(ROWS)
    assert config.schedule.defers_weight_gradients and schedules.title(config).startswith("mine, from ")
    first = schedules.of_config(config, 2, 1, 2)
    assert [" ".join(map(str, row)) for row in first.actions] == ["0F0 0F1 0B0 0I1 0W1", "0F0 0B0 0F1 0B1"]
    with pytest.raises(ScheduleError, match="pp 4"):
        schedules.of_config(config, 4, 1, 4)


def test_the_path_is_what_is_written_and_read_back(write: Write, tmp_path: Path) -> None:
    config = with_file(write(*ROWS))
    copy = tmp_path / "copy.yaml"
    copy.write_text(to_yaml(config))
    assert load_config(copy) == config
    assert config.model_dump(mode="json")["schedule"]["file"] == str(tmp_path / "mine.txt")


def test_another_file_is_a_matter_of_speed_on_resume(write: Write) -> None:
    there = config_with(*SIZES).model_dump(mode="json")
    assert [(one.key, one.verdict) for one in changes(there, with_file(write(*ROWS)))] == [("schedule.file", "layout")]


@pytest.mark.parametrize(
    ("rows", "words", "expected"),
    [
        (ROWS, ("schedule.name=1f1b",), ["schedule.name = 1f1b", "beside schedule.file", "schedule.name = auto"]),
        (ROWS, ("parallel.pp=4",), ["parallel.pp = 4: must be 2", "Nearest legal: parallel.pp = 2"]),
        (ROWS, ("parallel.vpp=2",), ["parallel.vpp = 2: must be 1"]),
        (ROWS, ("train.global_batch_size=32",), ["8 microbatches", "a step of 4", "global_batch_size = 16"]),
        (ROWS, ("recompute.granularity=full",), ["and schedule.file = ", "granularity = selective or none"]),
        (ROWS[:1], (), ["has 1 rows for its pp=2"]),
        ((ROWS[0], ROWS[1].removesuffix(" 0B3")), (), ["rank 1 never runs 0B3"]),
        ((ROWS[0], ROWS[1].replace("0F0 0B0", "0B0 0F0")), (), ["rank 1 runs 0B0 before 0F0"]),
        ((ROWS[0] + " 0W1", ROWS[1]), (), ["after 0W1"]),
        ((ROWS[0] + " 1F0", ROWS[1]), (), ["chunks end at 0"]),
        ((ROWS[0].replace("0F2 0B0", "0B0 0F2"), "0F0 0F1 0F2 0B0 0B1 0B2 0F3 0B3"), (), ["wait"]),
    ],
)
def test_a_file_that_does_not_fit_is_a_problem(
    write: Write, rows: tuple[str, ...], words: tuple[str, ...], expected: list[str]
) -> None:
    text = found(with_file(write(*rows), *words))
    assert all(words in text for words in expected), text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file"),
        ("", "first line of a schedule"),
        (HEADER + "rank 1: 0F0\n", "rows come in the order of ranks"),
        (HEADER + "rank 0: 0F0 0X1 zero\nrank 1:\n", "'0X1' is no action.*'zero' is no action"),
        (HEADER.replace("=no\n", "=no placement=ring\n"), "placement=ring must be loop"),
    ],
)
def test_what_is_no_schedule_is_one_problem_of_the_type(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValidationError, match=expected) as raised:
        with_file(path)
    assert raised.value.error_count() == 1


def test_all_problems_of_a_config_come_with_the_files(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(to_yaml(config_with(*SIZES)))
    with pytest.raises(ConfigError) as raised:
        load_config(config, ["schedule.file=/nowhere/mine.txt", "model.num_layers=0"])
    assert len(raised.value.problems) == 2 and "No such file" in str(raised.value)


def test_forwards_only_are_refused(write: Write) -> None:
    rows = ["0F0 0F1 0F2 0F3"] * 2
    assert "no gradient would be computed" in found(with_file(write(*rows, header=HEADER.replace("=no", "=yes"))))


def test_the_placement_may_be_named() -> None:
    text = to_text(schedules.one_f_one_b(2, 3))
    assert from_text(text.replace("forward_only=no", "forward_only=no placement=loop")) == from_text(text)
