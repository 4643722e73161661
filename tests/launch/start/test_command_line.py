"""Words of a command line: config, overrides and options in any order, the same for every command; strays are refused."""

import itertools
import os
import re
from pathlib import Path

import pytest

from tests.launch.command_line import ROOT
from triaxis.engine.errors import ConfigError
from triaxis.launch import cli
from triaxis.launch.commands.footprint import read_config
from triaxis.launch.start.command_line import CHECKPOINT, CONFIG, CommandParser, add_world_size

TINY = str(ROOT / "configs" / "gpt_tiny.yaml")


def example(required: bool = True) -> CommandParser:
    parser = CommandParser(prog="triaxis example")
    parser.takes(CONFIG, "the run", required=required)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--rank", type=int, action="append")
    add_world_size(parser, "ranks")
    return parser


def test_words_and_options_stand_in_any_order() -> None:
    parts = ([TINY], ["--full"], ["parallel.tp=2"], ["--gpus", "8"], ["train.steps=3"])
    for order in itertools.permutations(parts):
        words = list(itertools.chain(*order))
        parsed = example().parse(words)
        assert (parsed.config, parsed.full, parsed.world_size) == (Path(TINY), True, 8), words
        assert parsed.overrides == [word for word in words if "=" in word]


def test_a_config_may_be_named_by_its_option() -> None:
    assert example().parse(["train.steps=3", "--config", TINY]).config == Path(TINY)
    assert example().parse([TINY, "--config", TINY]).config == Path(TINY)
    with pytest.raises(ConfigError, match="only one config can be given"):
        example().parse([TINY, "--config", "other.yaml"])
    with pytest.raises(ConfigError, match="only one config can be given"):
        example().parse([TINY, "other.yaml"])


def test_a_config_is_needed_or_not() -> None:
    assert example(required=False).parse(["--full"]).config is None
    with pytest.raises(ConfigError, match=r"triaxis example configs/gpt_tiny\.yaml"):
        example().parse(["--full"])


def test_a_path_with_an_equals_sign_is_a_config_where_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "tp=2.yaml"
    assert example(required=False).parse([str(path)]).overrides == [str(path)]
    path.write_text(Path(TINY).read_text())
    assert example().parse([str(path)]).config == path


