"""Records of software: published sources find theirs, and no device's rate comes from a published run."""

from benchmarks.published import software
from benchmarks.published.software import implementation_of
from triaxis.models.predict.device import device_names, load_device


def test_sources_find_their_software() -> None:
    assert implementation_of("SC21 2104.04473 T1: NVIDIA/Megatron-LM images") is software.MEGATRON_2021
    assert implementation_of("2205.05198 T5 via calculon; HFU from Megatron-LM README") is software.MEGATRON_2022
    assert implementation_of("NVIDIA/Megatron-LM images/model_table.png (mcore r0.8.0)") is software.MEGATRON_CORE
    assert implementation_of("somebody's laptop") is software.OURS
    bridge = "NVIDIA-NeMo/Megatron-Bridge docs"
    assert implementation_of(bridge, "causal flops; FSDP=8").shards == "parameters"
    assert implementation_of(bridge, "causal flops; FSDP=0").shards == "optimizer"
    assert implementation_of(bridge, dtype="fp8-cs").fp8 and not implementation_of(bridge).fp8


def test_no_rate_comes_from_a_published_run() -> None:
    """A rate out of the runs that it shall predict would be a fit."""
    for name in device_names():
        device = load_device(name)
        for row in (*device.gemm, *device.attention):
            assert implementation_of(row.source) is software.OURS, (name, row)
