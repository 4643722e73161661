"""Modules of the folder where a command is typed never run in place of ours, of torch or of the standard library; nor ours in
place of the user's own.
"""

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.launch.command_line import PRETRAIN, ROOT, Ended, run
from triaxis.launch.start.import_path import import_variables

HOSTILE = (
    "launch.py",
    "engine/__init__.py",
    "models/__init__.py",
    "torch.py",
    "yaml.py",
    "json.py",
    "multiprocessing.py",
)
TINY = (
    *("parallel.tp=1", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=2", "parallel.sequence_parallel=false"),
    *("model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2", "model.ffn_hidden_size=16"),
    *("model.seq_length=16", "data.synthetic=true", "train.steps=2", "train.global_batch_size=2"),
    *("train.micro_batch_size=1", "eval.interval=null", "optimizer.warmup_steps=1", "checkpoint.interval=null"),
)
CONFIG = str(ROOT / "configs" / "gpt_tiny.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of hostile modules; each writes its name into a file when it is imported, and then fails."""
    folder = tmp_path / "here"
    for name in HOSTILE:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r} + ' ')\nraise SystemExit(99)\n")
    return folder


OWN = ("engine", "models", "launch", "tests", "configs")
"""Names of folders of ours that a user's packages may have as well."""

NOTES = """
import os, engine, models, launch, tests, configs
if "RANK" in os.environ:
    owners = {package.OWNER for package in (engine, models, launch, tests, configs)}
    print(os.environ["RANK"], *owners, file=open(os.environ["NOTES"], "a"))
"""
"""The start of every Python process of a user: it imports packages of the user's own, and each rank notes whose they are."""


@pytest.fixture
def own_packages(tmp_path: Path) -> Path:
    """A folder of a user's packages, for PYTHONPATH."""
    folder = tmp_path / "own"
    for name in OWN:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("OWNER = 'user'\n")
    (folder / "sitecustomize.py").write_text(NOTES)
    return folder


@pytest.fixture
def triaxis(tmp_path: Path) -> tuple[str, str]:
    """The `triaxis` command as pip writes it: a script in another folder."""
    script = tmp_path / "bin" / "triaxis"
    script.parent.mkdir()
    script.write_text(
        "import sys\nfrom triaxis.launch.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    return sys.executable, str(script)


def assert_only_ours(folder: Path, said: Ended) -> None:
    imported = folder.parent / "imported"
    assert not imported.exists(), imported.read_text()
    assert said.exit_code == 0, said.err


@pytest.mark.distributed
def test_a_run_imports_nothing_from_there_and_leaves_the_users_own_packages_theirs(
    folder: Path, triaxis: tuple[str, str], own_packages: Path
) -> None:
    notes = folder.parent / "notes"
    path = os.pathsep.join([str(own_packages), str(ROOT)])
    said = run(folder, *triaxis, "train", CONFIG, *TINY, PYTHONPATH=path, NOTES=str(notes))
    assert_only_ours(folder, said)
    assert list(folder.glob("runs/*/finished"))
    assert {"0 user", "1 user"} == set(notes.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_of_the_script_imports_nothing_from_there(folder: Path) -> None:
    assert_only_ours(folder, run(folder, *PRETRAIN, CONFIG, *TINY))
    assert list(folder.glob("runs/*/finished"))


def test_the_script_imports_nothing_from_there(folder: Path) -> None:
    said = run(folder, *PRETRAIN, CONFIG, "--dry-run", PYTHONPATH="")
    assert_only_ours(folder, said)
    assert f"PYTHONSAFEPATH=1 PYTHONPATH={ROOT} " in said.out, "the line that is shown can be typed there"


def test_checks_and_workers_import_nothing_from_there(folder: Path, triaxis: tuple[str, str]) -> None:
    assert_only_ours(folder, run(folder, *triaxis, "config", "check", CONFIG))
    (folder / "text.txt").write_text("some text\n" * 10)
    words = ("prepare", "--input", "text.txt", "--output", "corpus", "--tokenizer", "bytes", "--workers", "2")
    assert_only_ours(folder, run(folder, *triaxis, *words, within_seconds=60.0))
    assert (folder / "corpus.bin").exists()


def test_the_users_own_path_comes_before_the_checkout_and_another_triaxis_after_it(tmp_path: Path) -> None:
    assert import_variables({}) == {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT)}
    own = os.pathsep.join(["/mine", "/yours"])
    with_root = f"{own}{os.pathsep}{ROOT}"
    for given in (own, with_root, f"{ROOT}{os.pathsep}{own}"):
        assert import_variables({"PYTHONPATH": given})["PYTHONPATH"] == with_root
    (tmp_path / "triaxis").mkdir()
    given = os.pathsep.join(["/mine", str(tmp_path), "/yours"])
    assert import_variables({"PYTHONPATH": given})["PYTHONPATH"].split(os.pathsep)[:3] == [
        "/mine",
        str(ROOT),
        str(tmp_path),
    ]
    # Here, packages that bear the name of a module of the standard library would come before it.
    installed = Path(sysconfig.get_path("purelib"))
    assert import_variables({"PYTHONPATH": own}, installed) == {"PYTHONSAFEPATH": "1"}
