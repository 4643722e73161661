"""Bootstrap in a copy of the scripts, without a network: a toy project whose one dependency is a wheel in a folder."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.lacking import is_strict
from triaxis.engine.device.nvidia_driver import Driver
from triaxis.launch.start import bootstrap
from triaxis.launch.start.bootstrap import (
    TORCH_OF_CUDA,
    BootstrapError,
    Checkout,
    choose,
    missing_requirements,
    torch_for,
    torch_requirement,
)

ROOT = Path(__file__).resolve().parents[3]

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
    for folder in ("launch/start", "engine/device", "engine/storage", "triaxis"):
        (root / folder).mkdir(parents=True)
    (root / "triaxis" / "engine").symlink_to("../engine")
    modules = (
        "triaxis/__init__.py",
        "engine/__init__.py",
        "engine/errors.py",
        "engine/device/__init__.py",
        "engine/device/nvidia_driver.py",
        "engine/storage/__init__.py",
        "engine/storage/files.py",
    )
    for name in ("launch/bootstrap.sh", "launch/start/bootstrap.py", *modules):
        shutil.copy(ROOT / name, root / name)
    (root / "launch" / "constraints.txt").write_text("# tested\ntriaxis-toy-engine==1.5\ntriaxis-toy-tests==1.0\n")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "toy_backend.py").write_text(BACKEND)
    for version in ("1.5", "1.6"):
        write_wheel(root / "wheels", "triaxis-toy-engine", version)
    write_wheel(root / "wheels", "triaxis-toy-tests", "1.0")
    return Checkout(root)


def environment_of(checkout: Checkout) -> dict[str, str]:
    ours = ("SLURM_", "TRIAXIS_", "TORCHELASTIC_", "PIP_", "PYTHONPATH", "RANK")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return environment | {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": (checkout.root / "wheels").as_uri(),
        "PIP_NO_CACHE_DIR": "1",
    }


def start(checkout: Checkout, *extras: str, **variables: str) -> subprocess.Popen[str]:
    command = ["bash", str(checkout.root / "launch" / "bootstrap.sh"), *extras]
    environment = environment_of(checkout) | variables
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out.strip(), err


LIST = "import importlib.metadata as m, json; print(json.dumps({one.name: one.version for one in m.distributions()}))"


def versions(python: Path) -> dict[str, str]:
    return json.loads(subprocess.run([python, "-c", LIST], capture_output=True, text=True, check=True).stdout)


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
    assert f"bash '{checkout.root}/launch/bootstrap.sh' dev" in err
    assert not checkout.venv.exists()


@pytest.mark.parametrize("word", ["devel", "--dev"])
def test_a_word_that_is_no_extra_is_refused(checkout, word):
    exit_code, out, err = finish(start(checkout, word))
    assert (exit_code, out) == (2, "")
    assert err.startswith(f"triaxis: pyproject.toml has no extra {word}, so") and "Give one of dev, or none." in err
    assert "Traceback" not in err and not checkout.venv.exists()


def test_a_shell_that_has_gone_is_no_traceback(monkeypatch):
    """SIGTERM ends the shell that asked while this process still looks."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(bootstrap, "choose", lambda *_: "/a/python")
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert bootstrap.main([]) == 128 + signal.SIGPIPE


@pytest.mark.slow
def test_a_variable_that_keeps_every_python_from_starting_is_named(checkout):
    exit_code, out, err = finish(start(checkout, TRIAXIS_PYTHON=sys.executable, PYTHONHASHSEED="abc"))
    assert (exit_code, out) == (2, "")
    assert "PYTHONHASHSEED must be" in err and "starts only without variables of this environment: " in err


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_it_shows_its_forms(checkout, word):
    exit_code, out, err = finish(start(checkout, word))
    assert (exit_code, err) == (0, "") and "bash launch/bootstrap.sh dev" in out
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
    (half,) = checkout.venv.glob("lib/*/site-packages/triaxis_toy_engine-1.5.dist-info")
    shutil.rmtree(half)
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


def versions_of_ci() -> dict[str, str]:
    lines = (ROOT / "launch" / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_every_package_has_a_tested_version_and_the_ranges_allow_it():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["dev"]]
    tested = versions_of_ci()
    assert {requirement.name for requirement in wanted} == set(tested)
    for requirement in wanted:
        assert tested[requirement.name] in requirement.specifier
        if requirement.name == "torch":
            assert all(version in requirement.specifier for version in TORCH_OF_CUDA.values())


def test_ci_installs_what_it_calls_tested():
    """The environment that these tests run in, where it was made by `.ci/run` or the bootstrap."""
    assert "--constraint launch/constraints.txt" in (ROOT / ".ci" / "run").read_text()
    if is_strict():
        found = {name: importlib.metadata.version(name).partition("+")[0] for name in versions_of_ci()}
        assert found == versions_of_ci()


@pytest.mark.parametrize(
    ("version", "num_gpus", "torch"),
    [
        ("", 0, "2.13.0"),
        ("580.65.06", 8, "2.13.0"),
        ("", 1, "2.13.0"),
        ("550.54.14", 8, "2.10.0"),
        ("525.60.13", 1, "2.10.0"),
    ],
)
def test_a_torch_that_the_driver_runs(version, num_gpus, torch):
    assert torch_for(Driver(version, num_gpus), "2.13.0", {}, "x86_64") == torch


CPU, CUDA = "torch==2.13.0+cpu", "torch===2.13.0"


