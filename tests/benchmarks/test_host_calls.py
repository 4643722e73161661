"""A layer's calls on the host stay as few as they are, and its kernels no more than by hand: counted, so that one more is seen."""

from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.host_calls import HostCalls, host_calls, plain, show
from benchmarks.models import config_of
from benchmarks.peers import parse
from triaxis.engine.config.tree import Config
from triaxis.models.gpt.block import Block
from triaxis.models.gpt.mlp import MLP

MOST = {"gpt": (89, 670), "llama": (149, 680)}
"""Aten operators and Python calls per layer and microbatch in bf16; before views were kept: 118 and 1,058, 190 and 1,045."""


def config(model: str, dtype: str = "bf16") -> Config:
    sizes = "--hidden 64 --head-dim 16 --seq 16 --vocab 128"
    return config_of(parse(sizes.split()), model, dtype)


@pytest.mark.parametrize("model", MOST)
def test_a_layer_makes_no_call_more(model: str) -> None:
    found = host_calls(config(model))
    operators, python = MOST[model]
    assert 0 < found.num_operators <= operators
    assert 0 < found.num_python <= python


def test_a_view_more_in_a_layer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = host_calls(config("gpt"), layers=(1, 2))
    forward = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda self, x: forward(self, x.unsqueeze(0)[0]))
    after = host_calls(config("gpt"), layers=(1, 2))
    assert after.num_operators > before.num_operators and after.num_python > before.num_python


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("llama", "bf16"),
        pytest.param("gpt", "bf16", marks=pytest.mark.slow),
        pytest.param("gpt", "fp32", marks=pytest.mark.slow),
        pytest.param("llama", "fp32", marks=pytest.mark.slow),
    ],
)
def test_a_layer_dispatches_no_kernel_more_than_by_hand(model: str, dtype: str) -> None:
    """A kernel per microbatch may hide in the first layer alone, a cast; in the others is the same."""
    first, second = (host_calls(config(model, dtype), layers=layers).num_kernels for layers in ((1, 2), (2, 3)))
    assert 0 < first == second <= host_calls(config(model, dtype), plain, layers=(2, 3)).num_kernels


@pytest.mark.slow
def test_a_kernel_more_in_a_layer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy in each of a layer's two branches, forward and backward."""
    before = host_calls(config("gpt", "fp32"), layers=(1, 2))
    added = Block._added

    def copied(self: Block, x: torch.Tensor, branch: torch.Tensor, *rest: Any) -> Any:
        return added(self, x, branch * 1.0, *rest)

    monkeypatch.setattr(Block, "_added", copied)
    assert host_calls(config("gpt", "fp32"), layers=(1, 2)).num_kernels - before.num_kernels == 2 * 2


@pytest.mark.slow
def test_the_table_names_each_call() -> None:
    console = Console(record=True, width=100)
    calls = HostCalls({"aten::mm": 12.0}, {"aten::view": 3.0}, {"len": 1.0})
    show("gpt", {"ours": calls, "plain": HostCalls({"aten::add": 7.0}, {}, {})}, console, by_name=True)
    text = console.export_text()
    words = ("kernels", "mm", "12.0", "views", "view", "Python calls", "len", "ours", "plain", "add", "7.0")
    assert all(word in text for word in words)
