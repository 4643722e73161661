"""Every fenced bash command of the README, CONTRIBUTING.md and docs/ runs, as it stands there.

A command that would start training, tests or a cluster job runs in its dry form. What no rule below knows fails: a command
that nobody runs is one that nobody notices when it breaks. Relative outputs land in a temporary folder.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]

VARIABLES = r"(?:[A-Z_]+=\S+ )*"
DRY_FORMS = [
    # starts ranks, tests or jobs: the same words with --dry-run
    (re.compile(rf"({VARIABLES}bash (?:launch/pretrain_gpt\.sh|tests/run\.sh)\b.*)"), r"\1 --dry-run"),
    (re.compile(rf"({VARIABLES}triaxis (?:train|traffic)\b.*)"), r"\1 --dry-run"),
    (re.compile(r"sbatch (launch/slurm/\S+\.sbatch.*)"), r"bash \1 --dry-run"),
    (re.compile(r"make (\w+)"), r"make --dry-run \1"),
    # quick and harmless: as it is
    (re.compile(r"(triaxis (?:config|topology|schedule|prepare)\b.*)"), r"\1"),
]


def commands(page: Path) -> Iterator[str]:
    """The commands in ```bash blocks: comments left out, continued lines joined."""
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip()


def dry_form(command: str) -> str:
    for pattern, form in DRY_FORMS:
        if pattern.fullmatch(command):
            return pattern.sub(form, command).replace("--dry-run --dry-run", "--dry-run")
    raise AssertionError(f"no rule says how a test may run {command!r}; add one, or do not fence it as bash")


ALL = [pytest.param(page, command, id=f"{page.name}: {command}") for page in PAGES for command in commands(page)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder that looks like the checkout, where `triaxis` is on the path and what commands write is thrown away."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "docs", "engine", "launch", "models", "tests", "Makefile", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    triaxis = folder / "bin" / "triaxis"
    triaxis.parent.mkdir()
    triaxis.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m launch.cli "$@"\n')
    triaxis.chmod(0o755)
    return folder


@pytest.mark.parametrize(("page", "command"), ALL)
def test_a_documented_command_runs(page, command, workplace):
    environment = os.environ | {
        "PATH": f"{workplace / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TRIAXIS_PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
    }
    shown = subprocess.run(
        ["bash", "-c", dry_form(command)],
        cwd=workplace,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert shown.returncode == 0, f"{command}\n{shown.stdout}\n{shown.stderr}"
    assert shown.stdout.strip(), f"{command} said nothing"


def test_the_readme_opens_with_the_two_commands():
    assert list(commands(ROOT / "README.md"))[:2] == ["bash launch/pretrain_gpt.sh", "bash tests/run.sh"]


def test_paths_that_pages_link_to_exist():
    missing = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not missing


def test_a_command_that_no_rule_knows_is_refused():
    with pytest.raises(AssertionError, match="no rule says"):
        dry_form("rm -r runs")
