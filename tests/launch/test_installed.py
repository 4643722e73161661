"""The wheel: what a user has who has no checkout, in an empty folder and with an empty HOME.

The environment sees the packages of the test environment, and of ours the wheel alone.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from dataclasses import dataclass, replace
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

    def start(self, program: str, *words: str, **more: str) -> subprocess.Popen[str]:
        variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"} | more
        variables |= {"HOME": str(self.folder), "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.Popen(
            [str(self.bin / program), *words],
            cwd=self.folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str, *words: str, **more: str) -> Ended:
        with self.start(program, *words, **more) as process:
            out, err = process.communicate(timeout=240)
        return Ended(process.returncode, out, err)

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
    # A checkout on the path that is installed would count as the wheel, installed already.
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "wheel", *options, "--wheel-dir", str(tmp), str(tmp / "source")], env=alone, check=True)
    (wheel,) = tmp.glob("*.whl")
    venv.create(tmp / "env", symlinks=True)
    python = tmp / "env" / "bin" / "python"
    into = [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(into, env=alone, check=True)
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
    assert "TFLOP/s" in installed.triaxis("plan", "llama3_8b", "--gpus", "64xH100")
    assert "8 ranks" in installed.triaxis("topology", "gpt_tiny")


@pytest.mark.slow  # the way from a text to a model, below, trains in CI
def test_a_shipped_config_trains_and_is_verified(installed: Installed) -> None:
    layout = ("parallel.tp=2", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=1")
    trained = installed.triaxis(
        "train", "gpt_tiny", "train.steps=2", "optimizer.warmup_steps=1", "eval.interval=null", *layout
    )
    assert "Finished: 2 steps" in trained, trained
    assert list(installed.folder.glob("runs/*/checkpoints/step_00000002"))
    assert "equal" in installed.triaxis("verify", "gpt_tiny", "--layout", "tp=2", "--steps", "1")


def test_hosts_start_the_package_where_there_is_no_checkout(installed: Installed) -> None:
    (installed.folder / "hosts").write_text("node0 slots=4\nnode1 slots=4\n")
    said = installed.run("triaxis", "train", "gpt_tiny", "--dry-run", HOSTFILE="hosts")
    assert said.exit_code == 0, said.err
    assert said.out.count(f"{installed.bin / 'python'} -P -m triaxis.launch.cli train ") == 2


MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 257,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
READ = """
import sys, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
print(tokenizer.decode(model.generate(**tokenizer("to be", return_tensors="pt"), max_new_tokens=4)[0]))
"""


@pytest.mark.parametrize("place", ["wheel", pytest.param("checkout", marks=pytest.mark.slow)])
def test_from_text_to_a_model_in_transformers_without_an_edit(installed: Installed, place: str) -> None:
    """A newcomer's first hour: prepare, new, train, Ctrl-C, resume in another layout, evaluate, export, load, plan."""
    (installed.folder / place).mkdir()
    # The environment of the tests has the checkout itself.
    programs = installed.bin if place == "wheel" else Path(sys.executable).parent
    user = replace(installed, folder=installed.folder / place, bin=programs)
    (user.folder / "config.json").write_text(json.dumps(MODEL))
    (user.folder / "text.txt").write_text("to be or not to be, that is the question\n" * 400)
    user.triaxis("prepare", "--input", "text.txt", "--tokenizer", "bytes", "--output", "data/mine")
    config = user.triaxis("new", "--from", "config.json", "--data", "data/mine", "--tokens", "40k")
    (user.folder / "mine.yaml").write_text(config)

    with user.start("triaxis", "train", "mine.yaml", "telemetry.log_interval=1") as training:
        metrics = user.folder / "runs" / "mine" / "metrics.jsonl"
        for _ in range(600):
            if metrics.is_file() and metrics.read_text().count("\n") >= 3:
                break
            time.sleep(0.1)
        training.send_signal(signal.SIGINT)
        out, err = training.communicate(timeout=120)
    assert training.returncode != 0 and "Finished" not in out, err
    assert list(user.folder.glob("runs/mine/checkpoints/step_*")), out + err

    trained = user.triaxis("train", "mine.yaml", "parallel.tp=2", "parallel.dp=1", "parallel.sequence_parallel=true")
    assert "Finished" in trained and "resum" in trained, trained
    assert "perplexity" in user.triaxis("evaluate", "runs/mine", "--text", "text.txt")
    user.triaxis("export", "runs/mine", "mine-hf")
    read = user.run("python", "-c", READ, "mine-hf")
    assert read.exit_code == 0 and read.out.startswith("to be"), read.err
    assert "TFLOP/s" in user.triaxis("plan", "mine.yaml", "--gpus", "8xH100", "precision.dtype=bf16")
