"""Bootstrap in a copy of the scripts, without a network: a toy project whose one dependency is a wheel in a folder."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launch.bootstrap import BootstrapError, Checkout, choose, missing_requirements

ROOT = Path(__file__).resolve().parents[2]

PYPROJECT = """\
[build-system]
requires = []
build-backend = "toy_backend"
backend-path = ["."]

[project]
name = "toy"
version = "1.0"
dependencies = ["triaxis-toy-engine>=1.0,<2.0"]

[project.optional-dependencies]
dev = ["triaxis-toy-tests>=1.0"]
"""

BACKEND = """\
import zipfile

METADATA = '''Metadata-Version: 2.1
Name: toy
Version: 1.0
Requires-Dist: triaxis-toy-engine>=1.0,<2.0
Provides-Extra: dev
Requires-Dist: triaxis-toy-tests>=1.0; extra == "dev"
'''


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{wheel_directory}/{name}", "w") as wheel:
        wheel.writestr("toy-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("toy-1.0.dist-info/RECORD", "")
    return name
"""


def write_wheel(folder: Path, name: str, version: str) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name.replace('-', '_')}.py", "")
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A toy project with this repository's bootstrap; tests of this file use it one after another."""
    root = tmp_path_factory.mktemp("a checkout")  # with a space, as in real life
    (root / "launch").mkdir()
    for name in ("bootstrap.py", "bootstrap.sh"):
        shutil.copy(ROOT / "launch" / name, root / "launch" / name)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "toy_backend.py").write_text(BACKEND)
    write_wheel(root / "wheels", "triaxis-toy-engine", "1.5")
    write_wheel(root / "wheels", "triaxis-toy-tests", "1.0")
    return Checkout(root)


def start(checkout: Checkout, *extras: str, **variables: str) -> subprocess.Popen[str]:
    ours = ("SLURM_", "TRIAXIS_", "TORCHELASTIC_", "PIP_", "RANK")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": (checkout.root / "wheels").as_uri(), "PIP_NO_CACHE_DIR": "1"}
    command = ["bash", str(checkout.root / "launch" / "bootstrap.sh"), *extras]
    return subprocess.Popen(
        command, env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out.strip(), err


def versions(python: Path) -> dict[str, str]:
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True
    ).stdout
    return {row["name"]: row["version"] for row in json.loads(listed)}


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"SLURM_JOB_ID": "7"}, "inside a SLURM job"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "under torchrun"),
        ({"RANK": "0"}, "under torchrun"),
        ({"TRIAXIS_BOOTSTRAP": "0"}, "TRIAXIS_BOOTSTRAP=0"),
    ],
)
def test_nothing_is_installed_where_it_may_not_be(checkout, variables, reason):
    exit_code, out, err = finish(start(checkout, "dev", **variables))
    assert (exit_code, out) == (2, "")
    assert reason in err
    assert "lacks triaxis-toy-engine<2.0,>=1.0" in err
    assert f"bash {checkout.root}/launch/bootstrap.sh dev" in err
    assert not checkout.venv.exists()


def test_a_python_that_was_given_is_never_changed(checkout):
    exit_code, out, err = finish(start(checkout, TRIAXIS_PYTHON=sys.executable))
    assert (exit_code, out) == (2, "")
    assert f"TRIAXIS_PYTHON={sys.executable} lacks triaxis-toy-engine" in err
    assert f"{sys.executable} -m pip install -e" in err
    assert not checkout.venv.exists()


def test_a_python_that_was_given_and_is_none_is_named(checkout):
    exit_code, _, err = finish(start(checkout, TRIAXIS_PYTHON="/nowhere/python"))
    assert exit_code == 2
    assert "/nowhere/python cannot be started" in err


