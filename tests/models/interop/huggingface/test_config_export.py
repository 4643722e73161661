"""Our model as a Hugging Face config: the family that can express it, and what no family can."""

from typing import Any

import pytest

from tests.models.interop.huggingface.published import GEMMA_LIKE, LLAMA_LIKE, PUBLISHED, TINY, WINDOWS
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import ConfigError
from triaxis.models.interop.huggingface.config import family_of, from_hugging_face, text_keys, to_hugging_face
from triaxis.models.interop.huggingface.families import FAMILIES


def as_theirs(model: dict[str, Any], family: str | None = None) -> dict[str, Any]:
    checked = ModelConfig.model_validate(model)
    ids = {"bos_token_id": None, "eos_token_id": 42, "pad_token_id": None}
    return to_hugging_face(checked, family_of(checked, family), dtype="bfloat16", special_ids=ids)[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_there_and_back_is_the_same_model(name: str) -> None:
    keys = text_keys(PUBLISHED[name][0])
    model = ModelConfig.model_validate(from_hugging_face(keys)["model"])
    again = as_theirs(from_hugging_face(keys)["model"], keys["model_type"])
    # What null means is written out.
    explicit = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size, "ffn_hidden_size": model.ffn_size}
    for field in {"num_kv_heads", "head_dim"} - set(FAMILIES[keys["model_type"]].names.values()):
        del explicit[field]
    assert ModelConfig.model_validate(from_hugging_face(again)["model"]) == model.model_copy(update=explicit)
    for key, value in keys.items():
        if key in FAMILIES[keys["model_type"]].names:
            assert again[key] == value, key
    assert (again["model_type"], again["torch_dtype"]) == (keys["model_type"], "bfloat16")
    assert (again["bos_token_id"], again["eos_token_id"]) == (None, 42)


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ({**TINY, "position": "learned"}, "gpt2"),
        ({**TINY, "position": "learned", "activation": "gelu_tanh", "tie_embeddings": False}, "gpt2"),
        (LLAMA_LIKE, "llama"),
        ({**LLAMA_LIKE, "activation": "geglu_tanh"}, "llama"),
        ({**LLAMA_LIKE, "activation": "geglu"}, "llama"),
        ({**TINY, "position": "learned", "activation": "relu2"}, "gpt2"),
        ({**LLAMA_LIKE, "num_kv_heads": 1, "head_dim": 6}, "llama"),
        ({**LLAMA_LIKE, "hidden_size": 18, "head_dim": 4}, "mistral"),
        ({**LLAMA_LIKE, "bias": "qkv"}, "qwen2"),
        ({**LLAMA_LIKE, "qk_norm": True}, "qwen3"),
        ({**TINY, "position": "rope"}, "gpt_neox"),
        ({**TINY, "position": "rope", "parallel_block": True, "rotary_share": 0.5}, "gpt_neox"),
        (GEMMA_LIKE, "gemma2"),
        ({**GEMMA_LIKE, "qk_norm": True}, "gemma3_text"),
        ({**LLAMA_LIKE, "norm_placement": "after", "qk_norm": "all_heads"}, "olmo2"),
        ({**LLAMA_LIKE, "norm_placement": "after", "qk_norm": "all_heads", **WINDOWS}, "olmo3"),
        ({**LLAMA_LIKE, "rotary_share": 0.5}, "phi3"),
        ({**LLAMA_LIKE, "layers": ["a", "b"], "layer_kinds": {"a": {}, "b": {"position": "none"}}}, "smollm3"),
        ({**LLAMA_LIKE, "residual_multiplier": 0.5}, "granite"),
    ],
)
def test_a_model_finds_its_family(model: dict[str, Any], family: str) -> None:
    assert family_of(ModelConfig.model_validate(model)) == family


def test_a_family_can_be_asked_for() -> None:
    model = ModelConfig.model_validate(LLAMA_LIKE)
    assert family_of(model, "mistral") == "mistral"
    assert as_theirs(LLAMA_LIKE, "mistral")["sliding_window"] is None, "left out, it would be 4096"
    with pytest.raises(ConfigError, match=r"as qwen3: model\.qk_norm = False, there it is True"):
        family_of(model, "qwen3")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qk_norm": True, "bias": "qkv"}, r"as qwen3: model\.bias = qkv, there it is none"),
        ({"position": "learned"}, r"as llama: model\.position = learned, there it is rope"),
        ({"norm": "layernorm"}, r"as llama: model\.norm = layernorm, there it is rmsnorm"),
        ({"activation": "gelu"}, r"as llama: model\.activation = gelu, there it is swiglu or geglu or geglu_tanh"),
        (
            {
                **TINY,
                "position": "learned",
                "norm": "layernorm",
                "activation": "gelu",
                "bias": "all",
                "num_kv_heads": 2,
            },
            r"as gpt2: model\.num_kv_heads = 2, there each of the 4 heads has its own\.",
        ),
        (
            {**TINY, "position": "learned", "norm": "layernorm", "activation": "gelu", "bias": "all", "head_dim": 6},
            r"as gpt2: model\.head_dim = 6, there heads x head_dim is the hidden size 16\.",
        ),
        ({"window": 8, "bias": "all"}, r"as llama: .*model\.window = 8, which it does not have\."),
        ({"norm_placement": "after"}, r"as llama: model\.norm_placement = after, which it does not have\."),
        ({"logit_softcap": 30}, r"as llama: model\.logit_softcap = 30\.0, which it does not have\."),
        ({"position": "none"}, r"as llama: model\.position = none, there it is rope"),
        (
            {"layers": ["a"], "layer_kinds": {"a": {"sinks": True}}},
            r"model\.layers = \['a'\], .* model\.layer_kinds = \{'a': \{'sinks': True\}\}, which it does not have",
        ),
    ],
)
def test_what_no_family_can_express_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        family_of(ModelConfig.model_validate({**LLAMA_LIKE, **change}))
    assert len(caught.value.problems) == len(FAMILIES), "each family says why not"


def test_dropout_that_a_family_has_no_key_for_is_said() -> None:
    model = ModelConfig.model_validate({**LLAMA_LIKE, "hidden_dropout": 0.1})
    _, notes = to_hugging_face(model, "llama", dtype="float32")
    assert notes == ["model.hidden_dropout = 0.1 has no key in llama: it acts in training only"]
    keys, notes = to_hugging_face(model.model_copy(update={"z_loss": 1e-4}), "phi3", dtype="float32")
    assert (keys["resid_pdrop"], keys["embd_pdrop"]) == (0.1, 0.1)
    assert notes == ["model.z_loss = 0.0001 has no key in phi3: it acts in training only"]
