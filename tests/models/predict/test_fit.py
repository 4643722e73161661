"""A run that does not fit is refused with all other problems, and what is proposed instead is legal and fits."""

from dataclasses import replace
from pathlib import Path

import pytest

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.rules.check import problems
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.models.predict.fit import Devices, host_rule, memory_line, memory_rule
from triaxis.models.predict.rank_memory import GB, Memory, Prediction, predict

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
ONE_NODE = ("parallel.tp=1", "parallel.dp=8", "parallel.sequence_parallel=false")


def llama(*overrides: str, gigabytes: float | None = None, world_size: int | None = None) -> Config:
    rules = [] if gigabytes is None else [memory_rule(Devices(int(gigabytes * GB)))]
    if not any(override.startswith("parallel.dp=") for override in overrides):
        overrides = (*overrides, "parallel.dp=32")
    return load_config(CONFIGS / "llama3_8b.yaml", overrides, {}, world_size=world_size, more_rules=rules)


def refused(*overrides: str, gigabytes: float, world_size: int | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        llama(*overrides, gigabytes=gigabytes, world_size=world_size)
    return error.value.problems


def test_the_line_names_the_fullest_rank_and_its_kinds() -> None:
    small = Memory(1 * GB, 2 * GB, 3 * GB, 4 * GB, 10**6, 0, 0)
    large = replace(small, activations=5 * GB, communicators=int(1.3e9), host=7 * GB)
    shown = memory_line(Prediction((small, large)), 80 * GB)
    kinds = "parameters 1.0, gradients 2.0, optimizer 3.0, activations 5.0, communicators 1.3"
    assert shown == f"12.3 GB predicted on the fullest rank, pp 1 ({kinds}) of 80.0 GB; 7.0 GB in host memory"
    assert memory_line(Prediction((small,))).startswith("10.0 GB predicted on the fullest rank (parameters 1.0, ")
    assert memory_line(Prediction((small,)), 9 * GB).endswith(" of 9.0 GB: it does not fit")
    tiny = Memory(10**6, 0, 0, 25 * 10**5, 0, 0, 0)
    assert memory_line(Prediction((tiny,))) == (
        "0.00350 GB predicted on the fullest rank (parameters 0.00100, activations 0.00250)"
    )
    assert memory_line(Prediction((tiny,)), 10**6, by_kind=False) == (
        "0.00350 GB predicted on the fullest rank of 0.00100 GB: it does not fit"
    )


def test_what_does_not_fit_is_refused_with_all_other_problems() -> None:
    too_large, rate = sorted(refused(*ONE_NODE, "optimizer.min_lr=3", gigabytes=80), key=lambda text: "min_lr" in text)
    assert too_large.startswith("memory = 97.6 GB predicted on the fullest rank (parameters 16.1, gradients 32.1, ")
    assert "must be at most the 80.0 GB of a GPU" in too_large and "runtime.memory=warn" in too_large
    assert "'recompute={granularity: selective" in too_large and "parallel.tp=2 parallel.dp=4 (" in too_large
    assert rate.startswith("optimizer.min_lr = 3") and "Nearest legal: optimizer.min_lr = 0.0003" in rate


def test_what_fits_or_is_only_warned_of_or_is_unknown_is_not_refused() -> None:
    llama(*ONE_NODE, gigabytes=102)
    llama(*ONE_NODE, "runtime.memory=warn", gigabytes=80)
    llama(*ONE_NODE, "runtime.device=cpu", gigabytes=80)
    llama("parallel.tp=1", "parallel.dp=null", "parallel.sequence_parallel=false", gigabytes=80)
    assert "memory = " in refused(*ONE_NODE[::2], "parallel.dp=null", gigabytes=80, world_size=8)[0]


def test_state_in_host_memory_must_fit_a_node() -> None:
    """12 bytes per parameter on the ranks of a node: all of them on one node, half of them with two nodes."""
    config = load_config("llama3_8b", ["parallel.tp=1", "optimizer.offload=cpu"], {}, world_size=16)
    host = predict(config, parallel_sizes(config, 16), nccl=True).fullest.host
    assert 15.9 * host < 12 * 8.03e9 < 16.1 * host
    assert problems(config, 16, 8, [host_rule(8 * host)]) == problems(config, 16, 16, [host_rule(16 * host)]) == []
    (problem,) = problems(config, 16, 8, [host_rule(8 * host - 1)])
    assert "optimizer.offload = cpu" in problem and "for 8 ranks on a node" in problem
    assert "optimizer.offload = none" in problem
    for key, value in (("optimizer.offload", "none"), ("runtime.memory", "warn")):
        assert problems(with_value(config, key, value), 16, 8, [host_rule(1)]) == []


def test_a_layout_that_breaks_a_rule_is_not_predicted() -> None:
    found = refused("parallel.tp=3", "model.hidden_size=4097", "parallel.pp=40", gigabytes=1)
    assert found and not any(text.startswith("memory") for text in found)
    found = refused("model.num_layers=no number", gigabytes=1)
    assert found and not any(text.startswith("memory") for text in found)


def test_the_nearest_legal_values_of_another_problem_fit_too() -> None:
    broken = ("train.micro_batch_size=3",)
    (without,) = refused(*broken, gigabytes=1000)
    assert "train.micro_batch_size = 2 or 4" in without
    (within,) = refused(*broken, gigabytes=75)
    assert "train.micro_batch_size = 2 or 1" in within, "4 would need 109 GB"
    assert "train.global_batch_size = 96 or 192" in without and "96 or 192" not in within


def test_ranks_that_gloo_serves_share_the_memory_of_a_gpu() -> None:
    config = llama("runtime.collectives=gloo")
    assert Devices(80, 2).for_each_rank(config, 8) == 20
    assert Devices(80, 2).for_each_rank(config, 3) == 40
    assert Devices(80, 2).for_each_rank(config, None) == Devices(80).for_each_rank(config, 8) == 80
    assert Devices(80, 2).for_each_rank(llama(), 8) == 80
