"""Names of DeepSpeed and FSDP in a config: each is answered with our field, or with what always happens, or is not built."""

from pathlib import Path

import pytest

from tests.engine.config.test_load import BASE, refused
from triaxis.engine.config.names.sharding_names import SHARDING_ALWAYS_ON, SHARDING_NAMES, SHARDING_NOT_BUILT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("zero_optimization", ["here it is parallel.zero"]),
        ("stage3_max_live_parameters", ["not a choice", "parallel.zero=3", "one layer ahead"]),
        ("overlap_comm", ["not a choice", "always overlap the backward"]),
        ("optimizer.reduce_bucket_size", ["here it is optimizer.bucket_bytes (bytes, not elements)"]),
        ("train_micro_batch_size_per_gpu", ["here it is train.micro_batch_size"]),
        ("gradient_accumulation_steps", ["here it is train.global_batch_size"]),
        ("gradient_clipping", ["here it is optimizer.clip_grad"]),
        ("parallel.zero_hpz_partition_size", ["known, not built yet", "inside each node"]),
        ("zero_quantized_gradients", ["known, not built yet", "ZeRO++"]),
        ("reshard_after_forward", ["here it is parallel.zero (3 for true, 2 for false)"]),
        ("fsdp_sharding_strategy", ["FULL_SHARD: 3", "parallel.dp_replicas"]),
        ("data_parallel_replicate_degree", ["here it is parallel.dp_replicas"]),
        ("mixed_precision", ["here it is precision.dtype"]),
    ],
)
def test_a_name_is_answered_with_ours(path: Path, key: str, words: list[str]) -> None:
    [problem] = refused(path, f"{key}=1").problems
    assert all(word in problem for word in words), problem


def test_the_keys_of_zero_optimization_are_answered_one_by_one(path: Path) -> None:
    keys = ("stage=3", "overlap_comm=true", "offload_param={device: cpu}", "x=1")
    whole, *inner = refused(path, *(f"zero_optimization.{key}" for key in keys)).problems
    assert "here it is parallel.zero." in whole and len(inner) == 3
    assert "here it is parallel.zero (1 for 0)" in inner[0] and "not a choice" in inner[1] and "host memory" in inner[2]


def test_a_name_has_one_answer() -> None:
    tables = (SHARDING_NAMES, SHARDING_ALWAYS_ON, SHARDING_NOT_BUILT)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
