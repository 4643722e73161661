"""README's "change it and see": the lines as they stand there, in a copy of the code, and what `verify` then says."""

import re
import shutil
from pathlib import Path

import pytest

from tests.launch.command_line import TRIAXIS, run

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def with_change(folder: Path, word: str) -> Path:
    """A copy of the code with README's lines, `word` in place of the wrong one."""
    for name in ("engine", "models", "launch", "configs", "triaxis"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    [block] = re.findall(r"^```diff\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    spec, attribute, forward = (line[1:] for line in block.splitlines() if line.startswith("+"))
    specs, mlp = folder / "models" / "specs.py", folder / "models" / "gpt" / "mlp.py"
    assert '"never"' in spec
    head = "    h, up = model.hidden_size, up_name(model)\n"
    specs.write_text(replaced(specs.read_text(), head, f"{spec.replace('never', word)}\n{head}"))
    init = "        super().__init__()\n"
    changed = replaced(mlp.read_text(), init, f"{init}{attribute}\n")
    mlp.write_text(replaced(changed, f"{forward.rpartition(' * ')[0]}\n", f"{forward}\n"))
    return folder


def replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


@pytest.mark.slow
@pytest.mark.parametrize(("word", "exit_code"), [("never", 1), ("sequence", 0)])
def test_the_change_is_named_and_the_right_word_is_equal(word: str, exit_code: int, tmp_path: Path) -> None:
    copy = with_change(tmp_path / "copy", word)
    said = run(tmp_path, *TRIAXIS, "verify", "gpt_tiny", PYTHONPATH=str(copy))
    assert said.exit_code == exit_code, said.err
    if exit_code == 0:
        assert "equal: this layout trains the same model" in said.out
        return
    [shown] = re.findall(r"^```console\n\$ triaxis verify gpt_tiny\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    for number in re.findall(r"0\.\d+", shown):
        assert number in said.out
    assert " ".join(shown.partition("likely cause")[2].split()) in " ".join(said.out.split())
