"""The memory of the GPUs that are here, and the launcher's verdict with it; a script stands for nvidia-smi."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.start.test_world import config
from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.errors import ConfigError, TopologyError
from triaxis.launch.rank.join import read_config
from triaxis.launch.slurm import job as slurm_job
from triaxis.launch.start import launcher
from triaxis.launch.start.gpu_memory import read_devices
from triaxis.launch.start.world import Gpus, decide
from triaxis.models.predict.fit import Devices, memory_rule

TINY = Path(__file__).resolve().parents[3] / "configs" / "gpt_tiny.yaml"
LLAMA = TINY.with_name("llama3_8b.yaml")
SYNTHETIC = ("data.synthetic=true", "eval.interval=null")
REPLICAS = ("parallel.dp=32",)
MIB = 2**20


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install a stand-in with these lines of shell."""

    def install(lines: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_the_smallest_gpu_counts(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi('[ "$1" = --query-gpu=memory.total ] && [ $# = 2 ] && printf "81559\\n40960\\n"')
    assert read_devices({}) == Devices(40960 * MIB, 2)


def test_visible_gpus_are_asked_for(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi('[ "$3 $4" = "-i 0,GPU-77" ] && printf "81559\\n81559\\n"')
    assert read_devices({"CUDA_VISIBLE_DEVICES": "0,GPU-77"}) == Devices(81559 * MIB, 2)


@pytest.mark.parametrize("lines", ["exit 9", "echo '[N/A]'", "true"])
def test_no_number_is_no_verdict(nvidia_smi: Callable[[str], None], lines: str) -> None:
    nvidia_smi(lines)
    assert read_devices({}) is None


def test_a_machine_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_devices({}) is None


def test_the_launcher_refuses_what_does_not_fit(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi("echo 40960")
    monkeypatch.setattr(launcher, "find_gpus", lambda variables: Gpus(64))
    words = (*SYNTHETIC, *REPLICAS, "optimizer.min_lr=3")
    with pytest.raises(ConfigError, match=r"memory = 45\.0 GB predicted .* 42\.9 GB of a GPU") as error:
        launcher.make_plan(launcher.Request(LLAMA, words, trains=True), {})
    assert len(error.value.problems) == 2, "with the learning rate"
    with pytest.raises(ConfigError, match=r"memory = "):
        launcher.make_plan(launcher.Request(LLAMA, (*SYNTHETIC, "parallel.dp=null"), trains=True), {})


def test_the_plan_has_the_prediction_where_the_worker_trains(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi("echo 40960")
    monkeypatch.setattr(launcher, "find_gpus", lambda variables: Gpus(64))
    warned = launcher.make_plan(
        launcher.Request(LLAMA, (*SYNTHETIC, *REPLICAS, "runtime.memory=warn"), trains=True), {}
    )
    assert warned.memory.startswith("45.0 GB predicted") and warned.memory.endswith("of 42.9 GB: it does not fit")
    assert launcher.make_plan(launcher.Request(LLAMA, (*SYNTHETIC, *REPLICAS)), {}).memory == "", (
        "generation holds no such state"
    )
    on_cpu = launcher.make_plan(launcher.Request(LLAMA, (*SYNTHETIC, *REPLICAS, "runtime.device=cpu"), trains=True), {})
    assert on_cpu.memory.startswith("44.2 GB predicted") and "communicators" not in on_cpu.memory
    assert not on_cpu.memory.endswith("GB"), "there is no verdict"


def test_a_batch_job_is_refused_before_its_tasks(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvidia_smi('case "$0 $*" in *hostnames*) echo node1;; *) echo 40960;; esac')
    (scontrol := Path(os.environ["PATH"].partition(":")[0]) / "scontrol").symlink_to("nvidia-smi")
    variables = {"SLURM_JOB_ID": "31", "SLURM_JOB_NODELIST": "node1", "SLURM_TASKS_PER_NODE": "64"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (
        scontrol.exists()
        and slurm_job.main(["script", str(LLAMA), *SYNTHETIC, *REPLICAS, "runtime.ranks_per_node=64"]) == 2
    )
    assert "memory = 45.0 GB predicted" in capsys.readouterr().err


def test_a_task_of_srun_looks_for_itself_and_a_rank_of_torchrun_does_not(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi("echo 40960")
    environment = RankEnvironment(rank=3, local_rank=3, world_size=64, local_world_size=8)
    words = [str(LLAMA), *SYNTHETIC, *REPLICAS]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(ConfigError, match=r"memory = 45\.0 GB predicted"):
        read_config(words, environment, trains=True)
    read_config(words, environment)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    read_config(words, environment, trains=True)


def test_too_few_gpus_are_answered_with_layouts_that_fit() -> None:
    asked = config("parallel.tp=4", "parallel.dp=4", "model.hidden_size=4096", "model.num_layers=8")
    with pytest.raises(TopologyError) as error:
        decide(asked, Gpus(8), {})
    assert "parallel.tp=1 parallel.pp=1 parallel.vpp=1 parallel.dp=8" in str(
        error.value
    ) and "runtime.collectives=gloo" in str(error.value)
    with pytest.raises(TopologyError) as error:
        decide(asked, Gpus(8), {}, [memory_rule(Devices(3 * 10**9, 8))])
    assert "parallel.tp=4 parallel.pp=1 parallel.vpp=1 parallel.dp=2" in str(error.value), (
        "a half of the model would not fit"
    )
    assert "runtime.collectives=gloo" not in str(error.value), "a quarter of a GPU is too little"
    with pytest.raises(TopologyError) as error:
        decide(asked, Gpus(8), {}, [memory_rule(Devices(10**8, 8))])
    assert "parallel.tp=" not in str(error.value) and "runtime.device=cpu" in str(error.value)
