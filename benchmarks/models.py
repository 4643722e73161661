"""Models of the benchmarks that run on CPUs: their options, configurations and random tokens, and the engine of a lone process."""

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import Batches
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.step import Engine
from triaxis.engine.train import build
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute

LEARNING_RATE = 1e-3
DTYPES = ("fp32", "bf16")
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"norm": "layernorm", "activation": "gelu", "position": "learned", "bias": "all", "tie_embeddings": True},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": "none", "tie_embeddings": False},
}


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options of `config_of`: the sizes of the model and of a step."""
    parser.add_argument("--hidden", type=int, default=512, help="hidden size")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers")
    parser.add_argument("--head-dim", type=int, default=64, help="size of one attention head")
    parser.add_argument("--kv-heads", type=int, help="key/value heads; as many as heads, if not given")
    parser.add_argument("--seq", type=int, default=256, help="tokens per sample")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary, a multiple of 128")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches per step and data-parallel rank")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="samples per microbatch")


def config_of(options: argparse.Namespace, model: str, dtype: str, layout: Mapping[str, Any] | None = None) -> Config:
    """Build the configuration of a model of `MODELS`, with the fields of `parallel` in `layout`; one rank without it."""
    shape, parallel = MODELS[model], {"dp": 1, **(layout or {})}
    # SwiGLU has three matrices; 8/3 h, rounded to 64, keeps the size of an MLP of two matrices and 4 h.
    ffn = round(8 * options.hidden / 3 / 64) * 64 if shape["activation"] == "swiglu" else 4 * options.hidden
    return Config.model_validate(
        {
            "model": {
                **shape,
                "num_layers": options.layers,
                "hidden_size": options.hidden,
                "num_attention_heads": options.hidden // options.head_dim,
                "num_kv_heads": options.kv_heads,
                "ffn_hidden_size": ffn,
                "seq_length": options.seq,
                "vocab_size": options.vocab,
            },
            "data": {"synthetic": True},
            "train": {
                "steps": 10**6,
                "global_batch_size": options.microbatches * options.micro_batch_size * parallel["dp"],
                "micro_batch_size": options.micro_batch_size,
                "seed": 1,
            },
            "optimizer": {"lr": LEARNING_RATE},
            "precision": {"dtype": dtype},
            "parallel": parallel,
        }
    )


def build_engine(config: Config) -> Engine:
    """Build the engine of a lone process."""
    topology = Topology(RankGrid(ParallelSizes()), 0, torch.device("cpu"), kv_heads=config.model.kv_heads)
    return build(resolve_recompute(config, topology.sizes), topology, build_chunks)


def batches_of(config: Config, dp: int = 1, dp_rank: int = 0) -> Batches:
    """Return the batches of random tokens of a data-parallel rank, in whole samples."""
    return Batches(
        SyntheticDataset(1, config.model.vocab_size, config.model.seq_length),
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        dp=dp,
        dp_rank=dp_rank,
        consumed_samples=0,
        device="cpu",
    )
