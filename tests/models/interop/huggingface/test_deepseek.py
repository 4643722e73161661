"""Files of DeepSeek-V2 and V3: their attention is read, other attention is refused in words. `test_experts.py` has experts."""

from typing import Any

import pytest

from tests.models.interop.huggingface.published_experts import PUBLISHED_EXPERTS
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import ConfigError
from triaxis.models.interop.huggingface.config import family_of, from_hugging_face, to_hugging_face
from triaxis.models.specs import layer_specs

V3 = PUBLISHED_EXPERTS["deepseek_v3"][0]
DENSE = V3 | {"first_k_dense_replace": 61, "num_nextn_predict_layers": 0}


def test_the_attention_of_v3_has_its_187_million_weights() -> None:
    model = ModelConfig.model_validate(from_hugging_face(DENSE)["model"])
    names = ("q_a.weight", "kv_a.weight", "q_b.weight", "kv_b.weight", "proj.weight")
    matrices = [spec.numel for spec in layer_specs(model, 0) if spec.name.endswith(names)]
    assert sum(matrices) == 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168 == 187_105_280
    assert model.mla is not None and model.mla.cached_size == 576


def test_there_and_back_is_the_same_model() -> None:
    model = ModelConfig.model_validate(from_hugging_face(DENSE)["model"])
    assert family_of(model) == "deepseek_v3"
    for family in ("deepseek_v3", "deepseek_v2"):
        keys, _ = to_hugging_face(model, family_of(model, family), dtype="bfloat16")
        assert ModelConfig.model_validate(from_hugging_face(keys)["model"]) == model


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8: must be 128 here: each head has keys and values"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05: norms of latents have the epsilon 1e-6"),
        ({"rope_interleave": False}, "rope_interleave = False: RoPE whose pairs are no neighbours"),
        ({"attention_bias": True}, "attention_bias = True: a bias"),
        ({"index_topk": 2048}, "index_topk = 2048: not a key that is known here"),
    ],
)
def test_what_would_be_another_model_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_hugging_face(DENSE | changes)


def test_a_model_without_latents_is_none_of_theirs() -> None:
    plain = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=8, vocab_size=40)
    with pytest.raises(ConfigError, match=r"model\.mla = null, there attention is through latents"):
        family_of(plain, "deepseek_v3")
    latent = ModelConfig.model_validate(from_hugging_face(DENSE)["model"])
    with pytest.raises(ConfigError, match=r"model\.mla = .*which it does not have"):
        family_of(latent, "llama")
