"""The activation formula: the paper's equations term by term, and what autograd really keeps."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from triaxis.engine.config.quantities.attention_pattern import AttentionPattern
from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.data.documents import Documents
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.step import Engine
from triaxis.launch.footprint import run
from triaxis.launch.footprint.memory import MemoryWatch
from triaxis.launch.footprint.run import Footprint, Footprints
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict import attention_terms
from triaxis.models.predict.activation_memory import kept_bytes, moved_bytes
from triaxis.models.predict.layer_terms import block_terms, paper_per_token

GPT = {"position": "learned", "hidden_dropout": 0.1, "attention_dropout": 0.1}
LLAMA = {
    "num_kv_heads": 2,
    "ffn_hidden_size": 1280,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": "none",
    "tie_embeddings": False,
}


KINDS = {
    "layers": ["near", "far", "near", "free"],
    "layer_kinds": {
        "near": {"window": 16, "rope_base": 100.0, "sinks": True},
        "far": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rotary_share": 0.5},
        "free": {"position": "none", "sinks": True},
    },
}
"""Two layers of each stage rotate in different ways, or one does not."""


def config_of(model: dict[str, Any], *, tp: int, sp: bool = False, **choices: Any) -> Config:
    """Two stages of two layers of a small model with the proportions of a large one."""
    b = choices.get("b", 2)
    sizes = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 128, "vocab_size": 1000}
    return Config.model_validate(
        {
            "model": {**sizes, **model},
            "data": {"synthetic": True},
            "train": {"steps": 1, "global_batch_size": b, "micro_batch_size": b, "seed": 7},
            "parallel": {
                "tp": tp,
                "pp": 2,
                "dp": 1,
                "cp": choices.get("cp", 1),
                "cp_method": choices.get("cp_method", "auto"),
                "sequence_parallel": sp,
            },
            "optimizer": {"lr": 1e-3},
            "precision": {"dtype": choices.get("dtype", "bf16"), "fp8": choices.get("fp8")},
            "recompute": choices.get("recompute", {}),
            "offload": choices.get("offload", {}),
            "kernels": {"attention": choices.get("attention", "sdpa")},
        }
    )


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sp", [False, True])
def test_the_terms_of_the_papers_block_add_up_to_its_equations(tp: int, sp: bool) -> None:
    config = config_of(GPT, tp=tp, sp=sp and tp > 1, attention="explicit")
    h, a, s = 512, 8, 128
    scores = Fraction(5 * a * s, tp)
    expected = Fraction(34 * h, tp) + scores if sp else (10 + Fraction(24, tp)) * h + scores
    assert paper_per_token(block_terms(config, parallel_sizes(config))) == expected


def test_fused_attention_keeps_the_scores_no_more() -> None:
    config = config_of({**GPT, "attention_dropout": 0.0}, tp=1)
    assert paper_per_token(block_terms(config, parallel_sizes(config))) == 34 * 512


CHEAP = ["norm", "rope", "activation"]


def parts(*modules: str) -> dict[str, Any]:
    return {"granularity": "selective", "modules": list(modules)}


KEPT = {"gathered_inputs": "keep"}
KEPT_KV = {"gathered_kv": "keep"}

CI = {
    "the paper's block, tp": config_of(GPT, tp=4, attention="explicit"),
    "the paper's block, tp, sp": config_of(GPT, tp=4, sp=True, attention="explicit"),
    "fused": config_of({"position": "learned"}, tp=2, sp=True),
    "llama, kv heads in replicas": config_of(LLAMA, tp=8),
    "one layer of two again": config_of(
        LLAMA, tp=2, recompute={"granularity": "full", "method": "block", "num_layers": 1}
    ),
    "all parts again": config_of({**LLAMA, "qk_norm": True}, tp=2, recompute=parts(*CHEAP, "mlp", "attention")),
    "another gated activation": config_of({**LLAMA, "activation": "geglu_tanh"}, tp=2),
    "the head in pieces": config_of(LLAMA, tp=2, sp=True, recompute={"head_tokens": 100}),
    "gathered inputs kept": config_of(LLAMA, tp=4, sp=True, recompute=KEPT),
    "kinds of layers": config_of({**LLAMA, **KINDS}, tp=2, sp=True),
    "kinds of layers, some again": config_of(
        {**LLAMA, **KINDS}, tp=2, recompute={"granularity": "full", "method": "block", "num_layers": 1}
    ),
}
BLOCKS = {
    "norms after": config_of({**LLAMA, "norm_placement": "after"}, tp=2, sp=True),
    "norms after, on the host": config_of(
        {**LLAMA, "norm_placement": "after"}, tp=2, offload={"num_layers": 1, "min_bytes": 1}
    ),
    "norms after, gathered inputs kept, on the host": config_of(
        {**LLAMA, "norm_placement": "after", "parallel_block": True},
        tp=2,
        sp=True,
        recompute=KEPT,
        offload={"num_layers": 2, "min_bytes": 1},
    ),
    "norms before and after, parts again": config_of(
        {**LLAMA, "norm_placement": "both", "norm": "rmsnorm_1p", "activation": "geglu"}, tp=2, recompute=parts(*CHEAP)
    ),
    "parallel": config_of({**GPT, "parallel_block": True, "activation": "relu2"}, tp=2, attention="explicit"),
    "parallel, parts again": config_of({**LLAMA, "parallel_block": True}, tp=2, sp=True, recompute=parts(*CHEAP)),
    "parallel, norms after": config_of({**LLAMA, "parallel_block": True, "norm_placement": "after"}, tp=2),
    "norms of all heads": config_of({**LLAMA, "qk_norm": "all_heads"}, tp=4, sp=True),
    "norms of all heads, parts again": config_of(
        {**LLAMA, "qk_norm": "all_heads"}, tp=2, recompute=parts(*CHEAP, "attention")
    ),
    "multipliers": config_of(
        {**GPT, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}, tp=1, attention="explicit"
    ),
}
PARTS_OF_ROWS = {
    "a part of each row": config_of({**LLAMA, "qk_norm": True}, tp=2, cp=2, sp=True),
    "a part, kinds of layers, one again, one on the host": config_of(
        {**LLAMA, **KINDS},
        tp=2,
        cp=4,
        recompute={"granularity": "full", "method": "block", "num_layers": 1},
        offload={"num_layers": 2, "min_bytes": 2**14},
    ),
    "a part, explicit": config_of(GPT, tp=2, cp=2, attention="explicit"),
    "a part, explicit, attention again": config_of(
        LLAMA, tp=1, cp=2, b=1, attention="explicit", recompute=parts("norm", "attention")
    ),
    "a part, explicit, attention and rotation again": config_of(
        LLAMA, tp=2, cp=2, attention="explicit", recompute=parts("rope", "attention")
    ),
    "a part, parts again": config_of(LLAMA, tp=2, cp=2, recompute=parts(*CHEAP)),
    "a part, gathered keys and values kept": config_of(LLAMA, tp=2, cp=4, sp=True, recompute=KEPT_KV),
    "a part, gathered keys and values kept, parts again": config_of(
        {**LLAMA, "qk_norm": True},
        tp=1,
        cp=2,
        recompute=parts(*CHEAP) | KEPT_KV,
        offload={"num_layers": 1, "min_bytes": 1},
    ),
    "some heads": config_of({**LLAMA, **KINDS, "num_kv_heads": 4}, tp=2, cp=2, sp=True, cp_method="ulysses"),
    "some heads, norms of each, parts again": config_of(
        {"qk_norm": True}, tp=2, cp=4, cp_method="ulysses", recompute=parts("norm", "rope", "attention")
    ),
    "some heads, explicit": config_of(GPT, tp=2, cp=2, cp_method="ulysses", attention="explicit"),
    "some heads, explicit, one sample": config_of(GPT, tp=1, cp=2, b=1, cp_method="ulysses", attention="explicit"),
}
AHEAD = {
    "tokens ahead": config_of({**LLAMA, "mtp": {"num_layers": 2}}, tp=2, sp=True),
    "tokens ahead, parts again": config_of(
        {**LLAMA, "mtp": {"num_layers": 2}, "hidden_dropout": 0.1, "norm": "layernorm"},
        tp=2,
        recompute={**parts(*CHEAP), "head_tokens": 100},
    ),
    "tokens ahead, on the host": config_of(
        {**LLAMA, "mtp": {"num_layers": 2}}, tp=2, offload={"num_layers": 3, "min_bytes": 1}
    ),
    "tokens ahead, whole again": config_of(
        {**LLAMA, **KINDS, "mtp": {"num_layers": 2}},
        tp=2,
        sp=True,
        recompute={"granularity": "full", "num_layers": 2, **KEPT},
        offload={"num_layers": 4, "min_bytes": 1},
    ),
    "tokens ahead, some layers again": config_of(
        {**LLAMA, "mtp": {}}, tp=2, recompute={"granularity": "full", "method": "block", "num_layers": 3}
    ),
}
SLOW = {
    "kinds of layers, explicit": config_of({**LLAMA, **KINDS, "attention_softcap": 5.0}, tp=2, attention="explicit"),
    "kinds of layers, explicit, fp32": config_of({**LLAMA, **KINDS}, tp=1, b=1, dtype="fp32", attention="explicit"),
    "kinds of layers, capped": config_of({**LLAMA, **KINDS, "attention_softcap": 5.0}, tp=2, attention="blocks"),
    "kinds of layers, parts again": config_of(
        {**LLAMA, **KINDS}, tp=2, recompute=parts("norm", "rope", "activation", "attention")
    ),
    "kinds of layers, explicit, parts again": config_of(
        {**LLAMA, **KINDS, "attention_dropout": 0.1},
        tp=2,
        attention="explicit",
        recompute=parts("norm", "rope", "attention"),
    ),
    "kinds of layers, whole again": config_of(
        {**LLAMA, **KINDS},
        tp=2,
        recompute={"granularity": "full", "num_layers": 2},
        offload={"num_layers": 2, "min_bytes": 1},
    ),
    "cheap parts again, one layer on the host": config_of(
        LLAMA, tp=2, sp=True, recompute=parts(*CHEAP), offload={"num_layers": 1, "min_bytes": 2**15}
    ),
    "the paper's block": config_of(GPT, tp=1, attention="explicit"),
    "one sample": config_of(GPT, tp=2, attention="explicit", b=1),
    "one sample, llama": config_of(LLAMA, tp=2, attention="explicit", b=1),
    "fused, one sample": config_of({"position": "learned"}, tp=1, b=1),
    "llama": config_of(LLAMA, tp=2, sp=True),
    "llama, fp32": config_of(LLAMA, tp=2, dtype="fp32"),
    "explicit, fp32": config_of({"position": "learned"}, tp=2, dtype="fp32", attention="explicit"),
    "explicit llama": config_of(LLAMA, tp=2, attention="explicit"),
    "qk-norm": config_of({**LLAMA, "qk_norm": True}, tp=2),
    "the MLP again": config_of(LLAMA, tp=2, recompute=parts("mlp")),
    "selective": config_of(GPT, tp=2, attention="explicit", recompute={"granularity": "selective"}),
    "explicit, parts again": config_of(LLAMA, tp=2, attention="explicit", recompute=parts(*CHEAP, "attention")),
    "explicit, one sample, parts again": config_of(
        LLAMA, tp=1, b=1, attention="explicit", recompute=parts(*CHEAP, "attention")
    ),
    "the paper's block, parts again": config_of(
        GPT, tp=4, sp=True, attention="explicit", recompute=parts("norm", "activation", "attention")
    ),
    "one layer whole, parts of the other": config_of(
        LLAMA, tp=2, recompute={"granularity": "full", "method": "block", "num_layers": 1, "modules": CHEAP}
    ),
    "the paper's block on the host": config_of(
        GPT, tp=2, sp=True, attention="explicit", offload={"num_layers": 2, "min_bytes": 1}
    ),
    "both layers again": config_of(LLAMA, tp=2, sp=True, recompute={"granularity": "full", "num_layers": 2}),
    "gathered inputs kept, on the host": config_of(
        GPT, tp=2, sp=True, attention="explicit", recompute=KEPT, offload={"num_layers": 1, "min_bytes": 2**15}
    ),
    "gathered inputs kept, activations again, the head in pieces": config_of(
        {**LLAMA, "qk_norm": True},
        tp=2,
        sp=True,
        recompute={**parts("rope", "activation", "attention"), **KEPT, "head_tokens": 100},
    ),
    "gathered inputs kept, one layer whole": config_of(
        LLAMA, tp=2, sp=True, recompute={"granularity": "full", "method": "block", "num_layers": 1, **KEPT}
    ),
    "gathered inputs of a single rank": config_of(LLAMA, tp=1, sp=True, recompute={**parts("norm"), **KEPT}),
}


def ends_of_all(rank: int, configs: dict[str, Config]) -> dict[str, list[Footprint]]:
    """First and last stage of each config, in a process without a group of its own."""
    return {name: Footprints(config, build_chunks).of_stages() for name, config in configs.items()}


def forward_alone(engine: Engine, batches: Sequence[MicroBatch], watch: MemoryWatch) -> tuple[int, None]:
    """Stands in for `watch_step`: return the bytes that the only forward of the only chunk keeps."""
    for buffer in engine.buffers.buffers:
        watch.label(buffer.weights[0], "parameters")
    watch.forget_peak()
    (chunk,), (batch,), like = engine.chunks, batches, engine.executor
    chunk.train()
    engine.buffers.start(num_microbatches=1)
    if engine.load is not None:
        engine.load.begin()
    x = None if engine.topology.coordinates.pp == 0 else torch.empty(like.shape, dtype=like.dtype, requires_grad=True)
    with watch.looking_at([chunk], [chunk.saved], run.HEAD_MODULES, run.PLACES):
        chunk(x, batch)
    return sum(one.num_bytes for one in watch.saved), None


def kept_of_all(rank: int, configs: dict[str, Config]) -> dict[str, Any]:
    """Bytes that autograd keeps on both stages. Tensors have values: an operator on fake ones takes longer than on small ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "FakeTensorMode", lambda **_: nullcontext())
        patch.setattr(run, "watch_step", forward_alone)
        return {name: Footprints(config, build_chunks, full=True).of_stages() for name, config in configs.items()}


