"""Every fenced bash command of the README, CONTRIBUTING.md and docs/ runs, as it stands there.

A command that would start training, tests or a cluster job runs in its dry form; each form runs once. What no rule below knows
fails: a command that nobody runs is one that nobody notices when it breaks. Relative outputs land in a temporary folder. Scripts
run in bash, and `triaxis` in this process: also in place of `launch/pretrain_gpt.sh`, which hands its words on to it, as
`tests/launch/runs/test_pretrain_script.py` shows.
"""

import os
import re
import shlex
import subprocess

import pytest

from tests.documented import PAGES, ROOT, commands, make_workplace, section
from tests.launch.command_line import OTHER_LAUNCHERS, OTHER_RUNS
from triaxis.engine.config.counts import SUFFIXES, count
from triaxis.engine.config.load import ENVIRONMENT
from triaxis.launch import cli

AS_WRITTEN = ROOT / "docs" / "checkpoints.md", "## The commands"
"""A page and its part that `tests/launch/runs/test_checkpoints_page.py` runs for real, from the first command to the last."""

CODE = ("engine", "models", "launch", "tests", "benchmarks", "examples")
EXAMPLES = {"engine/telemetry/outlets/mlflow.py"}
"""Files that a page tells the reader to write."""

VARIABLES = r"(?:[A-Z_]+=\S+ )*"
DRY_FORMS = [
    # starts ranks, tests or jobs: the same words with --dry-run
    (re.compile(rf"({VARIABLES})bash launch/pretrain_gpt\.sh\b(.*)"), r"\1triaxis train\2 --dry-run"),
    (re.compile(r"(bash tests/run\.sh\b.*)"), r"\1 --dry-run"),
    (re.compile(r"(triaxis footprint\b.* --measured\b.*)"), r"\1 --dry-run"),
    (re.compile(rf"({VARIABLES}triaxis (?:train|bench|verify|doctor)\b.*)"), r"\1 --dry-run"),
    (re.compile(r"(?:sbatch|bash) (launch/slurm/\S+\.sbatch.*)"), r"bash \1 --dry-run"),
    (re.compile(r"make (\w+)"), r"make --dry-run \1"),
    # needs a run; tests/launch/report/test_report.py makes some
    (re.compile(r"(triaxis report)\b.*"), r"\1 --help"),
    (re.compile(r"(triaxis data (?:which|repeats))\b.*"), r"\1 --help"),
    # quick and harmless: as it is
    (re.compile(r"(bash launch/bootstrap\.sh\b.*)"), r"\1"),
    (re.compile(r"(triaxis (?:config|topology|schedule|plan|prepare|data|footprint)\b.*)"), r"\1"),
]


def dry_form(command: str) -> str:
    for pattern, form in DRY_FORMS:
        if pattern.fullmatch(command):
            return pattern.sub(form, command).replace("--dry-run --dry-run", "--dry-run")
    raise AssertionError(f"no rule says how a test may run {command!r}; add one, or do not fence it as bash")


def texts():
    """(page, text) without what runs as written."""
    for page in PAGES:
        text, (as_written, heading) = page.read_text(), AS_WRITTEN
        yield page, text.replace(section(text, heading), "") if page == as_written else text


SLOW = {
    "triaxis verify --matrix",
    "triaxis plan configs/llama3_8b.yaml --gpus 64xH100 --tokens 15T --output plan.html",
}
"""Commands that compute for ten seconds and more; shorter ones of the same kind run in CI."""

ONCE = {dry_form(line): (page, line) for page, text in texts() for line in commands(text)}
ALL = [
    pytest.param(line, form, id=f"{page.name}: {line}", marks=[pytest.mark.slow] if line in SLOW else [])
    for form, (page, line) in ONCE.items()
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    return folder, make_workplace(folder)


@pytest.mark.distributed
@pytest.mark.parametrize(("command", "form"), ALL)
def test_a_documented_command_runs(command, form, workplace, capfd, monkeypatch):
    folder, environment = workplace
    words = shlex.split(form)
    start = words.index("triaxis") if "triaxis" in words else None
    if start is not None:
        for name in list(os.environ):
            if name.startswith(OTHER_LAUNCHERS) or name in OTHER_RUNS:
                monkeypatch.delenv(name)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        for word in words[:start]:
            monkeypatch.setenv(*word.split("=", 1))
        monkeypatch.chdir(folder)
        exit_code = run_here(words[start + 1 :])
    else:
        exit_code = subprocess.run(["bash", "-c", form], cwd=folder, env=environment, timeout=120).returncode
    out, err = capfd.readouterr()
    assert exit_code == 0, f"{command}\n{out}\n{err}"
    assert out.strip(), f"{command} said nothing"


def run_here(words):
    """`triaxis` in this process; an exit code. Help, and words that argparse refuses, end with an exception."""
    try:
        return cli.main(words)
    except SystemExit as left:
        return left.code


def test_slow_commands_are_documented():
    assert {line for _, text in texts() for line in commands(text)} >= SLOW


def test_the_readme_opens_with_the_two_commands():
    assert list(commands((ROOT / "README.md").read_text()))[:2] == ["bash launch/pretrain_gpt.sh", "bash tests/run.sh"]


def test_every_page_has_a_place_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    assert not [
        page.name
        for page in (ROOT / "docs").glob("*.md")
        if page.name != "README.md" and f"]({page.name})" not in index
    ]


def test_the_training_page_says_what_wins_over_what():
    text = section((ROOT / "docs" / "training.md").read_text(), "## Configs, fields and variables")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert any("the first word of every command" in row and "`--config FILE`" in row for row in rows)
    assert any("`section.key=value`" in row and "before or after any option" in row for row in rows)
    assert all(any(f"`{name}`" in row for row in rows) for name in ENVIRONMENT)
    written = re.findall(r"`([0-9][0-9e]*[kMBT]?)`", text)
    assert {one[-1] for one in written if one[-1].isalpha()} == set(SUFFIXES) - {"K"}
    assert [count(one) for one in written] == [8 * 10**12, 20 * 10**9, 500 * 10**6, 10_000, 8 * 10**12]


def test_paths_that_pages_link_to_exist():
    missing = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not missing


def test_files_that_pages_name_exist():
    """A page may leave out the first folders: `saved_tensors.py`, `checkpoint/resume_rules.py`."""
    files = [f"/{path.relative_to(ROOT)}" for top in CODE for path in (ROOT / top).rglob("*.py")]
    missing = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in re.findall(r"`([\w/]+/\w+\.py)`", page.read_text())
        if name not in EXAMPLES and not any(path.endswith(f"/{name}") for path in files)
    ]
    assert not missing


def test_a_command_that_no_rule_knows_is_refused():
    with pytest.raises(AssertionError, match="no rule says"):
        dry_form("rm -r runs")
