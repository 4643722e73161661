"""A task of srun as a rank: SLURM's variables in torchrun's words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.errors import TopologyError
from triaxis.launch.start.srun_task import FIRST_PORT, NUM_PORTS, PORTS_APART, is_rank, rank_variables, tasks_per_node

STEP = {
    "SLURM_PROCID": "11",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "123456",
}


@pytest.fixture
def scontrol(tmp_path):
    """A folder for PATH with an scontrol that knows one list of hosts."""
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$*" = "show hostnames gpu[07-08]" ] || exit 1\nprintf "gpu07\\ngpu08\\n"\n')
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}:/bin:/usr/bin"}


def test_every_variable(scontrol):
    assert rank_variables(STEP | scontrol) == {
        "RANK": "11",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(FIRST_PORT + 123456 % NUM_PORTS),
    }


def test_the_next_attempt_meets_at_another_port(scontrol):
    first, second = (rank_variables(STEP | scontrol | {"SLURM_RESTART_COUNT": count})["MASTER_PORT"] for count in "01")
    assert int(second) == int(first) + PORTS_APART


def test_one_node_needs_no_scontrol():
    ours = rank_variables(STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "16", "SLURM_NODEID": "0"})
    assert (ours["MASTER_ADDR"], ours["LOCAL_WORLD_SIZE"]) == ("127.0.0.1", "16")


def test_what_the_user_set_is_kept(scontrol):
    ours = rank_variables(STEP | scontrol | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4444"})
    assert (ours["MASTER_ADDR"], ours["MASTER_PORT"]) == ("10.0.0.7", "4444")


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_loopback_across_nodes_is_refused(address):
    with pytest.raises(TopologyError, match="means a different machine on every node"):
        rank_variables(STEP | {"MASTER_ADDR": address})


def test_hosts_that_cannot_be_listed(scontrol, tmp_path):
    with pytest.raises(TopologyError, match="scontrol is not on PATH"):
        rank_variables(STEP | {"PATH": str(tmp_path / "nowhere")})
    with pytest.raises(TopologyError, match="could not list the hosts of cpu1"):
        rank_variables(STEP | scontrol | {"SLURM_STEP_NODELIST": "cpu1"})


@pytest.mark.parametrize("name", sorted(STEP))
def test_a_missing_variable_is_named(name, scontrol):
    rest = {key: value for key, value in (STEP | scontrol).items() if key != name}
    with pytest.raises(TopologyError, match=name):
        rank_variables(rest)


def test_who_is_a_rank():
    assert is_rank(STEP)
    assert not is_rank(STEP | {"WORLD_SIZE": "16"}), "another launcher runs inside this step"
    assert not is_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "1"}), "the batch script itself"
    assert not is_rank(STEP | {"SLURM_STEP_NUM_TASKS": "1"}), "one task: torchrun starts the ranks of this node"
    assert not is_rank({})


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 9)), min_size=1, max_size=6))
def test_tasks_per_node_reads_what_slurm_writes(runs):
    text = ",".join(f"{size}(x{count})" if count > 1 else str(size) for size, count in runs)
    assert tasks_per_node(text) == [size for size, count in runs for _ in range(count)]


@pytest.mark.parametrize("text", ["", "8(x", "8,", "a", "8(x2)3"])
def test_tasks_per_node_refuses_the_rest(text):
    with pytest.raises(ValueError, match="SLURM_STEP_TASKS_PER_NODE"):
        tasks_per_node(text)
