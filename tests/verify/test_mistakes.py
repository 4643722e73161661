"""The mistakes of docs/extending.md, made in extensions, and what the shipped command says of each."""

import re
from pathlib import Path

import pytest

from tests.documented import ROOT, section
from tests.launch.command_line import TRIAXIS, run
from triaxis.launch.cli import main

MISTAKES = Path(__file__).with_name("mistakes")
CP = ("--layout", "tp=1,pp=1,vpp=1,cp=2,dp=2,sp=false")
SAID: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "first_entries": ((), ("likely cause: tp: layers.0.mlp is the first wrong output", "it vanishes with tp=1")),
    "seed_of_rank": ((), ("likely cause: tp: layers.0.mlp", "ranks with tp 1 are wrong", "it vanishes with tp=1")),
    "no_seed": ((), ("layers.0.mlp is the first wrong output", "one process differs from itself")),
    "own_tokens": (CP, ("likely cause: cp: every hidden state is right and the tokens' losses are not", "   2 ")),
    "of_microbatch": (
        (),
        (
            "every hidden state is right and the tokens' losses are not",
            "what its microbatch holds",
            "ids are below 37 and samples have 8 tokens",
        ),
    ),
    "norm_of_run": (
        ("optimizer.name=extension",),
        ("velocity", "an update that reads more than its own element", "it vanishes with one process"),
    ),
    "drifting": ((), ("master", "layers.0.mlp.sum")),
}


def test_each_mistake_is_on_the_page() -> None:
    rows = section((ROOT / "docs" / "extending.md").read_text(), "## Mistakes that verify names").splitlines()
    examples = [path.parent.name for path in (ROOT / "examples").glob("*/wrong.py")]
    assert sum(row.startswith("| ") for row in rows) - 1 == len(SAID) + len(examples)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_verify_names_a_mistake(name: str, tmp_path: Path) -> None:
    words, wanted = SAID[name]
    found = run(tmp_path, *TRIAXIS, "verify", "gpt_tiny", f"model.extension={MISTAKES / name}.py", *words)
    assert found.exit_code == 1, found.err
    assert all(one in " ".join(found.out.split()) or one in found.out for one in wanted), found.out


@pytest.mark.slow
def test_each_whole_module_on_the_page_is_equal(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    modules = [block for block in blocks if re.match(r"import |from ", block) and "extension = Extension(" in block]
    assert len(modules) == 2
    for number, text in enumerate(modules):
        (tmp_path / f"page_{number}.py").write_text(text)
        words = ["optimizer.name=extension"] if "update=" in text else []
        found = run(tmp_path, *TRIAXIS, "verify", "gpt_tiny", f"model.extension=page_{number}.py", *words)
        assert found.exit_code == 0 and f"page_{number}.py" in found.out, found.out + found.err


@pytest.mark.slow
@pytest.mark.parametrize(("function", "exit_code"), [("reference", 0), ("another", 1)])
def test_a_function_of_whole_tensors_is_an_oracle(function: str, exit_code: int, tmp_path: Path) -> None:
    scaled = ROOT / "examples" / "scaled_mlp" / "scaled_mlp.py"
    oracle = f"{Path(__file__).with_name('plain_reference.py')}:{function}"
    words = (f"model.extension={scaled}", "model.position=none", "--oracle", oracle)
    found = run(tmp_path, *TRIAXIS, "verify", "gpt_tiny", *words)
    assert found.exit_code == exit_code, found.err
    assert found.out.count("equal: this layout trains the same model") == (0 if exit_code else 4)
    assert ("our one process already differs from" in found.out) == bool(exit_code)


@pytest.mark.parametrize(
    ("oracle", "says"),
    [
        ("transformer", "is none of megatron-core, transformers, and no FILE.py:FUNCTION"),
        ("/nowhere.py:reference", "there is no such file"),
        (f"{Path(__file__).with_name('plain_reference.py')}:referenc", "has no function 'referenc'"),
    ],
)
def test_an_oracle_that_is_none_is_refused(oracle: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["verify", "gpt_tiny", "--oracle", oracle, "--dry-run"])
    except SystemExit as left:
        code = left.code
    assert code == 2 and says in " ".join(capsys.readouterr().err.split())
