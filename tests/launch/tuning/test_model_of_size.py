"""A model of a size has about that many parameters, a usual shape, and heads that ranks can share."""

import pytest

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import ConfigError
from triaxis.launch.tuning.model_of_size import model_of_size
from triaxis.models.specs import num_parameters


@pytest.mark.parametrize("size", [30e6, 125e6, 350e6, 1e9, 1.3e9, 3e9, 7e9, 13e9, 70e9, 405e9, 1e12])
def test_its_size_and_its_shape(size: float) -> None:
    model = ModelConfig.model_validate(model_of_size(int(size), 50_257, 2048))
    assert num_parameters(model) == pytest.approx(size, rel=0.05)
    assert 40 <= model.hidden_size / model.num_layers <= 135
    assert model.hidden_size == model.num_attention_heads * model.head_size
    divides = 8 if size >= 7e9 else 4 if size >= 1.3e9 else 2
    assert model.num_attention_heads % divides == 0 and model.kv_heads % min(divides, model.kv_heads) == 0


def test_the_gpt3_125m_is_found_again() -> None:
    model = model_of_size(125_000_000, 50_257, 2048)
    assert (model["num_layers"], model["hidden_size"], model["num_attention_heads"]) == (12, 768, 12)


def test_a_vocabulary_that_is_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model with a vocabulary of 50,257 tokens"):
        model_of_size(10**6, 50_257, 64)
