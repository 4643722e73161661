"""The wheel: what a user has who has no checkout, in an empty folder and with an empty HOME.

The environment sees the packages of the test environment, and of ours the wheel alone.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.command_line import ROOT, Ended, environment

pytestmark = pytest.mark.distributed

SOURCES = ("engine", "models", "launch", "configs", "triaxis", "pyproject.toml", "README.md", "LICENSE")
PRODUCT = ("engine", "models", "launch")


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel.

    Attributes:
        wheel: the file.
        bin: the folder of its `python` and `triaxis`.
        folder: an empty one, in which commands are typed.
    """

    wheel: Path
    bin: Path
    folder: Path

    def run(self, program: str, *words: str) -> Ended:
        variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
        variables |= {"HOME": str(self.folder), "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        command = [str(self.bin / program), *words]
        said = subprocess.run(
            command, cwd=self.folder, env=variables, capture_output=True, text=True, check=False, timeout=240
        )
        return Ended(said.returncode, said.stdout, said.stderr)

    def triaxis(self, *words: str) -> str:
        said = self.run("triaxis", *words)
        assert said.exit_code == 0, said.out + said.err
        return said.out


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    tmp = tmp_path_factory.mktemp("installed")
    for name in SOURCES:  # a build leaves folders behind where it runs
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, tmp / "source" / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, tmp / "source" / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *options, "--wheel-dir", str(tmp), str(tmp / "source")], check=True)
    (wheel,) = tmp.glob("*.whl")
    venv.create(tmp / "env", symlinks=True)
    python = tmp / "env" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (own,) = (tmp / "env").glob("lib/python*/site-packages")
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    folder = tmp / "empty"
    folder.mkdir()
    return Installed(wheel, python.parent, folder)


def test_the_wheel_has_every_source_and_config_and_no_name_but_ours(installed: Installed) -> None:
    names = {name for name in zipfile.ZipFile(installed.wheel).namelist() if ".dist-info/" not in name}
    sources = [path for top in PRODUCT for path in (ROOT / top).rglob("*.py")]
    configs = list((ROOT / "configs").rglob("*.yaml"))
    wanted = {f"triaxis/{path.relative_to(ROOT)}" for path in [*sources, *configs]}
    assert wanted <= names and {"triaxis/__init__.py", "triaxis/py.typed"} <= names
    assert all(name.startswith("triaxis/") for name in names)


def test_nothing_is_importable_under_a_general_name(installed: Installed) -> None:
    script = "import importlib.util as u; print(*map(u.find_spec, ['engine', 'models', 'launch', 'configs']))"
    assert installed.run("python", "-P", "-c", script).out.split() == ["None"] * 4
    said = installed.run("python", "-c", "import triaxis; print(triaxis.load_config('moe_tiny').model.moe.num_experts)")
    assert said.out.strip().isdigit(), said.err


def test_commands_run_from_an_empty_folder(installed: Installed) -> None:
    layout = ("parallel.tp=2", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=1")
    trained = installed.triaxis(
        "train", "gpt_tiny", "train.steps=2", "optimizer.warmup_steps=1", "train.eval_interval=null", *layout
    )
    assert "Finished: 2 steps" in trained, trained
    assert list(installed.folder.glob("runs/*/checkpoints/step_00000002"))
    assert "TFLOP/s" in installed.triaxis("plan", "llama3_8b", "--gpus", "64xH100")
    assert "tp" in installed.triaxis("topology", "gpt_tiny")
    assert "equal" in installed.triaxis("verify", "gpt_tiny", "--layout", "tp=2", "--steps", "1")