@pytest.mark.distributed
def test_made_once_used_at_once_extended_and_finished(checkout):
    # Two starts on a bare machine: one makes it, the other waits, both get it.
    outcomes = [finish(process) for process in [start(checkout), start(checkout)]]
    assert [(exit_code, out) for exit_code, out, _ in outcomes] == [(0, str(checkout.python))] * 2, outcomes
    said = sorted((err for _, _, err in outcomes), key=len)
    assert "waiting for it" in said[0]
    assert "installing" not in said[0]
    assert f"making {checkout.venv}" in said[1]
    assert versions(checkout.python)["triaxis-toy-engine"] == "1.5"
    assert "triaxis-toy-tests" not in versions(checkout.python)

    # Complete: nothing is said, also where nothing may be installed.
    assert finish(start(checkout, SLURM_JOB_ID="7")) == (0, str(checkout.python), "")

    # It lacks the tests' packages: they are added to it.
    exit_code, out, err = finish(start(checkout, "dev"))
    assert (exit_code, out) == (0, str(checkout.python)), err
    assert "making" not in err
    assert versions(checkout.python)["triaxis-toy-tests"] == "1.0"

    # pip was interrupted, with a dependency half gone.
    checkout.installed.unlink()
    uninstall = [
        checkout.python,
        "-m",
        "pip",
        "uninstall",
        "-q",
        "-y",
        "triaxis-toy-engine",
        "--root-user-action=ignore",
    ]
    subprocess.run(uninstall, check=True)
    exit_code, out, err = finish(start(checkout))
    assert (exit_code, out) == (0, str(checkout.python)), err
    assert versions(checkout.python)["triaxis-toy-engine"] == "1.5"

    # pyproject.toml moved on: the marker is there, the version is not.
    checkout.pyproject.write_text(PYPROJECT.replace(">=1.0,<2.0", ">=9.0"))
    (checkout.root / "toy_backend.py").write_text(BACKEND.replace(">=1.0,<2.0", ">=9.0"))
    exit_code, out, err = finish(start(checkout))
    assert (exit_code, out) == (2, "")
    assert "pip could not install" in err
    assert not checkout.installed.exists()


def test_what_is_missing_is_read_from_pyproject(tmp_path):
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text('[project]\ndependencies = ["pytest>=1", "pytest>=999", "no-such-thing"]\n')
    missing = missing_requirements(pyproject, [])
    assert list(missing) == ["pytest", "no-such-thing"]
    assert missing["pytest"] == f"pytest>=999 (found {pytest.__version__})"
    assert missing["no-such-thing"] == "no-such-thing"


def test_the_tests_run_in_a_complete_environment():
    assert missing_requirements(ROOT / "pyproject.toml", ["dev"]) == {}


def test_a_missing_ensurepip_gives_the_apt_line(checkout, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    shutil.rmtree(checkout.venv, ignore_errors=True)
    with pytest.raises(BootstrapError, match="apt-get install python3-venv"):
        choose(checkout, [], {})
    assert not checkout.venv.exists()


@pytest.mark.slow  # a second environment
@pytest.mark.distributed
def test_a_torch_that_is_there_is_kept(checkout, tmp_path, monkeypatch):
    """The container's own build, seen from a virtual environment that has it: shared, and pinned for pip."""
    packages = tmp_path / "packages"
    information = packages / "torch-2.10.0a0+container.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0a0+container\n")
    monkeypatch.syspath_prepend(str(packages))
    requirement = '"torch>=2.9,<2.14", "triaxis-toy-engine'
    checkout.pyproject.write_text(PYPROJECT.replace('"triaxis-toy-engine', requirement))
    (checkout.root / "toy_backend.py").write_text(
        BACKEND.replace(
            "Requires-Dist: triaxis-toy-engine", "Requires-Dist: torch>=2.9,<2.14\nRequires-Dist: triaxis-toy-engine"
        )
    )
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", (checkout.root / "wheels").as_uri())):
        monkeypatch.setenv(name, value)
    shutil.rmtree(checkout.venv, ignore_errors=True)
    assert list(missing_requirements(checkout.pyproject, [])) == ["triaxis-toy-engine"]
    specification = importlib.util.spec_from_file_location("toy_bootstrap", checkout.root / "launch" / "bootstrap.py")
    assert specification is not None
    assert specification.loader is not None
    copy = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "toy_bootstrap", copy)
    specification.loader.exec_module(copy)
    python = copy.choose(checkout, [], {})
    assert python == copy.choose(checkout, [], {"SLURM_JOB_ID": "7"}) == str(checkout.python)
    assert versions(Path(python))["torch"] == "2.10.0a0+container"
    assert not list(checkout.venv.glob("lib/*/site-packages/torch-*"))
