"""A rule of an extension that is not element by element fails before the first step, by its shape."""

from typing import Any

import pytest

from tests.parity.own_rule import Mine
from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.errors import ConfigError
from triaxis.engine.optimizer.own_rule import require_elementwise


class Orthogonal(Mine):
    @staticmethod
    def elementwise(master: Any, moments: Any, grad: Any, factors: Any, config: Any, decay: Any) -> Any:
        return master - grad @ grad.mT @ grad, moments


class Summed(Mine):
    @staticmethod
    def elementwise(master: Any, moments: Any, grad: Any, factors: Any, config: Any, decay: Any) -> Any:
        return master - grad, (moments[0], (grad * grad).sum())


class OneForTwo(Mine):
    @staticmethod
    def elementwise(master: Any, moments: Any, grad: Any, factors: Any, config: Any, decay: Any) -> Any:
        return master - grad, moments[:1]


def test_a_rule_of_elements_passes() -> None:
    require_elementwise(Mine, OptimizerConfig())


def test_a_rule_of_matrices_has_none() -> None:
    with pytest.raises(RuntimeError, match="1-D"):
        require_elementwise(Orthogonal, OptimizerConfig())


@pytest.mark.parametrize(
    ("rule", "shapes"), [(Summed, r"\[\(6,\), \(6,\), \(\)\]"), (OneForTwo, r"\[\(6,\), \(6,\)\]")]
)
def test_another_shape_is_refused(rule: type[Mine], shapes: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{rule.__name__} of model.extension gives {shapes} for 6 elements and 2 moments"
    ):
        require_elementwise(rule, OptimizerConfig())
