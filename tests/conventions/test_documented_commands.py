"""Every fenced command of the README, CONTRIBUTING.md and docs/ runs, as it stands there, and prints what the page shows.

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

from tests.documented import (
    LINKING_PAGES,
    PAGES,
    ROOT,
    anchors,
    commands,
    make_workplace,
    section,
    shown_outputs,
)
from tests.launch.command_line import OTHER_LAUNCHERS, OTHER_RUNS
from triaxis.engine.config.load import ENVIRONMENT
from triaxis.engine.config.values.counts import SUFFIXES, count
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


QUICK = re.compile(r"triaxis (?:config|topology|schedule|plan|footprint|prepare|data|new)\b|triaxis train .*--dry-run")
"""Commands whose shown output is compared in CI; the others start ranks, and belong to the whole run."""

SHOWN_ONCE = {one: page for page in PAGES for one in shown_outputs(page.read_text())}
SHOWN = [
    pytest.param(command, shown, id=f"{page.name}: {command}", marks=[] if QUICK.match(command) else [pytest.mark.slow])
    for (command, shown), page in SHOWN_ONCE.items()
]


def flat(text):
    return " ".join(text.split())


@pytest.mark.distributed
@pytest.mark.parametrize(("command", "shown"), SHOWN)
def test_a_command_prints_what_the_page_shows(command, shown, workplace, monkeypatch):
    folder, environment = workplace
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, timeout=300, check=False, capture_output=True, text=True
    )
    out = flat(done.stdout + done.stderr)
    missing = [line for line in shown.splitlines() if flat(line) not in out]
    assert not missing, f"{command}\n{done.stdout}\n{done.stderr}"


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


def test_the_readme_links_to_every_page():
    index = (ROOT / "README.md").read_text()
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f"](docs/{page.name}" not in index]


GENERATED = ("config.md", "afternoon.md")


def test_the_docs_stay_short():
    """Raise neither: take out what nobody needs, or what a command prints."""
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED and ".zh" not in page.name]
    pages.append(ROOT / "benchmarks" / "README.md")
    assert len(pages) <= 16
    assert sum(len(page.read_text().split()) for page in pages) <= 26_000


def test_the_training_page_says_what_wins_over_what():
    text = section((ROOT / "docs" / "training.md").read_text(), "## Configs, fields and variables")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert any("the first word of every command" in row and "`--config FILE`" in row for row in rows)
    assert any("`section.key=value`" in row and "before or after any option" in row for row in rows)
    assert all(any(f"`{name}`" in row for row in rows) for name in ENVIRONMENT)
    written = re.findall(r"`([0-9][0-9e]*[kMBT]?)`", text)
    assert {one[-1] for one in written if one[-1].isalpha()} == set(SUFFIXES) - {"K"}
    assert [count(one) for one in written] == [8 * 10**12, 20 * 10**9, 500 * 10**6, 10_000, 8 * 10**12]


def test_paths_and_anchors_that_pages_link_to_exist():
    missing = []
    for page in LINKING_PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                missing.append(f"{page.name}: {link}")
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
