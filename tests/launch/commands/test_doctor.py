"""`triaxis doctor`: what it measures of a config, how it is started, how it ends."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests import netns
from tests.launch.command_line import OTHER_LAUNCHERS, OTHER_RUNS, ROOT, TRIAXIS, run
from tests.slurm import cluster
from triaxis.engine.config.load import load_config
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError, ExitCode
from triaxis.engine.layout.partition import partition
from triaxis.engine.layout.rank_grid import Coordinates, ParallelSizes, RankGrid
from triaxis.launch.cli import command_module, command_parser
from triaxis.launch.commands import doctor
from triaxis.launch.doctor.judge import judge
from triaxis.launch.doctor.plan import AXES, data_files, folders, message_sizes, needs
from triaxis.launch.doctor.records import Examination, GroupRate, Needs, NetworkFacts, NodeClock, RankFacts, RootFacts
from triaxis.launch.doctor.report import as_json, show
from triaxis.models.predict.layer_calls import wire_bytes
from triaxis.models.predict.traffic import expected_traffic
from triaxis.models.specs import model_specs

TINY = Path(__file__).resolve().parents[3] / "configs" / "gpt_tiny.yaml"


def config(*overrides: str) -> Config:
    return load_config(TINY, list(overrides))


@pytest.mark.parametrize("sp", ["true", "false"])
def test_messages_are_those_of_the_run(sp: str) -> None:
    asked = config(f"parallel.sequence_parallel={sp}")
    sizes = ParallelSizes(tp=2, pp=2, vpp=2, dp=2)
    found = message_sizes(asked, sizes)
    ops = {"true": {"all_gather", "reduce_scatter", "all_reduce"}, "false": {"all_reduce"}}[sp]
    assert {one.op for one in found if one.axis == "tp"} == ops
    assert {one.op for one in found if one.axis == "dp"} == {"all_gather", "reduce_scatter"}
    assert [AXES.index(one.axis) for one in found] == sorted(AXES.index(one.axis) for one in found)
    stages = partition(asked.model.num_layers, 2, 2)
    for one in found:
        volumes = [
            volume
            for pp in range(sizes.pp)
            for flow, volume in expected_traffic(asked, sizes, Coordinates(pp=pp, dp=0, cp=0, tp=0), stages).items()
            if (flow.axis, flow.op) == (one.axis, one.op)
        ]
        largest = max(volumes, key=lambda volume: volume.wire_bytes)
        assert one.calls == largest.calls
        assert wire_bytes(one.op, 2, one.num_bytes) * one.calls == pytest.approx(largest.wire_bytes, rel=1e-3)


def test_exchanges_of_heads_are_measured() -> None:
    """Heads of q, k and v go one way, those of the output the other, forward and backward: 4 (a + g) of s/cp tokens (fp32 here)."""
    asked = config(
        "parallel.cp=2",
        "parallel.pp=1",
        "parallel.vpp=1",
        "parallel.sequence_parallel=false",
        "parallel.cp_method=ulysses",
    )
    (found,) = (one for one in message_sizes(asked, ParallelSizes(tp=2, cp=2, dp=1)) if one.axis == "cp")
    model, heads = asked.model, asked.model.num_attention_heads // 2 + asked.model.kv_heads // 2
    tokens = asked.train.global_batch_size * model.seq_length // 2
    assert found.op == "all_to_all"
    assert found.num_bytes * found.calls == 4 * heads * tokens * model.head_size * 4 * model.num_layers


def test_gathers_of_keys_and_values_and_sums_of_their_gradients_are_measured() -> None:
    """In a step each layer and microbatch sums k and v of whole rows (fp32), in however many calls, and gathers s/cp tokens."""
    asked = config("parallel.cp=2", "parallel.pp=1", "parallel.vpp=1", "parallel.sequence_parallel=false")
    found = {one.op: one for one in message_sizes(asked, ParallelSizes(tp=2, cp=2, dp=1)) if one.axis == "cp"}
    model = asked.model
    rows = 2 * asked.train.global_batch_size * model.seq_length * (model.kv_heads // 2) * model.head_size * 4
    summed, gathered = found["reduce_scatter"], found["all_gather"]
    assert summed.num_bytes * summed.calls == rows * model.num_layers
    assert gathered.num_bytes * gathered.calls in (rows * model.num_layers // 2, rows * model.num_layers)


def test_rows_of_experts_are_measured() -> None:
    """All experts get equally many: of k rows per token, those to the 3 of 4 ranks that are others, and as many back (fp32)."""
    asked = config(
        "parallel.pp=1",
        "parallel.vpp=1",
        "parallel.tp=1",
        "parallel.sequence_parallel=false",
        "parallel.dp=4",
        "parallel.ep=4",
        "model.bias=none",
        "model.layers=[moe]",
        "model.moe={num_experts: 8, top_k: 2, ffn_hidden_size: 64}",
        "kernels.dispatch=all_to_all",
    )
    found = {(one.axis, one.op): one for one in message_sizes(asked, ParallelSizes(dp=4, ep=4))}
    rows, model = found["experts", "all_to_all_rows"], asked.model
    tokens = asked.train.global_batch_size // 4 * model.seq_length
    sent = model.num_layers * 2 * tokens * (2 * model.hidden_size + 1) * 4 * 3 // 4
    # A measured call also has the rows that stay on the rank: a quarter.
    assert rows.num_bytes * rows.calls == pytest.approx(sent * 4 // 3, rel=1e-3)
    assert ("expert_dp", "all_gather") not in found and ("dp", "all_gather") in found


def test_one_rank_sends_nothing() -> None:
    assert message_sizes(config("parallel.tp=1", "parallel.pp=1", "parallel.vpp=1"), ParallelSizes()) == []


def test_folders_and_files_of_a_run() -> None:
    asked = config("checkpoint.interval=5", "checkpoint.dir=/saves", "data.cache_dir=/cache", "runtime.runs_dir=here")
    assert {key: str(path) for key, path in folders(asked).items()} == {
        "runtime.runs_dir": "here",
        "checkpoint.dir": "/saves",
        "data.cache_dir": "/cache",
    }
    assert [path.suffix for path in data_files(asked)] == [".bin", ".idx"]
    wanted = needs(asked, "gloo")
    assert wanted.saved_to == "checkpoint.dir"
    assert wanted.shared == ("runtime.runs_dir", "checkpoint.dir")
    element = torch.finfo(torch.float32).bits // 8
    assert wanted.save_bytes == 3 * element * sum(spec.numel for spec in model_specs(asked.model))
    assert data_files(config("data.synthetic=true")) == []


def words(*given: str) -> Namespace:
    return command_parser(command_module("doctor")).parse([*given, "--dry-run"])


def test_without_a_config_one_process_looks_at_this_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(words()) == 0
    out = capsys.readouterr().out
    assert "--nproc-per-node=1 " in out
    assert "--module triaxis.launch.start.process.start_rank triaxis.launch.doctor.rank" in out


def test_several_ranks_without_a_config_have_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="no config says which of them form groups"):
        doctor.run(words())


def test_tasks_of_srun_are_its_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    step = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "8",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "gpu7",
    }
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert doctor.run(words(str(TINY))) == 0
    assert "rank 0 of this SLURM step: RANK=0 WORLD_SIZE=8" in capsys.readouterr().out


def example(clock: NodeClock) -> tuple[RankGrid, Examination]:
    facts = tuple(
        RankFacts(
            rank=rank,
            node=rank,
            host=f"gpu{rank}",
            equal={"torch": "2.13"},
            alike={},
            network=NetworkFacts("ib0", f"10.0.0.{rank}", 200_000, ("ib0", 200_000), ()),
            roots=(RootFacts("runtime.runs_dir", "runs", True, True, "", 5 * 10**12),),
            clock=NodeClock(0.0, 0.0) if rank == 0 else clock,
        )
        for rank in range(2)
    )
    groups = (GroupRate("dp", "reduce_scatter", 2**26, 12, (0, 1), 2e-3, 16.8e9),)
    paths = tuple(GroupRate("world", "send", 2**22, 0, pair, 1e-4, 42e9) for pair in ((0, 1), (1, 0)))
    return RankGrid(ParallelSizes(dp=2), 1), Examination(Needs("nccl"), facts, groups, paths, ((0,), (1,)))


def test_the_report_names_nodes_rates_and_what_to_do(tmp_path: Path) -> None:
    grid, seen = example(NodeClock(-77.0, 0.001))
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    show(console, grid, seen, judge(seen))
    text = console.export_text()
    assert "gpu1" in text
    assert "reduce-scatter" in text
    assert "16.80" in text
    assert "FAIL clocks" in text
    assert "chrony" in text
    assert text.rstrip().endswith("out of line: gpu1")
    tree = json.loads(json.dumps(as_json(grid, seen, judge(seen))))
    assert tree["verdict"] == "FAIL"
    assert [one["host"] for one in tree["ranks"]] == ["gpu0", "gpu1"]
    assert tree["groups"][0]["bytes_per_second"] == 16.8e9
    assert [one["check"] for one in tree["findings"] if one["level"] == "FAIL"] == ["clocks"]


SMALL = (str(TINY), "parallel.tp=2", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=1")


def findings_in(path: Path) -> dict[str, dict[str, str]]:
    return {one["check"]: one for one in json.loads(path.read_text())["findings"]}


@pytest.mark.slow
@pytest.mark.distributed
def test_what_is_out_of_line_is_the_exit_code_and_no_failure_of_a_rank(tmp_path: Path) -> None:
    """The corpus of the config is not there."""
    ended = run(tmp_path, *TRIAXIS, "doctor", *SMALL, "--output", "doctor.json")
    assert ended.exit_code == ExitCode.OUT_OF_LINE, ended
    assert "FAIL data" in ended.out
    assert "ended with exit code" not in ended.err
    found = findings_in(tmp_path / "doctor.json")
    assert found["listeners"]["level"] == "OK", "our launcher listens on the loopback"
    assert "bandwidth" in found


@pytest.mark.slow
@pytest.mark.distributed
def test_a_torchrun_that_was_started_by_hand_listens_on_every_interface(tmp_path: Path) -> None:
    torchrun = [TRIAXIS[0], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--module"]
    words = [*SMALL, "data.synthetic=true", "--output", "doctor.json"]
    ended = run(tmp_path, *torchrun, "triaxis.launch.cli", "doctor", *words)
    assert ended.exit_code == 0, ended
    assert findings_in(tmp_path / "doctor.json")["listeners"]["level"] == "WARN"


ON_ITS_HOST = """
import os, socket, sys
from pathlib import Path
from tests import netns

