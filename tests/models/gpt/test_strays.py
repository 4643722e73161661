"""State that `models/specs.py` does not list is refused: where a module holds it, and where only a forward uses it."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.parity.cases import Case, build_rank
from triaxis.engine.comm.topology import Topology
from triaxis.engine.context_parallel.mixer import Mixer
from triaxis.engine.errors import ModelError
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.train import build
from triaxis.launch.footprint.run import Footprints
from triaxis.models.gpt.block import Block
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.gpt.mlp import MLP
from triaxis.models.predict.rank_memory import resolve_recompute

Change = Callable[[MLP], object]


def changed(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let every MLP be changed after its construction."""
    made = MLP.__init__

    def init(self: MLP, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        change(self)

    monkeypatch.setattr(MLP, "__init__", init)


def built(case: Case) -> Any:
    return build(
        resolve_recompute(case.config(), ParallelSizes()),
        Topology(RankGrid(ParallelSizes()), 0, torch.device("cpu")),
        build_chunks,
    )


@pytest.mark.parametrize(
    ("change", "attribute", "shape", "fields"),
    [
        (
            lambda mlp: setattr(mlp, "scale", nn.Parameter(torch.ones(4))),
            "scale",
            (4,),
            'Init("ones"), decay=False',
        ),
        (lambda mlp: setattr(mlp, "own", nn.Linear(16, 3)), "own.weight", (3, 16), 'Init("normal", model.init_std)'),
        (lambda mlp: setattr(mlp, "own", [nn.Linear(2, 3)]), "own.0.bias", (3,), 'Init("ones"), decay=False'),
        (
            lambda mlp: setattr(mlp, "own", {"a": (torch.ones(4, requires_grad=True),)}),
            "own.a.0",
            (4,),
            'Init("ones"), decay=False',
        ),
        (
            lambda mlp: mlp.register_buffer("mean", torch.zeros(4)),
            "mean",
            (4,),
            'Init("zeros"), decay=False, is_trained=False',
        ),
        (
            lambda mlp: mlp.register_parameter("fixed", nn.Parameter(torch.zeros(4), requires_grad=False)),
            "fixed",
            (4,),
            'Init("zeros"), decay=False, is_trained=False',
        ),
    ],
)
def test_state_that_a_module_holds_is_refused_with_the_lines_that_register_it(
    change: Change, attribute: str, shape: tuple[int, ...], fields: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch, change)
    with pytest.raises(ModelError) as refused:
        built(Case("gpt"))
    said, sizes = str(refused.value), str(shape).replace("16", "model.hidden_size")
    assert f"layers.*.mlp, MLP.{attribute}: float32 {list(shape)}" in said
    assert f'models/specs.py: yield ParamSpec(f"layers.{{layer}}.mlp.{attribute}", {sizes}, {fields})' in said
    assert f'models/gpt/mlp.py: self.{attribute.replace(".", "_")} = context.parameter(f"{{name}}.{attribute}")' in said
    assert said.count(f'ParamSpec(f"layers.{{layer}}.mlp.{attribute}"') == 1, "one entry stands for all layers"


def test_what_is_no_state_of_a_model_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(mlp: MLP) -> None:
        mlp.register_buffer("table", torch.ones(4), persistent=False)
        mlp.constants = [torch.ones(4), {"itself": mlp}]  # type: ignore[assignment]

    changed(monkeypatch, change)
    built(Case("gpt"))


HIDDEN = torch.full((), 2.0, dtype=torch.float64, requires_grad=True)


def use_a_hidden_tensor(used: type[Block] | type[Mixer], method: str, layer: int, replace: Any = setattr) -> None:
    """Multiply by a tensor that no module holds, in one layer."""
    plain = getattr(used, method)

    def scaled(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        y: torch.Tensor = plain(self, *args, **kwargs)
        return y * HIDDEN if self.name.split(".")[1] == str(layer) else y

    replace(used, method, scaled)


@pytest.mark.parametrize(
    ("case", "used", "method"),
    [
        (Case("gpt", num_layers=2), Block, "forward"),
        (Case("gpt", num_layers=2, recompute=("full", "uniform", 2)), Block, "forward"),
        (
            Case("gpt", num_layers=2, recompute=("selective", "uniform", 1), modules=("attention",)),
            Mixer,
            "attend",
        ),
    ],
    ids=str,
)
def test_a_tensor_that_only_a_forward_uses_is_refused_in_the_first_microbatch(
    case: Case, used: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, batches = build_rank(0, case)
    step = batches.next_step()
    engine.evaluate([step])
    with monkeypatch.context() as changing:
        use_a_hidden_tensor(used, method, 1, changing.setattr)
        with pytest.raises(ModelError, match=r"float64 \[\]") as refused:
            engine.forward_backward(step)
    assert "no module holds, read by MulBackward0 in the chunk that begins with layer 0" in str(refused.value)
    assert HIDDEN.grad is None

    other, _ = build_rank(0, case)
    other.forward_backward(step)
    assert not cast(nn.Module, other.chunks[0])._forward_hooks, "later steps are not looked at"
    batches.close()


def test_it_is_refused_in_the_second_chunk_of_a_rank_in_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("gpt", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, num_layers=4, recompute=("full", "uniform", 1))
    ranks = Footprints(case.config(), build_chunks)
    use_a_hidden_tensor(Block, "forward", 2, monkeypatch.setattr)
    with pytest.raises(ModelError, match="read by MulBackward0 in the chunk that begins with layer 2"):
        ranks.of(0)
