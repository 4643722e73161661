"""Choose the shape of a model with a requested number of parameters.

    family    Llama's: RMSNorm, SwiGLU with an inner width of 8/3 of the hidden size, RoPE, no bias
              tied embeddings below 1B parameters, 8 key/value heads from 7B
    shape     hidden size over layers follows GPT-3's table 2.1 (2005.14165), interpolated by the logarithm of the model's size
    size      within 5 % of the requested number, embeddings included
    heads     32, 64 or 128 dimensions each
              an even number of heads, in larger models a multiple of 4 and then of 8, for tensor parallelism

Of all shapes with the right size, the one nearest to GPT-3's ratio is chosen.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import ConfigError, shown
from triaxis.models.specs import num_parameters

RATIOS = ((125e6, 64.0), (350e6, 42.7), (760e6, 64.0), (1.3e9, 85.3), (2.7e9, 80.0), (6.7e9, 128.0), (175e9, 128.0))
"""(parameters, width / layers) of GPT-3's models."""

NEAR = 0.05
LEAST_LAYERS = 2
MOST_WIDTH = 32_768
TIED_BELOW = 10**9
SHARED_KEYS_FROM = 7 * 10**9
NUM_KV_HEADS = 8


def model_of_size(size: int, vocab_size: int, seq_length: int) -> dict[str, Any]:
    """Choose the fields of the section `model` for a model with about `size` parameters.

    Args:
        size: requested number of parameters.
        vocab_size: the tokenizer's vocabulary size.
        seq_length: tokens per sample.

    Raises:
        ConfigError: no model with this vocabulary has about that many parameters.
    """
    shapes = list(_shapes(size, vocab_size, seq_length))
    near = [shape for shape in shapes if abs(shape[0] / size - 1) <= NEAR]
    if not near:
        smallest = min((count for count, *_ in shapes), default=0)
        raise ConfigError(
            [
                f"--size {shown(size)}: no model with a vocabulary of {vocab_size:,} tokens has about so many parameters. "
                f"The nearest that is larger has {smallest:,}."
            ]
        )
    wished = _ratio(size)
    _, layers, width, fields = min(near, key=lambda shape: abs(math.log(shape[2] / shape[1] / wished)))
    return {"num_layers": layers, "hidden_size": width, **fields}


def _shapes(size: int, vocab_size: int, seq_length: int) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
    """Yield (parameters, layers, hidden size, other fields) for each hidden size.

    The number of layers is at least LEAST_LAYERS, and brings the model nearest to `size` parameters. The last hidden size is the
    first at which a model of one layer has more than 2 x `size` parameters.
    """
    for width, heads in _widths(size):
        fields: dict[str, Any] = {
            "num_attention_heads": heads,
            "ffn_hidden_size": 64 * round(width * 8 / 3 / 64),
            "seq_length": seq_length,
            "vocab_size": vocab_size,
            "norm": "rmsnorm",
            "activation": "swiglu",
            "position": "rope",
            "bias": "none",
            "tie_embeddings": size < TIED_BELOW,
        }
        if size >= SHARED_KEYS_FROM:
            fields["num_kv_heads"] = NUM_KV_HEADS

        def count(layers: int, width: int = width, fields: dict[str, Any] = fields) -> int:
            model = {"num_layers": layers, "hidden_size": width, **fields}
            return num_parameters(ModelConfig.model_validate(model))

        one = count(1)
        each = count(2) - one
        layers = max(LEAST_LAYERS, 1 + round((size - one) / each))
        yield one + (layers - 1) * each, layers, width, fields
        if one > 2 * size:
            return


def _widths(size: int) -> Iterator[tuple[int, int]]:
    """Yield (hidden size, attention heads) for models of about `size` parameters, narrowest first."""
    if size < SHARED_KEYS_FROM:
        yield from ((width, width // 32) for width in range(64, 256, 64))
        yield from ((width, width // 64) for width in range(256, 2048, 128))
        yield from ((width, width // 128) for width in range(2048, 5120, 512))
    else:
        yield from ((width, width // 128) for width in range(4096, MOST_WIDTH + 1, 1024))


def _ratio(size: int) -> float:
    """Interpolate GPT-3's ratio of hidden size to layers for a model with `size` parameters."""
    if size <= RATIOS[0][0]:
        return RATIOS[0][1]
    for (low, at_low), (high, at_high) in pairwise(RATIOS):
        if size <= high:
            part = math.log(size / low) / math.log(high / low)
            return math.exp((1 - part) * math.log(at_low) + part * math.log(at_high))
    return RATIOS[-1][1]
