"""Secrets of the environment are blotted out of text, of trees, and of whatever Python prints."""

import io
import sys
import traceback
from pathlib import Path

import pytest

from triaxis.engine.checkpoint.resume_rules import changes
from triaxis.engine.config.rules.problem import Subject
from triaxis.engine.config.rules.run import name_problems, places_hold_no_secret
from triaxis.engine.config.schema.telemetry import WandbConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.config.write import to_yaml
from triaxis.engine.errors import OutputError
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.storage.redaction import (
    LEAST_LENGTH,
    REDACTED,
    blotted,
    blotted_streams,
    tree_without_secrets,
    why_secret,
    without_secrets,
)
from triaxis.engine.telemetry.outlets.wandb import _arguments

KEY = "hf_9f8e7d6c5b4a"
VARIABLES = {"HF_TOKEN": KEY}
MINIMAL = {
    "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4, "vocab_size": 8},
    "data": {"synthetic": True},
    "train": {"steps": 1, "global_batch_size": 1},
}


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password", "SSH_PRIVATE_KEY"),
        *("GITHUB_PAT", "OPENAI_KEY", "DB_PASS", "MY_PWD", "SLACK_WEBHOOK_URL", "TOKEN_OF_MINE", "SENTRY_DSN"),
    ],
)
def test_values_of_variables_that_are_named_like_secrets_go(name: str) -> None:
    assert without_secrets(f"/data/{KEY}/x", {name: KEY}) == "/data/[redacted]/x"


@pytest.mark.parametrize("password", ["hunter22long", "p@ss/w:rd99"])
def test_passwords_of_addresses_go_wherever_they_stand(password: str) -> None:
    """A variable with an address of a database or a proxy may have any name."""
    address = f"postgres://user:{password}@host/db"
    for text in (address, f"log in with {password}"):
        assert password not in without_secrets(text, {"DATABASE_URL": address})


def test_a_folder_cannot_have_a_secret_as_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable alone; what is given comes from the environment of the process."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert why_secret("runs/mine") == ""
    (problem,) = name_problems(f"run-{KEY}")
    assert "HF_TOKEN" in str(problem) and KEY not in str(problem)
    fields = {"runtime": {"runs_dir": f"/data/{KEY}"}, "checkpoint": {"dir": f"/data/{KEY}"}}
    problems = list(map(str, places_hold_no_secret(Subject(Config.model_validate({**MINIMAL, **fields}), 1, 1))))
    assert len(problems) == 2 and all("HF_TOKEN" in text and KEY not in text for text in problems)
    assert "the form of a secret" in why_secret("hf_" + "aB3" * 11)


def test_wandb_gets_no_secret_as_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", KEY)
    directory = RunDirectory.create(Config.model_validate(MINIMAL), tmp_path, "mine")
    arguments = _arguments(WandbConfig(project="p", name=KEY, tags=[f"a {KEY}"]), directory)
    directory.close()
    assert (arguments["name"], arguments["tags"]) == (REDACTED, [f"a {REDACTED}"])
    assert arguments["dir"] == str(directory.path)


def test_short_values_and_other_variables_stay() -> None:
    short = "a" * (LEAST_LENGTH - 1)
    text = f"{short} false {KEY}"
    assert (
        without_secrets(text, {"A_TOKEN": short, "B_TOKEN": "", "TOKENIZERS_PARALLELISM": "false", "HOME": KEY}) == text
    )


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "aB3" * 11,
        "ghp_" + "x" * 36,
        "sk-proj-" + "a1" * 20,
        "AKIA" + "Q7" * 8,
        "glpat-" + "a-1" * 7,
        "T000/B000/XXXX",
        "me:pw1",
    ],
)
def test_what_has_the_form_of_a_secret_goes_whatever_its_variable(secret: str) -> None:
    around = {"T": "https://hooks.slack.com/services/{}", "m": "postgres://{}@db/x"}.get(secret[0], "data/{}/x")
    assert without_secrets(around.format(secret), {"HOME": "/root"}) == around.format("[redacted]")


def test_names_and_texts_that_only_look_like_secrets_stay() -> None:
    text = "/data/of/someone sk-learn-corpus-2024-deduplicated https://host:8080/x s3://a/b@c hf_model keyboards"
    names = (
        "PWD",
        "OLDPWD",
        "SSH_AUTH_SOCK",
        "HF_TOKEN_PATH",
        "TOKENIZERS_PARALLELISM",
        "KEYBOARD",
        "COMPASS",
        "XAUTHORITY",
    )
    assert without_secrets(text, dict.fromkeys(names, "/data/of/someone")) == text


def test_a_secret_goes_in_every_form_in_which_it_is_written() -> None:
    odd = 'p"ss\\word/ü 1'
    for text in (
        odd,
        repr(odd),
        f"{[odd]!r}",
        '{"a": "p\\"ss\\\\word/\\u00fc 1"}',
        "https://x/p%22ss%5Cword%2F%C3%BC%201",
    ):
        shown = without_secrets(text, {"MY_SECRET": odd})
        assert "ss" not in shown and "[redacted]" in shown, text


def test_a_tree_keeps_its_numbers() -> None:
    tree = {"a": [1, 2.5, None, True, (KEY, {f"x{KEY}": KEY})]}
    assert tree_without_secrets(tree, VARIABLES) == {
        "a": [1, 2.5, None, True, ["[redacted]", {"x[redacted]": "[redacted]"}]]
    }


def test_what_is_printed_and_a_traceback_pass_the_door(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", KEY)
    with blotted_streams():
        print("to", KEY)
        try:
            raise ValueError(f"https://{KEY}@host")
        except ValueError:
            traceback.print_exc()
        assert sys.stdout.isatty() is False
    said = capsys.readouterr()
    assert said.out == "to [redacted]\n"
    assert KEY not in said.err and "ValueError: https://[redacted]@host" in said.err


def test_a_recorded_configuration_has_no_secret_and_is_still_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", KEY)
    config = Config.model_validate({**MINIMAL, "data": {"synthetic": True, "train": f"/data/{KEY}/corpus"}})
    assert KEY not in to_yaml(config, describe=True) and "/data/[redacted]/corpus" in to_yaml(config, describe=True)
    assert KEY in to_yaml(config), "ranks read this one"
    recorded = tree_without_secrets(config.model_dump(mode="json"))
    assert KEY not in str(recorded)
    assert changes(recorded, config) == [] and changes(config.model_dump(mode="json"), config) == []


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_stream_that_cannot_be_written_is_said_or_of_no_consequence() -> None:
    blotted(Full()).write("x")
    with pytest.raises(OutputError, match="standard output cannot be written: No space left on device"):
        blotted(Full(), "standard output").write("x")


def test_characters_that_a_stream_lacks_are_escaped() -> None:
    raw = io.BytesIO()
    stream = blotted(io.TextIOWrapper(raw, encoding="ascii"))
    stream.write("\udcff ü\n")
    stream.flush()
    assert raw.getvalue() == b"\\udcff \\xfc\n"