def formula(config: Config) -> list[int]:
    """Every kept tensor has a term, so this is not an estimate."""
    sizes = parallel_sizes(config)
    return [kept_bytes(config, sizes, stage) + moved_bytes(config, sizes, stage) for stage in stages_of(config)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "configs",
    [pytest.param(CI | BLOCKS | PARTS_OF_ROWS | AHEAD, id="ci"), pytest.param(SLOW, id="rest", marks=pytest.mark.slow)],
)
def test_autograd_keeps_what_the_formula_says(configs: dict[str, Config]) -> None:
    (measured,) = run_ranks(kept_of_all, 1, configs, timeout_seconds=600)
    assert measured == {name: formula(config) for name, config in configs.items()}


@pytest.mark.parametrize("attention", ["sdpa", "blocks", "explicit"])
def test_documents_change_the_mask_alone(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels have none; the explicit one has a mask for each row."""
    documents = Documents.of([[50, 78], [28, 100]])
    made = run.microbatches
    monkeypatch.setattr(run, "microbatches", lambda engine: [replace(one, documents=documents) for one in made(engine)])
    pattern = AttentionPattern(windows=True, sinks=True, documents=True)
    monkeypatch.setattr(attention_terms, "attention_pattern", lambda config: pattern)
    config = config_of({**LLAMA, **KINDS}, tp=2, attention=attention)
    assert kept_of_all(0, {"documents": config}) == {"documents": formula(config)}
