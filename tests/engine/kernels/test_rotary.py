"""Frequencies of RoPE: every type of scaling equals transformers', in float64; a head may rotate in part."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from triaxis.engine.config.schema.layer_kinds import RopeScaling, Rotary
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.kernels.fusion import EAGER
from triaxis.engine.kernels.rotary import apply_rope, rope_tables, rotary_factor, rotary_frequencies, tables_by_rotary

CPU = torch.device("cpu")

SCALINGS: Mapping[str, Mapping[str, Any]] = {
    "linear": {"type": "linear", "factor": 8.0},
    "llama3": {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3.2": {
        "type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn with betas": {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 64.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn with mscale": {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    "yarn with a factor": {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 0.9,
    },
    "longrope": {
        "type": "longrope",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + 0.01 * i for i in range(32)],
        "long_factor": [1.0 + 0.5 * i for i in range(32)],
    },
}


class Wide:
    """torch, in which float and float32 are float64: transformers computes its tables in float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("seq_length", [2048, 131072])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(
    name: str, seq_length: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig, modeling_rope_utils

    given = dict(SCALINGS[name])
    if name == "longrope":
        for factors in ("short_factor", "long_factor"):
            given[factors] = given[factors][: int(32 * share)]
    monkeypatch.setattr(modeling_rope_utils, "torch", Wide())
    theirs = {"rope_type" if key == "type" else key: value for key, value in given.items()}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={**theirs, "rope_theta": 5e5, "partial_rotary_factor": share},
    )
    wanted, factor = modeling_rope_utils.ROPE_INIT_FUNCTIONS[given["type"]](config, CPU, seq_len=seq_length)
    model = ModelConfig(
        num_layers=1,
        hidden_size=256,
        num_attention_heads=4,
        seq_length=seq_length,
        vocab_size=10,
        rope_base=5e5,
        rotary_share=share,
        rope_scaling=RopeScaling.model_validate(given),
    )
    rotary = model.layer_kind(0).rotary
    assert rotary is not None
    found = rotary_frequencies(rotary, torch.float64, CPU)
    # Their LongRoPE has float32 exponents, whatever its dtypes are called.
    near = 1e-6 if name == "longrope" else 1e-14
    assert found.shape == (32 * share,) and torch.allclose(found, wanted.double(), rtol=near, atol=0)
    assert rotary_factor(rotary) == pytest.approx(factor, rel=1e-15)


def test_without_scaling_the_bits_are_those_of_the_formula() -> None:
    for dtype in (torch.float32, torch.float64):
        exponents = torch.arange(0, 64, 2, dtype=dtype) / 64
        assert torch.equal(rotary_frequencies(Rotary(64, 1e4, None, False), dtype, CPU), 1e4**-exponents)


def test_a_factor_scales_both_tables() -> None:
    positions, frequencies = torch.arange(5).view(1, 5), torch.tensor([1.0, 0.5])
    assert torch.allclose(rope_tables(positions, frequencies, 1.5), 1.5 * rope_tables(positions, frequencies))


def test_equal_rotations_share_a_table_and_rows_have_their_own_positions() -> None:
    one, other = Rotary(4, 1e4, None, False), Rotary(2, 1e4, None, False)
    positions = torch.tensor([[0, 1, 2], [0, 0, 1]])
    tables = tables_by_rotary([one, None, Rotary(4, 1e4, None, False), other], positions, torch.bfloat16)
    assert list(tables) == [one, other]
    assert tables[one].shape == (2, 3, 2, 1, 4) and tables[one].dtype == torch.float32
    table = tables[one]
    assert torch.equal(table[:, 1, 0], table[:, 2, 1]) and torch.equal(table[:, 0, 0], table[:, 1, 1])
    assert not torch.equal(table[:, 1, 0], table[:, 1, 1])


def test_only_the_first_elements_of_a_head_rotate() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 1, 2, 10, generator=generator, dtype=torch.float64, requires_grad=True)
    tables = tables_by_rotary([Rotary(4, 7.0, None, False)], torch.arange(3).view(1, 3), torch.float64)
    (table,) = tables.values()
    turned = apply_rope(x, table, EAGER)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], apply_rope(x[..., :4].contiguous(), table, EAGER))
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, table, EAGER), (x,))
