"""The scripts that people type: what they resolve, print, refuse and hand on, seen through --dry-run."""

import io
import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from triaxis.launch import cli

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[3]
PREFIXES = ("SLURM_", "TORCHELASTIC_", "TRIAXIS_", "NNODES", "NODE_RANK", "NPROC_", "MASTER_")
NAMES = (
    "TP",
    "CP",
    "PP",
    "VPP",
    "DP",
    "EP",
    "ETP",
    "MICRO_BATCH_SIZE",
    "GLOBAL_BATCH_SIZE",
    "RUN_NAME",
    "RANK",
    "WORLD_SIZE",
    "PYTHONPATH",
)


def environment() -> dict[str, str]:
    """Ours, without the variables of other runs."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES) and name not in NAMES}
    return ours | {"TRIAXIS_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}


def run(script: str, *words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / script), *words],
        env=environment() | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def pretrain(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What launch/pretrain_gpt.sh hands these words to, in this process."""
    given = ["train", *words, "--dry-run"]
    here = mock.patch.dict(os.environ, environment() | variables, clear=True)
    with here, chdir(ROOT), redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        exit_code = cli.main(given)
    return subprocess.CompletedProcess(given, exit_code, out.getvalue(), err.getvalue())


def rows(shown: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """`config`, `ranks`, `layout`, `batch`, `launch` -> what is said about it."""
    assert shown.returncode == 0, shown.stderr
    return {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in shown.stdout.splitlines()}


def test_the_first_command_is_eight_ranks(tmp_path):
    said = rows(run("launch/pretrain_gpt.sh", "--dry-run", cwd=tmp_path))
    assert said["config"] == str(ROOT / "configs" / "gpt_tiny.yaml")
    assert said["ranks"].startswith("8 on 1 node, gloo")
    assert said["layout"] == "tp=2 pp=2 vpp=2 dp=2"
    assert said["batch"].startswith("32 samples per step = 4 microbatches of 4 x dp 2")
    assert "-m torch.distributed.run --nproc-per-node=8 " in said["launch"]
    assert said["launch"].endswith(
        "--module triaxis.launch.start.process.start_rank triaxis.launch.pretrain_gpt " + said["config"]
    )
    assert not list(tmp_path.iterdir()), "a dry run starts nothing and leaves nothing"


def test_yaml_then_environment_then_dotted():
    words = ["configs/gpt_tiny.yaml", "train.global_batch_size=64"]
    said = rows(pretrain(*words, TP="1", PP="4", VPP="1", DP="1", MICRO_BATCH_SIZE="2"))
    assert said["layout"] == "tp=1 pp=4 vpp=1 dp=1"
    assert said["batch"].startswith("64 samples per step = 32 microbatches of 2 x dp 1")
    assert said["launch"].endswith("configs/gpt_tiny.yaml train.global_batch_size=64")


def test_environment_and_dotted_that_disagree_are_an_error():
    refused = pretrain("parallel.tp=4", TP="2")
    assert refused.returncode == 2
    assert "TP" in refused.stderr
    assert "parallel.tp" in refused.stderr
    assert rows(pretrain("parallel.tp=2", TP="2"))["layout"].startswith("tp=2")


def test_a_users_mistakes_come_all_at_once_and_without_a_traceback():
    refused = pretrain("train.step=3", "model.num_layers=3", TP="3")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert "Traceback" not in refused.stderr
    for words in ("Did you mean train.steps", "num_attention_heads", "num_layers"):
        assert words in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.yaml"], "nowhere.yaml"),
        (["configs/gpt_tiny.yaml", "train.steps", "3"], "'train.steps' is not an existing config"),
    ],
)
def test_words_that_mean_nothing(words, said):
    refused = pretrain(*words)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr


def test_options_may_stand_anywhere():
    command = ["configs/gpt_tiny.yaml", "--dry-run", "train.steps=500"]
    assert rows(run("launch/pretrain_gpt.sh", *command))["config"] == "configs/gpt_tiny.yaml train.steps=500"


def test_several_nodes():
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host0", "MASTER_PORT": "4000"}
    said = rows(pretrain(**variables))
    assert said["ranks"].startswith("8 on 2 nodes of 4, gloo")
    assert "--nnodes=2 --node-rank=1 --nproc-per-node=4 --master-addr=host0 --master-port=4000 " in said["launch"]
    for spoiled in ({"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": ""}, {"NODE_RANK": ""}):
        refused = pretrain(**variables | spoiled)
        assert refused.returncode == 2
        assert "an address of node 0" in refused.stderr


def test_ranks_that_do_not_fit_the_layout():
    refused = pretrain("parallel.dp=2", NPROC_PER_NODE="4")
    assert refused.returncode == 2
    assert "world" in refused.stderr
    assert rows(pretrain("parallel.dp=null", NPROC_PER_NODE="4"))["layout"] == "tp=2 pp=2 vpp=2 dp=1"


