"""CUDA graphs: a rank that replays its microbatches has the numbers of one that calls each operator, to the bit."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda_stub.in_order import LAYOUTS, PLAIN, layout
from tests.cuda_stub.one_rank import ALONE, SMALL, built
from tests.cuda_stub.test_record import recorded
from tests.cuda_stub.values import executed
from tests.harness import run_ranks
from triaxis.engine.config.load import load_config
from triaxis.engine.errors import ConfigError
from triaxis.engine.step import Engine
from triaxis.launch.verify.shrink import shrink

BF16 = "precision.dtype=bf16"


def numbers(rank: int, name: str, settings: Sequence[str], graphs: str, order: str = "") -> list[float]:
    """Train four steps, with a validation after two of them, before a graph is recorded and after."""
    with built(rank, name, [*settings, f"kernels.graphs={graphs}"], "cuda") as (engine, batches):
        found = []
        with executed(order):
            for step in range(4):
                result = engine.train_step(batches.next_step(), 1e-3)
                found += [result.loss, result.grad_norm]
                if step in (0, 2):
                    found.append(engine.evaluate([batches.next_step()]))
        return found


SHIPPED: dict[str, list[str]] = {
    "gpt_125m": [],
    "llama3_8b": ["precision.fp8.recipe=tensorwise"],
    "smollm3_3b": [
        "recompute.granularity=full",
        "recompute.method=uniform",
        "recompute.num_layers=1",
    ],
    "mistral_7b": [],
    "gemma2_9b": [],
    "qwen3_8b": [],
    "olmo2_7b": [],
    "mixtral_8x7b": ["parallel.ep=1", "kernels.dispatch=all_gather"],
    "deepseek_v3": ["parallel.ep=1", "kernels.dispatch=all_gather"],
}
"""Configurations, and what else each of them tries."""


def small(name: str, settings: Sequence[str]) -> list[str]:
    """Return settings that make a shipped model small, with all of its features, in sizes that every kernel takes."""
    batch = ["train.global_batch_size=4", "train.micro_batch_size=1"]
    config = load_config(f"configs/{name}.yaml", [*ALONE, *batch, *settings], {}, world_size=1)
    changes = shrink(config)
    changes["model"] |= {"seq_length": 32, "ffn_hidden_size": 32}
    if config.model.moe is not None:
        changes["model"]["moe"]["ffn_hidden_size"] = 32
    words = {f"{section}.{field}": value for section, fields in changes.items() for field, value in fields.items()}
    given = {word.partition("=")[0] for word in (*ALONE, *SMALL, *settings)}
    return [*settings, *(f"{key}={json.dumps(value)}" for key, value in words.items() if key not in given)]


IN_CI = ("gpt_125m", "llama3_8b", "qwen3_8b")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.slow) for name in SHIPPED]
)
def test_a_shipped_configuration_has_the_bits_of_one_without(name: str) -> None:
    settings = [BF16, "kernels.elementwise=eager", "kernels.optimizer=torch", *small(name, SHIPPED[name])]
    off, on = (numbers(0, name, settings, graphs) for graphs in ("off", "on"))
    assert on == off


FP8 = [BF16, "precision.fp8.recipe=tensorwise"]

DOCUMENTS = ["data.attention=within", "data.positions=document", "data.synthetic_document_length=6"]
"""The last step has more boundaries than those before it."""

DROPS = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1", "kernels.attention=explicit"]

CASES: dict[str, tuple[int, str, list[str], str]] = {
    "zbv": (*LAYOUTS["zbv"], "1"),
    "documents": (2, "gpt_tiny", [*layout(dp=2), *DOCUMENTS, BF16, "model.hidden_dropout=0.1"], "late"),
}
"""Ranks, configuration, settings, and the order in which the card runs what is posted."""

MORE_CASES: dict[str, tuple[int, str, list[str], str]] = {
    "tp": (*LAYOUTS["tp"], "late"),
    "fp8 dp": (2, "gpt_tiny", [*layout(dp=2), *FP8], "late"),
    "pp": (*LAYOUTS["pp"], "late"),
    "cp": (*LAYOUTS["cp"], "2"),
    "ep": (2, "moe_tiny", [*layout(dp=2, ep=2), "kernels.dispatch=all_gather", BF16], "late"),
    "dropout": (2, "gpt_tiny", [*layout(tp=2), *DOCUMENTS, *DROPS, BF16], "2"),
    "tp pp": (4, "gpt_tiny", [*layout(tp=2, pp=2), *FP8], "3"),
}


# In the slow tier, what two of the others have.
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_CASES)])
def test_a_layout_in_an_order_has_the_bits_of_one_without_graphs(case: str) -> None:
    size, name, settings, order = (CASES | MORE_CASES)[case]
    off, on = (
        run_ranks(numbers, size, name, [*PLAIN, *settings], *how, device="cuda", timeout_seconds=400)
        for how in (("off",), ("on", order))
    )
    assert on == off


def test_a_replayed_step_makes_few_calls(tmp_path: Path) -> None:
    calls = {}
    for graphs in ("off", "on"):
        with built(0, "gpt_tiny", [BF16, *PLAIN, f"kernels.graphs={graphs}"], "cuda") as (engine, batches):
            for _ in range(3):
                engine.train_step(batches.next_step(), 1e-3)
            calls[graphs] = recorded(partial(engine.forward_backward, batches.next_step()), tmp_path / graphs)
    # A forward and a backward of each microbatch; around each, copies of inputs and results.
    assert calls["on"]["graph"] == 2 * 4 and calls["off"]["graph"] == 0
    assert calls["on"]["kernel"] < calls["off"]["kernel"] / 10
    assert not calls["on"]["wait"] and not calls["on"]["allocation"]


def test_a_host_read_is_refused_when_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Engine._loss

    def read(self: Engine, *given: Any) -> torch.Tensor:
        output = loss(self, *given)
        assert output.isfinite()
        return output

    monkeypatch.setattr(Engine, "_loss", read)
    with built(0, "gpt_tiny", [BF16, *PLAIN, "kernels.graphs=on"], "cuda") as (engine, batches):
        engine.train_step(batches.next_step(), 1e-3)
        with pytest.raises(ConfigError, match=r"cannot record the forward of chunk 0: .* not permitted"):
            engine.train_step(batches.next_step(), 1e-3)


def unjoined(x: torch.Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)


def joined_too_early(x: torch.Tensor) -> None:
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(here)
    here.wait_stream(side)
    with torch.cuda.stream(side):
        x.add_(1)


def joined(x: torch.Tensor) -> None:
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        x.add_(1)
    here.wait_stream(side)


def waits_for_outside(x: torch.Tensor) -> None:
    torch.cuda.current_stream().wait_event(OUTSIDE[0])


OUTSIDE: list[torch.cuda.Event] = []

REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "a number": (torch.Tensor.item, "capturing"),
    "a shape": (torch.Tensor.nonzero, "capturing"),
    "the device": (lambda x: torch.cuda.synchronize(), "capturing"),
    "memory of the host": (lambda x: x.add_(torch.ones(1).to("cuda", non_blocking=True)), "pinned"),
    "a stream that is not joined": (unjoined, "unjoined"),
    "a stream that is joined too early": (joined_too_early, "unjoined"),
    "an event from outside": (waits_for_outside, "uncaptured"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cuda_refuses_in_a_graph_is_refused(what: str) -> None:
    call, message = REFUSED[what]
    x, graph = torch.ones(1, device="cuda"), torch.cuda.CUDAGraph()
    OUTSIDE[:] = [torch.cuda.current_stream().record_event()]
    # torch leaves the stream of a graph that fails at its end the current one.
    here = torch.cuda.stream(torch.cuda.current_stream())
    with here, pytest.raises(RuntimeError) as found, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call(x)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    # The end of an invalid capture is an error, too.
    assert message in f"{found.value} {found.value.__context__}"


def test_a_graph_runs_at_its_replay_with_the_values_of_then() -> None:
    x, graph = torch.ones(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        joined(x)
        x.mul_(2)
    assert x.item() == 1
    graph.replay()
    graph.replay()
    assert x.item() == 10
