"""Read a llama.cpp GGUF file as the Hugging Face folder it was converted from.

    general.architecture = llama, llama.embedding_length = 576, ..    ->  {"model_type": "llama", "hidden_size": 576, ..}
    blk.3.attn_q.weight                                               ->  model.layers.3.self_attn.q_proj.weight

The gguf package reads the file and expands quantized tensors to fp32. Key names are from gguf/constants.py, and the row order of a
llama's queries and keys is from `LlamaModel.permute` in llama.cpp's converter.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from triaxis.engine.checkpoint.format.store import TORCH_DTYPES
from triaxis.engine.errors import CheckpointError, ConfigError, shown
from triaxis.engine.program import install
from triaxis.models.interop.huggingface.families import FAMILIES
from triaxis.models.interop.huggingface.files import TensorPlan


@dataclass(frozen=True, slots=True)
class Architecture:
    """GGUF architecture that maps to a supported family.

    Attributes:
        family: the family's `model_type`.
        turns_neighbours: whether RoPE turns the row pairs (2 i, 2 i + 1) of a head's queries and keys, instead of (i, i + d / 2)
            for head size d.
    """

    family: str
    turns_neighbours: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", turns_neighbours=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
}
"""Architectures by `general.architecture`. GGUF stores a Mistral without a window as llama."""

_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""GGUF architecture field -> config.json key."""

_AS_HEADS = ("attention.value_length", "rope.dimension_count")
"""Fields that must equal the head size."""

_IDS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
    "tokenizer.ggml.unknown_token_id": "unk_token_id",
}

_AS_STORED = {"F64": "F64", "F32": "F32", "F16": "F16", "BF16": "BF16"}
"""GGUF types read unchanged -> their safetensors names. Quantized types become F32."""


class GgufFile:
    """The tensors in a GGUF file, under their family's names.

    Attributes:
        folder: path of the GGUF file; `WeightFiles` has this attribute for its folder.
        keys: the equivalent config.json keys.
        tensors: shape and dtype of each tensor as `read` returns it, by name. A tensor that the family lacks keeps its GGUF name.
        notes: which quantizations were expanded, as text for the user.

    Raises:
        CheckpointError: the gguf package is missing, or the file is damaged.
        ConfigError: the architecture or some fields are not supported.
    """

    def __init__(self, path: Path) -> None:
        self.folder = path
        try:
            import gguf
        except ImportError:
            raise CheckpointError(
                f"{path} is a GGUF file, and the package gguf is not installed: it cannot be read. Install it with  "
                f"{install('hf')}"
            ) from None
        self._gguf = gguf
        try:
            reader = gguf.GGUFReader(path)
            fields = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, OSError, KeyError, IndexError) as error:
            raise CheckpointError(
                f"{path} is not a complete GGUF file: {error}. Its tensors cannot be trusted. Get it again."
            ) from None
        name = str(fields.get("general.architecture"))
        if name not in ARCHITECTURES:
            raise ConfigError(
                [f"general.architecture = {name}: must be one of {', '.join(ARCHITECTURES)}; no other one is read."],
                str(path),
            )
        self._architecture = ARCHITECTURES[name]
        self.keys = self._read_keys(name, fields, tied="output.weight" not in {each.name for each in reader.tensors})
        names = self._names(name)
        self._tensors = {names.get(each.name, each.name): each for each in reader.tensors}
        self.tensors = {name: self._plan(name) for name in self._tensors}
        kinds = Counter(each.tensor_type.name for each in reader.tensors if each.tensor_type.name not in _AS_STORED)
        listed = ", ".join(f"{count} as {kind}" for kind, count in sorted(kinds.items()))
        self.notes = (f"tensors are quantized ({listed}) and were expanded to fp32",) if kinds else ()

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor to the CPU, in the dtype that `tensors` states.

        Raises:
            CheckpointError: the gguf package cannot expand this quantization.
        """
        stored, plan = self._tensors[name], self.tensors[name]
        try:
            wide = stored.tensor_type.name in ("F64", "F32", "F16")
            values = stored.data if wide else self._gguf.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.folder}: {name} is quantized as {stored.tensor_type.name}, which the package gguf cannot expand. Get a "
                "file in F16, BF16 or F32."
            ) from None
        tensor = torch.from_numpy(np.array(values)).reshape(plan.shape)
        if plan.dtype == "BF16":
            tensor = tensor.to(TORCH_DTYPES["bfloat16"])
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads is not None and self._architecture.turns_neighbours:
            tensor = tensor.unflatten(0, (int(self.keys[heads]), -1, 2)).transpose(1, 2).flatten(0, 2)
        return tensor

    def _plan(self, name: str) -> TensorPlan:
        stored = self._tensors[name]
        shape = tuple(int(size) for size in reversed(stored.shape))
        return TensorPlan(name, shape, _AS_STORED.get(stored.tensor_type.name, "F32"))

    def _names(self, architecture: str) -> dict[str, str]:
        """Map tensor names in the file to the family's names."""
        number = next(each for each, name in self._gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        of_file = self._gguf.get_tensor_name_map(number, int(self.keys["num_hidden_layers"]))
        found = {}
        for name in self._names_of_family():
            base, _, ending = name.rpartition(".")
            if (given := of_file.get_name(base)) is not None:
                found[f"{given}.{ending}"] = name
        return found

    def _names_of_family(self) -> Iterator[str]:
        naming = FAMILIES[self._architecture.family].naming
        yield from (name for _, theirs in (*naming.first, *naming.last) for name in theirs)
        for number in range(self.keys["num_hidden_layers"]):
            yield from (naming.layer_prefix.format(number) + name for _, theirs in naming.layer for name in theirs)

    def _read_keys(self, architecture: str, fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
        """Convert GGUF fields to config.json keys.

        Raises:
            ConfigError: fields are missing or unknown; or a head's value size or rotated size (_AS_HEADS) is not the head size.
        """
        keys: dict[str, Any] = {"model_type": self._architecture.family, "tie_word_embeddings": tied}
        keys |= {key: int(fields[name]) for name, key in _IDS.items() if name in fields}
        of_model = {
            name.removeprefix(f"{architecture}."): _plain(value)
            for name, value in fields.items()
            if name.startswith(f"{architecture}.")
        }
        of_model.setdefault("vocab_size", len(fields.get("tokenizer.ggml.tokens", ())) or None)
        keys |= {key: of_model[name] for name, key in _KEYS.items() if of_model.get(name) is not None}
        problems = [
            f"{architecture}.{name} = {shown(value)}: not a field that is known here; the model would be another one."
            for name, value in of_model.items()
            if name not in _KEYS and name not in _AS_HEADS
        ]
        needed = ("block_count", "embedding_length", "attention.head_count")
        missing = [
            f"{architecture}.{name} is missing: the model has no shape." for name in needed if name not in of_model
        ]
        if not missing:
            heads = keys["num_attention_heads"]
            keys.setdefault("num_key_value_heads", heads)
            size = keys.setdefault("head_dim", keys["hidden_size"] // heads)
            problems += [
                f"{architecture}.{name} = {of_model[name]}: must be the size of a head, {size}; nothing else is built."
                for name in _AS_HEADS
                if of_model.get(name, size) != size
            ]
        if problems := [*missing, *problems]:
            raise ConfigError(problems, str(self.folder))
        return keys


def _plain(value: Any) -> Any:
    """Replace a float stored as fp32 by the shortest decimal with the same fp32 value."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
