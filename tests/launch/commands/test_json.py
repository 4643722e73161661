"""`--json` of every command that has a result: standard output is JSON and nothing else, the text is on standard error."""

import json
import shlex
import webbrowser
from pathlib import Path

import pytest

from triaxis.launch.cli import COMMANDS, command_module, command_parser, main

WITHOUT = ("train", "completion")
"""A run's results are files, and a completion is a script."""


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - set(WITHOUT)))
def test_every_command_with_a_result_has_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = command_parser(command_module(name))
    for verb in parser.verbs or ("",):
        with pytest.raises(SystemExit):
            parser.parse([*([verb] if verb else []), "--help"])
        assert " --json " in capsys.readouterr().out, f"{name} {verb}"


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("topology --tp 2 --pp 2", {"layout", "ranks", "groups"}),
        ("schedule print --pp 2 --microbatches 2", {"name", "pp", "vpp", "microbatches", "actions"}),
        ("schedule times --pp 2 --microbatches 2", {"name", "pp", "vpp", "microbatches", "unit", "span", "ranks"}),
        ("config print gpt_tiny", {"model", "data", "train", "eval", "phases"}),
        ("config check gpt_tiny", {"config", "phases"}),
        ("plan gpt_125m --gpus 2xH100 --top 2", {"gpus", "device", "legal", "layouts"}),
        ("new --size 20M --gpus 2x80GB", {"model", "train", "parallel"}),
    ],
)
def test_standard_output_is_json_alone(words: str, keys: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*shlex.split(words), "--json"]) == 0
    said = capsys.readouterr()
    tree = json.loads(said.out)
    assert keys <= tree.keys()
    assert said.err, "the text is there too"


def test_a_table_is_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "params", "gpt_tiny", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0].keys() == {"parameter", "shape", "lr x", "decay", "group"}
    assert main(["schedule", "check", "--pp", "2", "--microbatches", "4", "--json"]) == 0
    [facts] = json.loads(capsys.readouterr().out)
    assert facts["most_in_flight"] == [2, 1]


def test_a_picture_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(opened.append(address)) or len(opened) < 2)
    words = ["topology", "--tp", "2", "--output", str(tmp_path / "layout.svg"), "--open"]
    assert main(words) == 0
    assert opened == [(tmp_path / "layout.svg").as_uri()]
    assert main(words) == 2, "no browser"
    assert "layout.svg is written, but this machine has no browser" in capsys.readouterr().err
    assert main(["topology", "--tp", "2", "--open"]) == 2
    assert "--open without a picture" in capsys.readouterr().err