@pytest.mark.parametrize(
    ("num_gpus", "hidden", "offered", "chosen"),
    [
        (0, {}, {CPU, CUDA}, CPU),
        (0, {}, {CUDA}, "torch==2.13.0"),
        (8, {"CUDA_VISIBLE_DEVICES": ""}, {CPU, CUDA}, CPU),
        (8, {}, {CPU, CUDA}, CUDA),
        (8, {}, {CPU}, "torch==2.13.0"),  # such as an index whose builds have a label for each CUDA
    ],
)
def test_a_build_of_torch_for_this_machine(
    num_gpus: int, hidden: dict[str, str], offered: set[str], chosen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = Driver("580.65.06" if num_gpus else "", num_gpus)
    assert torch_requirement(driver, "2.13.0", hidden, offered.__contains__) == chosen
    says_how_large = not num_gpus and CPU not in offered
    assert ("about 2.7 GB" in capsys.readouterr().err) == says_how_large


def test_a_driver_that_no_torch_runs_on_says_what_to_do():
    old = Driver("470.57.02", 8)
    with pytest.raises(BootstrapError, match=r"is 470\.57\.02.*driver 525 or newer.*TRIAXIS_PYTHON"):
        torch_for(old, "2.13.0", {})
    assert torch_for(old, "2.13.0", {"CUDA_VISIBLE_DEVICES": ""}) == "2.13.0"


def test_no_cpu_build_is_taken_for_the_gpus_of_an_arm_machine() -> None:
    assert torch_for(Driver("580.65.06", 4), "2.13.0", {}, "aarch64") == "2.13.0"
    with pytest.raises(
        BootstrapError, match=r"the package index has for aarch64 needs driver 580 .*NVIDIA's container"
    ):
        torch_for(Driver("550.54.14", 4), "2.13.0", {}, "aarch64")


def test_what_is_there_is_not_constrained(checkout, tmp_path, monkeypatch):
    """A container's torch stays as it is, and so does everything else that it has."""
    monkeypatch.setattr(bootstrap, "_check", lambda python, extras: ["triaxis-toy-engine<2.0,>=1.0"])
    kept = bootstrap.OwnTorch("2.11.0a0+nv", tmp_path)
    assert bootstrap._constraints(checkout, [], kept) == "triaxis-toy-engine==1.5\ntorch==2.11.0a0+nv\n"
    monkeypatch.setattr(bootstrap, "_check", lambda python, extras: ["torch<2.16,>=2.9"])
    monkeypatch.setattr(bootstrap, "read_driver", lambda: Driver("550.54.14", 8))
    monkeypatch.setattr(bootstrap, "_is_offered", lambda checkout, requirement: True)
    constraints = checkout.constraints.read_text()
    checkout.constraints.write_text(f"{constraints}torch==2.13.0\n")
    assert bootstrap._constraints(checkout, [], None) == "torch===2.10.0\n"
    checkout.constraints.write_text(constraints)


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
def test_a_fresh_environment_is_filled_although_the_active_python_has_all(checkout):
    """The way out where torch does not fit the driver: neither `.venv` nor the active Python may answer."""
    checkout.pyproject.write_text(PYPROJECT)
    (checkout.root / "toy_backend.py").write_text(BACKEND)
    subprocess.run([sys.executable, "-m", "venv", "--clear", checkout.venv], check=True)
    assert not checkout.installed.exists()
    command = [checkout.python, checkout.root / "launch" / "start" / "bootstrap.py"]
    ran = subprocess.run(command, env=environment_of(checkout), capture_output=True, text=True, check=True, cwd="/")
    assert ran.stdout.strip() == str(checkout.python)
    assert versions(checkout.python)["triaxis-toy-engine"] == "1.5"
    assert finish(start(checkout, SLURM_JOB_ID="7")) == (0, str(checkout.python), "")


@pytest.mark.slow  # a second environment
@pytest.mark.distributed
def test_a_torch_that_is_there_is_kept(checkout, tmp_path, monkeypatch):
    """The container's own build, seen from a virtual environment that has it: shared, and pinned for pip."""
    packages = tmp_path / "packages"
    information = packages / "torch-2.10.0a0+container.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0a0+container\n")
    monkeypatch.syspath_prepend(str(packages))
    requirement = '"torch>=2.9,<2.16", "triaxis-toy-engine'
    checkout.pyproject.write_text(PYPROJECT.replace('"triaxis-toy-engine', requirement))
    (checkout.root / "toy_backend.py").write_text(
        BACKEND.replace(
            "Requires-Dist: triaxis-toy-engine", "Requires-Dist: torch>=2.9,<2.16\nRequires-Dist: triaxis-toy-engine"
        )
    )
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", (checkout.root / "wheels").as_uri())):
        monkeypatch.setenv(name, value)
    shutil.rmtree(checkout.venv, ignore_errors=True)
    assert list(missing_requirements(checkout.pyproject, [])) == ["triaxis-toy-engine"]
    path = checkout.root / "launch" / "start" / "bootstrap.py"
    specification = importlib.util.spec_from_file_location("toy_bootstrap", path)
    assert specification is not None
    assert specification.loader is not None
    copy = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "toy_bootstrap", copy)
    specification.loader.exec_module(copy)
    python = copy.choose(checkout, [], {})
    assert python == copy.choose(checkout, [], {"SLURM_JOB_ID": "7"}) == str(checkout.python)
    assert versions(Path(python))["torch"] == "2.10.0a0+container"
    assert not list(checkout.venv.glob("lib/*/site-packages/torch-*"))
