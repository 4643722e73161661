"""Gradients of a GPT of 12 layers with emulated FP8 against those of bf16: their directions, and the loss.

A matrix is that of a linear layer: queries, keys and values are one. At a run's first weights the gradient of the queries alone is
smaller than the values', and rounding turns it further: with `-s` it is printed beside the others.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.cases import dataset
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import Batches
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.train import build
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute

LEAST_COSINE: Mapping[str, tuple[dict[str, Any], float]] = {
    "tensorwise": ({"recipe": "tensorwise"}, 0.985),
    "tensorwise, bf16_layers: [1, 1]": ({"recipe": "tensorwise", "bf16_layers": [1, 1]}, 0.99),
    "tensorwise, format: e4m3": ({"recipe": "tensorwise", "format": "e4m3"}, 0.99),
    "blockwise": ({"recipe": "blockwise"}, 0.99),
    "mxfp8": ({"recipe": "mxfp8"}, 0.99),
}
"""Gradients in e5m2 have a bit less than those in e4m3."""

MOST_OF_LOSS = 0.01


def config_of(seed: int, fp8: dict[str, Any] | None) -> Config:
    return Config.model_validate(
        {
            "model": {
                "num_layers": 12,
                "hidden_size": 512,
                "num_attention_heads": 8,
                "ffn_hidden_size": 1024,
                "seq_length": 128,
                "vocab_size": 512,
                "position": "learned",
            },
            "data": {"synthetic": True},
            "train": {"steps": 1, "global_batch_size": 4, "micro_batch_size": 4, "seed": seed},
            "precision": {"dtype": "bf16", "fp8": fp8},
        }
    )


def gradients(config: Config) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss per token and the gradient of each matrix of the layers, of one batch at the run's first weights."""
    engine = build(
        resolve_recompute(config, ParallelSizes()),
        Topology(RankGrid(ParallelSizes()), 0, torch.device("cpu")),
        build_chunks,
    )
    batches = Batches(
        dataset(config),
        global_batch_size=4,
        micro_batch_size=4,
        dp=1,
        dp_rank=0,
        consumed_samples=0,
        device="cpu",
        attention="across",
        positions="sample",
    )
    losses = engine.forward_backward(batches.next_step())
    batches.close()
    matrices = {
        name: parameter.bound_main_grad().clone()
        for name, parameter in engine.parameters.items()
        if name.startswith("layers.") and name.endswith("weight") and parameter.value.ndim > 1
    }
    return float(losses.sums / losses.labels), matrices


def linears(names: list[str]) -> list[list[str]]:
    """Return the parameters of each linear layer."""
    of_attention = [[name, name.replace(".q.", ".kv.")] for name in names if ".q." in name]
    return [*of_attention, *([name] for name in names if ".q." not in name and ".kv." not in name)]


def cosine(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor], names: list[str]) -> float:
    one, other = (torch.cat([grads[name].flatten() for name in names]) for grads in (want, got))
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


@pytest.mark.slow
@pytest.mark.parametrize("which", LEAST_COSINE)
def test_gradients_point_where_those_of_bf16_do(which: str) -> None:
    fp8, least = LEAST_COSINE[which]
    worst, of_queries = (1.0, ""), 1.0
    for seed in (1, 2, 3):
        want_loss, want = gradients(config_of(seed, None))
        loss, got = gradients(config_of(seed, fp8 | {"backend": "emulated"}))
        assert abs(loss / want_loss - 1) <= MOST_OF_LOSS
        for names in linears(list(want)):
            worst = min(worst, (cosine(want, got, names), f"{' and '.join(names)}, seed {seed}"))
            of_queries = min(of_queries, cosine(want, got, names[:1])) if len(names) > 1 else of_queries
    print(f"{which}: the worst cosine is {worst[0]:.4f}, of {worst[1]}; of queries alone {of_queries:.4f}")
    assert worst[0] >= least, worst


class Sums(TorchDispatchMode):
    """Collects for each scaled GEMM whether its sums may be shorter than fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.are_fast: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_mm.default:
            # The schema's last argument, use_fast_accum, is left out where it is False.
            self.are_fast.append(len(args) == len(func._schema.arguments) and args[-1])
        return func(*args, **(kwargs or {}))


def test_only_products_of_the_forward_may_have_shorter_sums() -> None:
    config = with_value(config_of(1, {"recipe": "tensorwise", "backend": "torch"}), "model.num_layers", 1)
    with Sums() as sums:
        gradients(config)
    # Of the trial, one product in three; of the layer's four matrices in the forward, none of the backward's eight.
    assert sums.are_fast == [False, True, False, *4 * [True], *8 * [False]]