@pytest.mark.parametrize(
    ("words", "expected", "hint"),
    [
        (["full"], "'full' is not an existing config, an override", "Did you mean --full?"),
        (["gpu", "8"], "'8' is not an existing config", "Did you mean --gpus?"),
        (["gpt_tiney"], "'gpt_tiney' is not an existing config", "Did you mean gpt_tiny"),
    ],
)
def test_a_stray_word_gets_what_was_expected_and_the_nearest(
    words: list[str], expected: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as refused:
        example().parse(words)
    assert expected in str(refused.value) and hint in str(refused.value)
    assert len(refused.value.problems) == len(words)


@pytest.mark.parametrize(
    ("option", "meant"), [("--ful", "--full"), ("--gpu", "--gpus"), ("--worldsize=8", "--world-size")]
)
def test_a_misspelled_option_gets_the_nearest(option: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        example().parse([TINY, option])
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert f"unknown option {option}. Did you mean {meant}?" in err and err.startswith("usage: triaxis example")


def test_a_checkpoint_is_a_folder(tmp_path: Path) -> None:
    parser = CommandParser(prog="triaxis example")
    parser.takes(CHECKPOINT, "what to read")
    parsed = parser.parse(["precision.dtype=fp32", str(tmp_path)])
    assert (parsed.checkpoint, parsed.overrides) == (tmp_path, ["precision.dtype=fp32"])
    assert not hasattr(parsed, "config")


STARTS_NOTHING = {
    "train": ["--dry-run"],
    "footprint": ["--measured", "--dry-run"],
    "verify": ["--dry-run"],
    "doctor": ["--dry-run"],
    "topology": [],
    "config check": [],
    "config print": [],
    "schedule check": [],
    "schedule print": [],
}


@pytest.mark.parametrize("form", ["first", "last", "option"])
@pytest.mark.parametrize("command", STARTS_NOTHING)
def test_every_command_takes_the_config_alike(
    command: str, form: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    override, options = "parallel.dp=1", STARTS_NOTHING[command]
    words = {
        "first": [TINY, *options, override],
        "last": [override, *options, TINY],
        "option": [*options, override, "--config", TINY],
    }[form]
    assert cli.main([*command.split(), *words]) == 0
    out = capfd.readouterr().out
    # With dp = 1 instead of the file's 2 a pipeline has 8 microbatches.
    assert any(sign in out for sign in ("dp=1", "dp 1", "dp: 1", "microbatches=8")), out


def test_the_ranks_fill_in_an_open_dp(capsys: pytest.CaptureFixture[str]) -> None:
    words = [TINY, "parallel.dp=null", "--gpus", "16"]
    for command in ("topology", "config check", "schedule check"):
        assert cli.main([*command.split(), *words]) == 0
        out = capsys.readouterr().out
        assert any(sign in out for sign in ("dp 4", "dp=4")), out
    footprint = cli.command_parser(cli.command_module("footprint"))
    assert read_config(footprint.parse(words)).parallel.dp == 4
    assert read_config(footprint.parse([*words, "--layout", "tp=2"])).parallel.dp == 8
    assert read_config(footprint.parse([TINY, "--layout", "tp=2"])).parallel.dp == 1
    with pytest.raises(ConfigError, match="Give the ranks, --gpus N"):
        read_config(footprint.parse([TINY, "parallel.dp=null"]))


@pytest.mark.parametrize("command", ["topology", "config check", "schedule check", "footprint"])
def test_no_ranks_are_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command.split(), TINY, "--gpus", "0"]) == 2
    assert "--gpus 0: must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["schedule", "check", "--pp", "100000000", "--microbatches", "100000000"],
            "at most 2,097,152 can be looked at",
        ),
        (["schedule", "print", "--pp", "4", "--vpp", "1000000000", "--microbatches", "4"], "--vpp 1000000000"),
        (["schedule", "check", "--pp", "1", "--microbatches", "1" + "0" * 400], "an integer of 1,329 bits"),
        (["config", "check", TINY, "--gpus", "100000000000"], "--gpus 100000000000: must be at most 1,048,576"),
        (["topology", "--tp", "8", "--pp", "1000000000"], "at most 1,048,576 are planned"),
        (
            ["prepare", "--stdlib", "--output", "never", "--workers", "1000000000"],
            "--workers 1000000000: at most 1,024",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_absurd_counts_are_refused_at_once(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_a_long_override_is_no_path(tmp_path: Path) -> None:
    """The file system is not asked about a word that gives a field a value, and survives a word that no file can have."""
    long = "data.train=[" + ", ".join(f"/data/{'c' * 200}{number}" for number in range(30)) + "]"
    assert example().parse([TINY, long]).overrides == [long]
    for word in ("x" * 5000, "a\0b"):
        with pytest.raises(ConfigError, match="is not an existing config"):
            example().parse([TINY, word])


@pytest.mark.parametrize(
    "words",
    [
        ["report", "s3://bucket/x"],
        ["verify", "s3://bucket/x"],
        ["evaluate", "s3://bucket/x", "--text", "x"],
        ["footprint", TINY, "--output", "s3://bucket/x"],
        ["plan", TINY, "--cluster", "s3://bucket/x"],
        ["new", "--from", "s3://bucket/x"],
    ],
)
def test_an_address_is_no_path(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert re.search(r"s3://bucket/x: Nothing is read from other machines, or written to them", capsys.readouterr().err)


def test_a_file_is_written_where_it_can_be(tmp_path: Path) -> None:
    """A device or FIFO would be replaced by the file, and a missing folder would be found after the work."""
    fifo, parser = tmp_path / "fifo", cli.command_parser(cli.command_module("footprint"))
    os.mkfifo(fifo)
    for path, said in (
        (fifo, "is a FIFO, and a file would take its place"),
        (Path("/dev/stdout"), "and a file would take its place"),
        (tmp_path / "none" / "x.json", "there is no folder"),
        (tmp_path / ("x" * 300), "A path has at most"),
    ):
        with pytest.raises(ConfigError, match=said):
            parser.parse([TINY, "--output", str(path)])
    assert parser.parse([TINY, "--output", str(tmp_path / "x.json")]).output == tmp_path / "x.json"