def test_the_batch_script_says_what_it_would_do():
    words = ["configs/gpt_tiny.yaml", "train.steps=30", "data.tokenizer=a b", "--dry-run"]
    said = rows(run("launch/slurm/pretrain_gpt.sbatch", *words))
    line = f"srun --kill-on-bad-exit=1 bash {ROOT}/launch/pretrain_gpt.sh configs/gpt_tiny.yaml train.steps=30"
    assert said["step"] == line + " 'data.tokenizer=a b'"
    assert said["run"].startswith("runs/gpt_tiny-$SLURM_JOB_ID/")
    assert said["again"].startswith("scontrol requeue $SLURM_JOB_ID")
    assert "sbatch --dependency=afterany:$SLURM_JOB_ID" in said["refused"]
    refused = run("launch/slurm/pretrain_gpt.sbatch", "configs/gpt_tiny.yaml", "train.step=3", "--dry-run")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "train.steps" in refused.stderr


def test_the_batch_script_starts_srun_from_the_checkout(tmp_path):
    """As SLURM does: a copy of either script, somewhere else, with its variables; srun is one that tells what it was given."""
    copy = tmp_path / "spool" / "slurm_script"
    copy.parent.mkdir()
    copy.write_text((ROOT / "launch" / "slurm" / "pretrain_gpt.sbatch").read_text())
    other = copy.with_name("slurm_script_of_another_job")
    other.write_text((ROOT / "launch" / "pretrain_gpt.sh").read_text())
    for name, does in (("srun", 'printf "<%s>" "$@"\nprintf "<$SITE>"\nexit 0'), ("scontrol", "echo node1")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)
    site = tmp_path / "site.sh"
    site.write_text('export SITE=$TRIAXIS_MODULES\nmodule() { SITE="$SITE $*"; }\n')
    (tmp_path / "my.yaml").write_text((ROOT / "configs" / "gpt_tiny.yaml").read_text().replace("data/", "nowhere/"))
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "5",
        "SLURM_CPUS_PER_TASK": "6",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_TASKS_PER_NODE": "8",
        "TRIAXIS_SITE": str(site),
        "TRIAXIS_MODULES": "cuda python",
    }
    words = ["my.yaml", "data.synthetic=true", "optimizer.lr=1e-3"]
    for name, submitted in (("TRIAXIS_ROOT", copy), ("SLURM_SUBMIT_DIR", other)):
        shown = run(str(submitted), *words, cwd=tmp_path, **variables, **{name: str(ROOT)})
        assert shown.returncode == 0, shown.stderr
        script = f"{ROOT}/launch/pretrain_gpt.sh"
        cores = ["--cpus-per-task=6", "--distribution=block:block", "--cpu-bind=cores"]
        given = ["--kill-on-bad-exit=1", *cores, "bash", script, *words, "cuda python load cuda python"]
        assert shown.stdout == "".join(f"<{word}>" for word in given)
    wrong = run(str(copy), *words, cwd=tmp_path, **variables | {"SLURM_TASKS_PER_NODE": "4"}, TRIAXIS_ROOT=str(ROOT))
    assert (wrong.returncode, wrong.stdout) == (2, ""), "a layout that does not fit the job starts no task"
    bare = run(str(copy), cwd=tmp_path, **variables | {"TRIAXIS_PYTHON": "/nowhere/python"}, SLURM_SUBMIT_DIR=str(ROOT))
    assert (bare.returncode, bare.stdout) == (2, ""), "no task is started without an environment"
    assert "/nowhere/python cannot be started" in bare.stderr
    for submitted in (copy, other):
        lost = run(str(submitted), "my.yaml", cwd=tmp_path, **variables, SLURM_SUBMIT_DIR=str(tmp_path))
        assert lost.returncode == 2
        assert "TRIAXIS_ROOT" in lost.stderr
    outside = run("launch/slurm/pretrain_gpt.sbatch", "my.yaml")
    assert outside.returncode == 2
    assert "no SLURM job around it" in outside.stderr


def test_a_hostfile_says_what_each_host_would_be_told(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("node0 slots=4\nnode1 slots=4\n")
    shown = pretrain("configs/gpt_tiny.yaml", HOSTFILE=str(hosts), WANDB_API_KEY="a-secret")
    assert shown.returncode == 0, shown.stderr
    assert "NNODES=2 NODE_RANK=1 NPROC_PER_NODE=4 MASTER_ADDR=node0 MASTER_PORT=29500" in shown.stdout
    assert "WANDB_API_KEY" in shown.stdout and "a-secret" not in shown.stdout
    hosts.write_text("node0 slots=3\nnode1 slots=3\n")
    refused = pretrain("configs/gpt_tiny.yaml", HOSTFILE=str(hosts))
    assert refused.returncode == 2
    assert "6" in refused.stderr and "HOSTFILE" in refused.stderr


def test_the_test_command_says_what_it_would_run():
    tier = run("tests/run.sh", "--dry-run", "-k", "a b")
    assert tier.returncode == 0, tier.stderr
    assert tier.stdout.split()[:4] == [sys.executable, "-m", "pytest", "-p"]
    assert "not\\ slow\\ and\\ not\\ gpu" in tier.stdout
    assert tier.stdout.strip().endswith("-k a\\ b")
    assert "not\\ slow" not in run("tests/run.sh", "--all", "--dry-run").stdout
