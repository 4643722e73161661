"""How many ranks are started where, and the words with which an impossible world is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.config.load import load_config
from triaxis.engine.config.tree import Config
from triaxis.engine.device.gpus import GLOO, NCCL, Gpus
from triaxis.engine.errors import TopologyError
from triaxis.launch.start.launcher import DEFAULT_CONFIG
from triaxis.launch.start.world import decide


def config(*overrides: str) -> Config:
    return load_config(DEFAULT_CONFIG, overrides)


def test_without_gpus_the_layout_says_how_many():
    world = decide(config("parallel.dp=2"), Gpus(0), {})
    assert (world.size, world.num_nodes, world.ranks_per_node, world.backend) == (8, 1, 8, GLOO)
    assert world.reason.startswith("tp x pp x dp of the layout")
    cut = decide(config("parallel.dp=2", "parallel.cp=2"), Gpus(0), {})
    assert cut.size == 16 and cut.reason.startswith("tp x cp x pp x dp of the layout")
    assert decide(config("parallel.dp=null"), Gpus(0), {}).size == 4
    assert decide(config("parallel.dp=2"), Gpus(0), {"NNODES": "2"}).ranks_per_node == 4


def test_an_open_dp_fills_the_gpus():
    for num_gpus, size in ((4, 4), (8, 8), (12, 8), (16, 16)):  # 8 microbatches: dp 3 does not divide them
        world = decide(config("parallel.dp=null"), Gpus(num_gpus), {})
        assert (world.size, world.backend) == (size, NCCL)
        assert ("idle" in world.reason) == (size < num_gpus)
    assert decide(config("parallel.dp=null"), Gpus(8), {"NNODES": "2"}).size == 16


def test_a_layout_that_was_asked_for_is_never_changed():
    world = decide(config("parallel.dp=2"), Gpus(16), {})
    assert world.size == 8
    assert "8 of 16 GPUs per node stay idle" in world.reason


@pytest.mark.parametrize("dp", ["2", "null"])
def test_too_few_gpus_says_what_to_type(dp):
    with pytest.raises(TopologyError, match="never changes a layout") as error:
        decide(config(f"parallel.dp={dp}"), Gpus(3), {})
    assert "this node shows 3" in str(error.value)
    offered = "parallel.tp=1 parallel.pp=1 parallel.vpp=1 parallel.dp=2"  # 3 would not divide the batch
    assert f"Add one of these to the same command:\n  {offered}   in place of its layout" in str(error.value)
    assert decide(config(*offered.split()), Gpus(3), {}).size == 2
    assert decide(config(f"parallel.dp={dp}", "runtime.device=cpu"), Gpus(3), {}).device == "cpu"


def test_too_few_gpus_for_experts_keep_what_can_be_kept_of_ep():
    moe = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 64}
    words = (
        "model.layers=[moe]",
        f"model.moe={moe}",
        "parallel.ep=4",
        "parallel.dp=4",
        "parallel.tp=1",
        "parallel.pp=1",
    )
    with pytest.raises(TopologyError, match="never changes a layout") as error:
        decide(config(*words, "parallel.vpp=1"), Gpus(2), {})
    sizes = "parallel.tp=1 parallel.pp=1 parallel.vpp=1 parallel.dp=2 parallel.ep=2 parallel.etp=1"
    assert f"\n  {sizes}   in place of" in str(error.value)


def test_nproc_per_node_is_taken_as_given():
    assert decide(config(), Gpus(0), {"NPROC_PER_NODE": "3", "NNODES": "2"}).size == 6
    with pytest.raises(TopologyError, match="needs 9 GPUs per node"):
        decide(config(), Gpus(8), {"NPROC_PER_NODE": "9"})


@pytest.mark.parametrize(("name", "text"), [("NNODES", "0"), ("NNODES", "two"), ("NPROC_PER_NODE", "-1")])
def test_what_is_no_number_is_refused(name, text):
    with pytest.raises(TopologyError, match=f"{name}={text}"):
        decide(config(), Gpus(0), {name: text})


def test_nodes_that_would_differ_are_refused():
    with pytest.raises(TopologyError, match="cannot be divided evenly over NNODES=3"):
        decide(config("parallel.dp=2"), Gpus(0), {"NNODES": "3"})


def test_the_device_that_was_asked_for():
    assert decide(config("runtime.device=cpu"), Gpus(8), {}).backend == GLOO
    with pytest.raises(TopologyError, match="a CPU build"):
        decide(config("runtime.device=cuda"), Gpus(0, "torch is a CPU build"), {})


@given(num_gpus=st.integers(1, 64), num_nodes=st.integers(1, 8), batch=st.integers(1, 64))
def test_whatever_is_decided_fits(num_gpus, num_nodes, batch):
    wanted = config("parallel.dp=null", "train.micro_batch_size=1", f"train.global_batch_size={batch}")
    try:
        world = decide(wanted, Gpus(num_gpus), {"NNODES": str(num_nodes)})
    except TopologyError:
        assert num_gpus * num_nodes < 4 or (4 % num_nodes and not feasible(num_gpus, num_nodes, batch))
        return
    assert world.size % 4 == 0
    assert batch % (world.size // 4) == 0
    assert world.ranks_per_node <= num_gpus


def feasible(num_gpus: int, num_nodes: int, batch: int) -> bool:
    return any(
        batch % dp == 0 and 4 * dp % num_nodes == 0 and 4 * dp // num_nodes <= num_gpus for dp in range(1, batch + 1)
    )


def test_gpus_that_torch_cannot_use_are_no_cpu_run():
    unusable = Gpus(0, problem="torch can use none: driver 580 is needed")
    for device in ("auto", "cuda"):
        with pytest.raises(TopologyError, match="driver 580 is needed"):
            decide(config(f"runtime.device={device}"), unusable, {})
    assert decide(config("runtime.device=cpu"), unusable, {}).backend == GLOO


def test_ranks_that_gloo_serves_may_share_a_gpu():
    shared = config("parallel.dp=2", "runtime.collectives=gloo")
    world = decide(shared, Gpus(1), {})
    assert (world.size, world.backend) == (8, GLOO)
    assert world.reason.endswith("8 ranks share 1 GPU on each node")
    assert "share" not in decide(shared, Gpus(8), {}).reason
    with pytest.raises(TopologyError, match=r"runtime\.collectives=gloo"):
        decide(config("parallel.dp=2"), Gpus(1), {})


def test_nccl_without_a_gpu_is_refused_before_a_rank_is_started():
    with pytest.raises(TopologyError, match=r"a CPU build.*runtime\.collectives=auto"):
        decide(config("runtime.collectives=nccl"), Gpus(0, "torch is a CPU build"), {})
