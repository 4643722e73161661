"""A layer's calls on the host stay as few as they are: counted, so that a view or a wrapper more is seen."""

import pytest
from rich.console import Console

from benchmarks.engine_overhead import config_of, parse
from benchmarks.host_calls import HostCalls, host_calls, show
from triaxis.engine.config.tree import Config
from triaxis.models.gpt.mlp import MLP

MOST = {"gpt": (89, 670), "llama": (149, 680)}
"""Aten operators and Python calls per layer and microbatch in bf16; before views were kept: 118 and 1,058, 190 and 1,045."""


def config(model: str) -> Config:
    sizes = "--hidden 64 --head-dim 16 --seq 16 --vocab 128"
    return config_of(parse(sizes.split()), model, "bf16")


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


@pytest.mark.slow
def test_the_table_names_each_call() -> None:
    console = Console(record=True, width=100)
    show("gpt", HostCalls({"aten::mm": 12.0}, {"aten::view": 3.0}, {"len": 1.0}), console, by_name=True)
    text = console.export_text()
    assert all(word in text for word in ("kernels", "mm", "12.0", "views", "view", "Python calls", "len"))
