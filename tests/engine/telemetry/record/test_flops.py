"""FLOPs per token against published models, recompute against a count of GEMMs, and the table of devices."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.oracle import oracle_losses, oracle_weights
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.data.document_statistics import DocumentStatistics, one_document_per_sample
from triaxis.engine.telemetry.record.flops import (
    CONVENTION,
    attention_share,
    convention,
    cost_of_cp_imbalance,
    cost_of_imbalance,
    gemm_weights,
    hardware_flops_per_token,
    model_flops_per_token,
)
from triaxis.engine.telemetry.record.peaks import known_peak
from triaxis.models.specs import model_specs

MLA = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14}


def model(**fields: Any) -> ModelConfig:
    small: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "vocab_size": 100,
        "vocab_multiple": 64,
    }
    return ModelConfig(**small | fields)


def gpt(layers: int, hidden: int, heads: int) -> ModelConfig:
    return model(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=2048, vocab_size=50304)


def test_of_experts_those_of_a_token_count() -> None:
    """A layer whose k experts are together as wide as the MLP of a dense one multiplies with as much, and with its router."""
    dense = model(activation="swiglu", ffn_hidden_size=96)
    moe = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 32, "shared_experts": 1}
    mixed = model(activation="swiglu", ffn_hidden_size=96, layers=["dense", "moe"], moe=moe)
    routers = 2 * 8 * 64
    assert gemm_weights(mixed) == gemm_weights(dense) + routers
    assert convention(mixed) == CONVENTION.replace("GEMM", "active GEMM")
    layers = [4]
    for recompute in (RecomputeConfig(), RecomputeConfig(granularity="selective", modules=["mlp"])):
        more = hardware_flops_per_token(mixed, recompute, layers) - hardware_flops_per_token(dense, recompute, layers)
        assert more == 6 * routers
    again = RecomputeConfig(granularity="full")
    more = hardware_flops_per_token(mixed, again, layers) - hardware_flops_per_token(dense, again, layers)
    assert more == 8 * routers


def llama_8b(seq_length: int) -> ModelConfig:
    return model(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14336,
        seq_length=seq_length,
        vocab_size=128256,
        activation="swiglu",
        norm="rmsnorm",
        bias="none",
        tie_embeddings=False,
    )


@pytest.mark.parametrize(
    ("config", "causal", "non_causal"),
    [
        (gpt(24, 2048, 16), 8.470, 9.074),
        (gpt(32, 2560, 20), 16.88, 17.89),
        (llama_8b(4096), 48.25, 51.47),
        (llama_8b(8192), 51.47, 57.91),
    ],
    ids=["GPT-1.3B", "GPT-2.7B", "Llama-3-8B s4096", "Llama-3-8B s8192"],
)
def test_known_models_have_their_published_flops(config: ModelConfig, causal: float, non_causal: float) -> None:
    """GFLOP per token, to the four digits in which they are published."""
    assert float(f"{model_flops_per_token(config) / 1e9:.4g}") == causal
    assert float(f"{model_flops_per_token(config, causal=False) / 1e9:.4g}") == non_causal


@pytest.mark.parametrize("config", [gpt(24, 2048, 16), gpt(96, 12288, 96)])
def test_non_causal_is_the_formula_of_2205_05198(config: ModelConfig) -> None:
    layers, h, s, v = config.num_layers, config.hidden_size, config.seq_length, config.vocab_size
    per_token = 72 * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model_flops_per_token(config, causal=False) == pytest.approx(per_token, rel=1e-12)


def test_full_recompute_without_mask_is_the_formula_of_2104_04473() -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh), non-causal: our causal counts plus the other half of the attention."""
    config = gpt(24, 2048, 16)
    layers, h, s, v = config.num_layers, config.hidden_size, config.seq_length, config.vocab_size
    other_half = 4 * 2 * layers * s * h
    ours = hardware_flops_per_token(config, RecomputeConfig(granularity="full"), [layers]) + other_half
    assert ours == pytest.approx(96 * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h)), rel=1e-12)


def test_gqa_swiglu_head_size_and_vocabulary_each_change_the_weights() -> None:
    h, f = 64, 256
    dense = 4 * (4 * h * h + 2 * h * f) + 100 * h
    assert gemm_weights(model()) == dense
    assert gemm_weights(model(tie_embeddings=False)) == dense
    assert gemm_weights(model(num_kv_heads=1)) == dense - 4 * 2 * h * (h - 16)
    assert gemm_weights(model(head_dim=32)) == dense + 4 * 4 * h * h
    assert gemm_weights(model(activation="swiglu")) == dense + 4 * h * f
    assert gemm_weights(model(position="learned", qk_norm=True, bias="all")) == dense


def test_making_attention_again_makes_keys_and_values_from_latents_again() -> None:
    config = model(bias="none", mla=MLA)
    base = hardware_flops_per_token(config, RecomputeConfig(), [4])
    core, made = 4 * (16 + 14) * 32, 2 * 12 * 4 * (10 + 14)
    assert hardware_flops_per_token(config, RecomputeConfig(granularity="selective"), [4]) - base == 4 * (core + made)
    assert "mean size of queries and values" in convention(config)


