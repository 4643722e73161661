"""A parameter that a user adds to the list is compared as any other: equal where it is right, named where ranks let it drift."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import triaxis.models.specs
from tests.documented import ROOT
from tests.planting import run_planted
from tests.verify.trials import observe
from triaxis.engine.config.model import ModelConfig
from triaxis.engine.layout.shard_spec import Init, ParamSpec
from triaxis.launch.verify.run import evidence, trial
from triaxis.launch.verify.verdict.judge import judge
from triaxis.models.gpt.context import BuildContext
from triaxis.models.gpt.mlp import MLP


def add_parameters(replace: Any = setattr) -> None:
    """Give each MLP a trained scale of its output, and a sum that no rule keeps equal: each rank adds what it sees."""
    listed, made, forward = triaxis.models.specs._mlp, MLP.__init__, MLP.forward

    def list_two_more(model: ModelConfig, name: str, *sizes: Any) -> Iterator[ParamSpec]:
        yield from listed(model, name, *sizes)
        scale = (model.hidden_size,)
        yield ParamSpec(f"{name}.scale", scale, Init("ones"), decay=False, grad_is_partial="sequence")
        yield ParamSpec(f"{name}.sum", (1,), Init("zeros"), decay=False, is_trained=False)

    def take_two_more(self: Any, context: BuildContext, name: str, **options: Any) -> None:
        made(self, context, name, **options)
        self.scale, self.sum = context.parameter(f"{name}.scale"), context.parameter(f"{name}.sum")

    def use_both(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = forward(self, x) * self.scale.tracked()
        self.sum.weight().data.add_(y.detach().sum())
        return y

    replace(triaxis.models.specs, "_mlp", list_two_more)
    replace(MLP, "__init__", take_two_more)
    replace(MLP, "forward", use_both)


@pytest.mark.distributed
def test_a_listed_parameter_is_equal_and_one_that_drifts_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = [f"parallel.{size}=1" for size in ("pp", "vpp", "dp")]
    words = ("parallel.tp=2", "parallel.sequence_parallel=true", *layout, "model.num_layers=2")
    asked = trial(ROOT / "configs" / "gpt_tiny.yaml", words, small=True, num_steps=1, dtype="float64")
    run_planted(add_parameters, observe, 1, asked.reference, str(tmp_path), True)
    run_planted(add_parameters, observe, 2, asked.config, str(tmp_path), False)
    add_parameters(monkeypatch.setattr)
    found = evidence(asked.config, tmp_path)
    scales, sums = ({f"layers.{layer}.mlp.{name}" for layer in range(2)} for name in ("scale", "sum"))
    assert scales < found.tensors[0, "gradient"].keys() and not sums & found.tensors[0, "gradient"].keys()
    verdict = judge(found, asked.tolerance)
    assert {one.what for one in verdict.differences} == {"master"}
    assert {one.name for one in verdict.differences} == sums