number = int(os.environ["SLURM_NODEID"])
netns.enter(sys.argv[1 + number])
socket.sethostname(os.environ["SLURMD_NODENAME"])
if number == 1:
    netns.mount_another_disk(Path("runs"))
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""
"""A task of SLURM goes to its node's network; words: host of node 0, host of node 1, what Python gets. On the second node, `runs`
is a disk of its own."""


@pytest.mark.slow
@pytest.mark.distributed
def test_under_srun_the_node_that_is_out_of_line_is_named(tmp_path: Path) -> None:
    """A real SLURM; each of its nodes has a name and a network address of its own."""
    (tmp_path / "runs").mkdir()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OTHER_LAUNCHERS) and name not in OTHER_RUNS
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    doctor_words = ["doctor", str(TINY), "parallel.tp=2", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=2"]
    doctor_words += ["data.synthetic=true", "--output", "doctor.json"]
    with netns.hosts(2) as hosts, cluster(Path(f"/tmp/triaxis-slurm-{os.getpid()}")) as slurm:
        ended = subprocess.run(
            [
                *("srun", "--nodes=2", "--ntasks-per-node=2", f"--chdir={tmp_path}"),
                *(sys.executable, "-c", ON_ITS_HOST, *hosts, *TRIAXIS[1:], *doctor_words),
            ],
            env=environment | {"SLURM_CONF": str(slurm.conf), "MASTER_ADDR": "10.77.0.1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == ExitCode.OUT_OF_LINE, (ended.stdout, ended.stderr, slurm.logs())
    tree = json.loads((tmp_path / "doctor.json").read_text())
    assert [one["host"] for one in tree["ranks"]] == ["node1", "node1", "node2", "node2"]
    found = {one["check"]: one for one in tree["findings"]}
    assert (found["folders"]["level"], found["folders"]["hosts"]) == ("FAIL", ["node2"])
    assert {check: found[check]["level"] for check in ("places", "versions", "interfaces", "clocks")} == {
        "places": "OK",
        "versions": "OK",
        "interfaces": "OK",
        "clocks": "OK",
    }
    assert found["folders"]["text"] == f"runtime.runs_dir = {tmp_path}/runs is not the same folder as on node1"
    said = " ".join(ended.stdout.split())
    assert "FAIL folders" in said and "node2" in said.rsplit("out of line:", 1)[1]