def test_a_window_costs_the_keys_that_are_seen() -> None:
    """A query sees min(position, W) keys; half a key of each of the first W is left out, as in the formula without windows."""
    s, plain = 32, model()
    weights = 6 * gemm_weights(plain)
    for window in (1, 5, 31, 32, 99):
        keys = sum(min(position, window) for position in range(1, s + 1)) - min(window, s) / 2
        seen = model_flops_per_token(model(window=window)) - weights
        assert seen == pytest.approx(4 * 3 * 2 * 2 * 4 * 16 * keys / s, rel=1e-9)
    half = model(layers=["near", "far"], layer_kinds={"near": {"window": 8}, "far": {}})
    core = [2 * 4 * 16 * 32, 2 * 4 * 16 * 8 * (64 - 8) // 32]
    assert model_flops_per_token(half) == weights + 3 * 2 * sum(core)
    assert model_flops_per_token(half, causal=False) == model_flops_per_token(plain, causal=False)
    assert convention(plain) == CONVENTION
    assert convention(half) == f"{CONVENTION}, {sum(core) / (2 * core[0]):.0%} of the latter within windows"

    again = RecomputeConfig.model_validate({"granularity": "full", "method": "block", "num_layers": 1})
    base = hardware_flops_per_token(half, RecomputeConfig(), [2, 2])
    layer = 2 * (gemm_weights(plain) - 100 * 64) // 4
    assert hardware_flops_per_token(half, again, [2, 2]) - base == 2 * (layer + core[1])
    assert hardware_flops_per_token(half, again, [1, 3]) - base == 2 * layer + core[0] + core[1]
    assert hardware_flops_per_token(half, RecomputeConfig(granularity="selective"), [4]) - base == 2 * sum(core)


def test_hardware_adds_what_recompute_repeats_and_the_padded_columns() -> None:
    config = model()
    h, f, layers_per_chunk = 64, 256, [2, 1, 1]
    base = model_flops_per_token(config) + 6 * (128 - 100) * h
    core = 2 * 4 * 16 * 32
    layer = 2 * (4 * h * h + 2 * h * f) + core

    def extra(granularity: str, method: str = "uniform", num_layers: int = 1) -> int:
        recompute = RecomputeConfig.model_validate(
            {"granularity": granularity, "method": method, "num_layers": num_layers, "head_tokens": 8}
        )
        return hardware_flops_per_token(config, recompute, layers_per_chunk) - base

    assert extra("none") == 0
    assert extra("selective") == 4 * core
    assert extra("full") == extra("full", num_layers=2) == 4 * layer
    assert extra("full", "block") == 3 * layer
    assert extra("full", "block", num_layers=2) == 4 * layer


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
        ("cpu", None),
    ],
)
def test_devices_are_known_by_the_name_that_torch_gives(name: str, tflops: float | None) -> None:
    for dtype in ("bf16", "fp16"):
        peak = known_peak(name, dtype)
        assert (None if peak is None else peak.tflops) == tflops
    assert known_peak(name, "fp32") is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_kv_heads": 2, "activation": "swiglu", "tie_embeddings": False, "head_dim": 24, "ffn_hidden_size": 96},
        {"bias": "none", "mla": MLA},
        {"bias": "none", "mla": MLA | {"q_lora_rank": None}},
        {"mtp": {"num_layers": 2}},
    ],
    ids=["gelu", "swiglu, GQA, untied", "latents", "one latent", "tokens ahead"],
)
def test_torch_counts_the_same_for_a_plain_gpt(fields: dict[str, Any]) -> None:
    """torch's counter over the oracle's forward and backward: every GEMM of a GPT that masks and does not skip."""
    config = model(**fields)
    weights = oracle_weights({spec.name: spec.shape for spec in model_specs(config)}, seed=0)
    b, s = 2, config.seq_length
    tokens = torch.arange(b * s).view(b, s) % config.vocab_size
    positions = torch.arange(s).expand(b, s)
    with FlopCounterMode(display=False) as counter:
        found = oracle_losses(config, weights, tokens, tokens, torch.ones(b, s, dtype=torch.bool), positions, [0, 1])
        sum((total for total, _ in found.ahead), found.of_next).backward()
    assert counter.get_total_flops() == b * s * model_flops_per_token(config, causal=False)


def test_documents_leave_the_attention_within_them() -> None:
    config, halves = model(), DocumentStatistics(32, (((16, 16),),))
    weights = 6 * gemm_weights(config)
    across = model_flops_per_token(config) - weights
    assert model_flops_per_token(config, documents=one_document_per_sample(32)) - weights == across
    assert 2 * (model_flops_per_token(config, documents=halves) - weights) == across
    assert attention_share(config, halves) == 0.5
    assert convention(config, halves) == f"{CONVENTION}, 50% of the latter within documents"
    again = hardware_flops_per_token(config, RecomputeConfig(granularity="full"), [4], halves)
    assert (
        again - model_flops_per_token(config, documents=halves)
        == hardware_flops_per_token(config, RecomputeConfig(), [4])
        - model_flops_per_token(config)
        + (2 * gemm_weights(config) - 2 * 100 * 64)
        + across // 6
    )


def test_imbalance_costs_what_the_fullest_replica_computes_more() -> None:
    config, unequal = model(), DocumentStatistics(32, (((32,), (16, 16)),))
    keys = 0.75 * 16  # on average; the first replica has 16 per query
    attention = model_flops_per_token(config, documents=unequal) - 6 * gemm_weights(config)
    more = attention * (16 / keys - 1)
    assert cost_of_imbalance(config, unequal) == pytest.approx(more / (attention + 6 * gemm_weights(config)))
    assert cost_of_imbalance(config, one_document_per_sample(32)) == 0


def test_imbalance_over_cp_costs_attention_alone() -> None:
    config, halves = model(), DocumentStatistics(32, (((16, 16),),))
    flops = model_flops_per_token(config, documents=halves)
    attention = flops - 6 * gemm_weights(config)
    assert cost_of_cp_imbalance(config, halves, 1.25) == pytest.approx(0.25 * attention / flops)
    assert cost_of_cp_imbalance(config, halves, 1.0) == 0
