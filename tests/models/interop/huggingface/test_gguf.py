"""GGUF files: the tensors that transformers reads from them, in F32, F16, BF16 and quantized, and errors by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.lacking import need_package
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import CheckpointError, ConfigError
from triaxis.models.interop.huggingface.weights import open_folder

KEYS: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 43,
    "max_position_embeddings": 16,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
}
HEAD = KEYS["hidden_size"] // KEYS["num_attention_heads"]


@pytest.fixture(scope="module", autouse=True)
def _packages() -> None:
    need_package("gguf", "pip install -e '.[dev]'")
    need_package("transformers", "pip install -e '.[dev]'")


def tiny_model(family: str, **more: Any) -> Any:
    """Return a model of transformers with random weights, a head of its own, and biases where the family has some."""
    import transformers

    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(family, **KEYS, **more, head_dim=HEAD)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def as_llama_cpp_stores(values: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of queries or keys in the order of llama.cpp: the two halves of each head take turns."""
    return values.reshape(heads, 2, HEAD // 2, -1).swapaxes(1, 2).reshape(values.shape)


def write_gguf(model: Any, path: Path, family: str, kind: str = "F32", **fields: Any) -> None:
    """Write a model as llama.cpp's converter does: matrices in `kind`, vectors in F32."""
    import gguf

    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(KEYS["num_hidden_layers"])
    writer.add_context_length(KEYS["max_position_embeddings"])
    writer.add_embedding_length(KEYS["hidden_size"])
    writer.add_feed_forward_length(KEYS["intermediate_size"])
    writer.add_head_count(KEYS["num_attention_heads"])
    writer.add_head_count_kv(KEYS["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(KEYS["rms_norm_eps"])
    writer.add_rope_freq_base(KEYS["rope_theta"])
    writer.add_vocab_size(KEYS["vocab_size"])
    writer.add_eos_token_id(7)
    if family == "llama":
        writer.add_rope_dimension_count(HEAD)
    for name, value in fields.items():
        writer.add_uint32(f"{family}.{name}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], KEYS["num_hidden_layers"])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        base, _, ending = name.rpartition(".")
        values = tensor.detach().numpy()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(base.split(".")[-1])
        if family == "llama" and heads is not None:
            values = as_llama_cpp_stores(values, KEYS[heads])
        stored = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        writer.add_tensor(f"{names.get_name(base)}.{ending}", gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("family", "kind", "tied"),
    [
        ("llama", "F32", False),
        ("llama", "Q8_0", True),
        ("llama", "BF16", True),
        ("qwen2", "F16", False),
        ("qwen3", "Q4_1", False),
    ],
)
def test_tensors_are_those_that_transformers_reads(family: str, kind: str, tied: bool, tmp_path: Path) -> None:
    """F32 is exact. What transformers cannot read from a file without a tokenizer is compared with the package's own expansion."""
    import gguf

    model = tiny_model(family, tie_word_embeddings=tied)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path, family, kind)
    found = open_folder(path)
    assert found.model.norm_eps == 1e-5, "not the nearest number of fp32"
    assert (found.family, found.model.tie_embeddings, found.record.special_ids) == (family, tied, {"eos_token_id": 7})
    assert bool(found.notes) == kind.startswith("Q")
    for name, expected in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        ours = found.files.read(name)
        stored = gguf.GGMLQuantizationType[kind if expected.ndim == 2 else "F32"]
        wide = gguf.dequantize(gguf.quantize(expected.detach().numpy(), stored), stored)
        assert str(ours.dtype) == {"F16": "torch.float16", "BF16": "torch.bfloat16"}.get(stored.name, "torch.float32")
        assert torch.equal(ours.float(), torch.from_numpy(wide).float()), name
    assert (
        sum(1 for _ in found.shards()) == len(found.exchanges)
        and found.files.tensors.keys() <= model.state_dict().keys()
    )
    assert ModelConfig.model_validate(found.sections["model"]).ffn_size == KEYS["intermediate_size"]


def test_fields_that_are_not_built_are_all_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model("llama"), path, "llama", expert_count=8, **{"attention.value_length": 8})
    with pytest.raises(ConfigError) as caught:
        open_folder(path)
    assert len(caught.value.problems) == 2
    assert "llama.expert_count = 8: not a field" in str(caught.value)
    assert "llama.attention.value_length = 8: must be the size of a head, 16" in str(caught.value)


def test_another_architecture_and_damage_are_named(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"general\.architecture = mamba: must be one of llama"):
        open_folder(path)
    write_gguf(tiny_model("qwen3"), tmp_path / "other.gguf", "qwen3")
    whole = (tmp_path / "other.gguf").read_bytes()
    for size in (3, 100, len(whole) // 2):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="is not a complete GGUF file"):
            open_folder(path)
    with pytest.raises(
        CheckpointError, match=r"has its weights as GGUF: give the path of one file, such as .*other\.gguf"
    ):
        open_folder(tmp_path)
