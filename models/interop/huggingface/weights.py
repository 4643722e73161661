"""Weights of Hugging Face models as ours, and ours as theirs: names and layouts of the tensors.

    ours  layers.3.attention.q.weight  [heads, d, h]   kv.weight [2, kv_heads, d, h]   proj.weight [h, heads, d]
    Llama model.layers.3.self_attn.{q,k,v}_proj.weight  [out, in]                      o_proj.weight [h, heads d]
    GPT-2 transformer.h.3.attn.c_attn.weight            [in, q out + k out + v out]    c_proj.weight [heads d, h]

Every tensor of ours is a matrix [out, in] or a vector seen with more dims. An exchange joins some of ours along `out` and cuts the
result into equal parts that are theirs; GPT-2 keeps matrices as [in, out]. Nothing is permuted within a head: RoPE turns
the pair (i, i + d/2) in both. The order of gate before up, and of keys before values, is that of the tables below.

Memory: one exchange at a time, here and in what reads and writes the files (`files.py`).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.directory import Candidate
from engine.checkpoint.format.store import DTYPE_NAMES, Shard
from engine.checkpoint.import_weights import read_tensor, whole
from engine.config.model import ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.layout.shard_spec import ParamSpec
from engine.storage.json_text import parse_json
from models.interop.finite import check_finite
from models.interop.huggingface.config import from_hugging_face, passed_over_notes
from models.interop.huggingface.files import DTYPES, TensorPlan, WeightFiles, format_name
from models.interop.huggingface.record import ImportRecord, record_of
from models.specs import model_specs

Names = tuple[str, ...]
Table = Sequence[tuple[Names, Names]]

_LLAMA_FIRST: Table = ((("embedding.word.weight",), ("model.embed_tokens.weight",)),)
_LLAMA_LAST: Table = (
    (("final_norm.weight",), ("model.norm.weight",)),
    (("head.weight",), ("lm_head.weight",)),
)
_LLAMA_LAYER: Table = (
    (("attention.norm.weight",), ("input_layernorm.weight",)),
    (("attention.q.weight",), ("self_attn.q_proj.weight",)),
    (("attention.kv.weight",), ("self_attn.k_proj.weight", "self_attn.v_proj.weight")),
    (("attention.q.bias",), ("self_attn.q_proj.bias",)),
    (("attention.kv.bias",), ("self_attn.k_proj.bias", "self_attn.v_proj.bias")),
    (("attention.q_norm.weight",), ("self_attn.q_norm.weight",)),
    (("attention.k_norm.weight",), ("self_attn.k_norm.weight",)),
    (("attention.proj.weight",), ("self_attn.o_proj.weight",)),
    (("mlp.norm.weight",), ("post_attention_layernorm.weight",)),
    (("mlp.gate_up.weight",), ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    (("mlp.down.weight",), ("mlp.down_proj.weight",)),
)
_GPT2_FIRST: Table = (
    (("embedding.word.weight",), ("transformer.wte.weight",)),
    (("embedding.position.weight",), ("transformer.wpe.weight",)),
)
_GPT2_LAST: Table = (
    (("final_norm.weight",), ("transformer.ln_f.weight",)),
    (("final_norm.bias",), ("transformer.ln_f.bias",)),
    (("head.weight",), ("lm_head.weight",)),
)
_GPT2_LAYER: Table = (
    (("attention.norm.weight",), ("ln_1.weight",)),
    (("attention.norm.bias",), ("ln_1.bias",)),
    (("attention.q.weight", "attention.kv.weight"), ("attn.c_attn.weight",)),
    (("attention.q.bias", "attention.kv.bias"), ("attn.c_attn.bias",)),
    (("attention.proj.weight",), ("attn.c_proj.weight",)),
    (("attention.proj.bias",), ("attn.c_proj.bias",)),
    (("mlp.norm.weight",), ("ln_2.weight",)),
    (("mlp.norm.bias",), ("ln_2.bias",)),
    (("mlp.up.weight",), ("mlp.c_fc.weight",)),
    (("mlp.up.bias",), ("mlp.c_fc.bias",)),
    (("mlp.down.weight",), ("mlp.c_proj.weight",)),
    (("mlp.down.bias",), ("mlp.c_proj.bias",)),
)


@dataclass(frozen=True, slots=True)
class Naming:
    """The names of a family's tensors.

    Attributes:
        first, last: tensors before and after the layers.
        layer: those of a layer, without `layers.N.` and `layer_prefix`.
        layer_prefix: theirs, with {} for the layer's number.
        base_prefix: what names lack in a file that was saved from the model without its head.
        transposed: their linear layers keep [in, out].
        buffers: tensors of old files that are constants, not weights.
    """

    first: Table
    layer: Table
    last: Table
    layer_prefix: str
    base_prefix: str
    transposed: bool
    buffers: re.Pattern[str]


_LLAMA_NAMING = Naming(
    first=_LLAMA_FIRST,
    layer=_LLAMA_LAYER,
    last=_LLAMA_LAST,
    layer_prefix="model.layers.{}.",
    base_prefix="model.",
    transposed=False,
    buffers=re.compile(r".*\.self_attn\.rotary_emb\.inv_freq"),
)
NAMINGS: Mapping[str, Naming] = {
    "gpt2": Naming(
        first=_GPT2_FIRST,
        layer=_GPT2_LAYER,
        last=_GPT2_LAST,
        layer_prefix="transformer.h.{}.",
        base_prefix="transformer.",
        transposed=True,
        buffers=re.compile(r".*h\.\d+\.attn\.(masked_)?bias"),
    ),
    "llama": _LLAMA_NAMING,
    "mistral": _LLAMA_NAMING,
    "qwen2": _LLAMA_NAMING,
    "qwen3": _LLAMA_NAMING,
}
"""By `model_type`, as in `hf_config.FAMILIES`."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tensors of ours and of theirs that hold the same numbers.

    Attributes:
        ours: specs, joined along their output dim in this order.
        theirs: names of the equal parts into which the join is cut.
        transposed: theirs are [in, out].
    """

    ours: tuple[ParamSpec, ...]
    theirs: Names
    transposed: bool

    def to_theirs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Convert tensors in our shapes, in the order of `ours`, to theirs in the order of `theirs`."""
        parts = [tensor.reshape(_matrix_shape(spec)) for spec, tensor in zip(self.ours, tensors, strict=True)]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return [self._transpose(part) for part in joined.chunk(len(self.theirs))]

    def to_ours(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Convert the other way."""
        parts = [self._transpose(tensor) for tensor in tensors]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        cut = joined.split([_matrix_shape(spec)[0] for spec in self.ours])
        return [part.reshape(spec.shape) for spec, part in zip(self.ours, cut, strict=True)]

    def plans(self, dtype: torch.dtype) -> list[TensorPlan]:
        """Return their names and shapes, found by a conversion on the meta device."""
        nothing = [torch.empty(spec.shape, device="meta") for spec in self.ours]
        shapes = [tuple(tensor.shape) for tensor in self.to_theirs(nothing)]
        return [TensorPlan(name, shape, format_name(dtype)) for name, shape in zip(self.theirs, shapes, strict=True)]

    def _transpose(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t() if self.transposed and tensor.ndim == 2 else tensor


def exchanges(family: str, model: ModelConfig) -> list[Exchange]:
    """List the exchanges of all of the model's tensors, in forward order."""
    naming = NAMINGS[family]
    specs = {spec.name: spec for spec in model_specs(model)}
    rows = list(naming.first)
    for number in range(model.num_layers):
        ours_prefix, prefix = f"layers.{number}.", naming.layer_prefix.format(number)
        rows += [
            (tuple(f"{ours_prefix}{name}" for name in ours), tuple(f"{prefix}{name}" for name in theirs))
            for ours, theirs in naming.layer
        ]
    rows += naming.last
    found = [
        # Tables of embeddings and the head are [V, h] everywhere; what GPT-2 turns are the layers' matrices.
        Exchange(tuple(specs.pop(name) for name in ours), theirs, naming.transposed and ours[0].startswith("layers."))
        for ours, theirs in rows
        if ours[0] in specs
    ]
    assert not specs, f"no tensor of a {family} holds {sorted(specs)}"
    return found


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """A checked folder: its config is one that we can build, and its tensors are those of that config.

    Attributes:
        sections: of our configuration: `model`, and what else the model needs.
        exchanges: of the tensors as they are stored.
        files: the weights; names as in the files.
        prefix: what the files' names lack.
        record: facts that an export gives back.
    """

    family: str
    model: ModelConfig
    sections: dict[str, dict[str, Any]]
    exchanges: Sequence[Exchange]
    files: WeightFiles
    prefix: str
    notes: tuple[str, ...]
    record: ImportRecord

    def shards(
        self, dtype: torch.dtype | None = None, on_tensor: Callable[[int], None] = lambda num_bytes: None
    ) -> Iterator[Shard]:
        """Yield all our tensors, one exchange in memory at a time, in `dtype` (None: that of the file).

        `on_tensor` receives the bytes read of the files.

        Raises:
            CheckpointError: a tensor has elements that are not finite.
        """
        for exchange in self.exchanges:
            names = [name.removeprefix(self.prefix) for name in exchange.theirs]
            theirs = [self.files.read(name) for name in names]
            for name, tensor in zip(names, theirs, strict=True):
                check_finite(tensor, name, self.files.folder)
            for spec, values in zip(exchange.ours, exchange.to_ours(theirs), strict=True):
                if spec.name == "embedding.position.weight":
                    values = values[: self.model.seq_length]
                yield whole(spec.name, values if dtype is None else values.to(dtype))
            on_tensor(sum(tensor.nbytes for tensor in theirs))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weights in the files."""
        names = [name.removeprefix(self.prefix) for exchange in self.exchanges for name in exchange.theirs]
        return sum(self.files.tensors[name].num_bytes for name in names)


def open_folder(folder: Path, seq_length: int | None = None, ignore: Sequence[str] = ()) -> HuggingFaceModel:
    """Open a Hugging Face model and check all of it from the headers.

    Args:
        folder: with config.json and safetensors.
        seq_length: our samples' length in place of the longest that the model was made for.
        ignore: unknown keys of config.json that are accepted.

    Raises:
        ConfigError: of another family, or with features that are not built, by name.
        CheckpointError: pickles, or files that are missing, damaged, or of another model.
    """
    keys = read_config(folder / "config.json")
    sections = from_hugging_face(keys, seq_length, str(folder / "config.json"), ignore)
    model = ModelConfig.model_validate(sections["model"])
    family = str(keys["model_type"])
    # A table of learned positions is stored whole, and cut where samples are shorter.
    stored = model
    if model.position_kind.has_table:
        stored = ModelConfig.model_validate(from_hugging_face(keys, None, str(folder / "config.json"), ignore)["model"])
    found = HuggingFaceModel(
        family=family,
        model=model,
        sections=sections,
        exchanges=exchanges(family, stored),
        files=(files := WeightFiles(folder)),
        prefix=_missing_prefix(files, NAMINGS[family]),
        notes=(*_notes(model, stored.seq_length), *passed_over_notes(keys, ignore)),
        record=record_of(folder, keys, {key: keys[key] for key in ignore}),
    )
    if problems := list(_mismatches(found)):
        shown = problems[:12] + ([f"and {len(problems) - 12} more"] if len(problems) > 12 else [])
        raise CheckpointError(
            f"the tensors of {folder} are not those of its config.json ({family}); importing them would leave weights random or "
            "lose some. Get files and config of one model:\n" + "\n".join(f"  {text}" for text in shown)
        )
    return found


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json as a mapping.

    Raises:
        ConfigError: it is not there, or no mapping.
    """
    try:
        keys: Any = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"it cannot be read as JSON: {error}. Give the folder of a model."], str(path)) from error
    if not isinstance(keys, dict):
        raise ConfigError(["it is no mapping of keys to values. Give the folder of a model."], str(path))
    return keys


@dataclass(frozen=True, slots=True)
class Export:
    """Our checkpoint as their tensors, in the order in which they are written.

    Attributes:
        dtype: of the word embedding, in torch's word: what config.json says.
    """

    candidate: Candidate
    exchanges: Sequence[Exchange]
    plans: Sequence[TensorPlan]
    dtype: str

    def tensors(self, on_tensor: Callable[[int], None] = lambda num_bytes: None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and values, one exchange in memory at a time; `on_tensor` receives the bytes read of the checkpoint."""
        folder, manifest = self.candidate.folder, self.candidate.manifest
        for exchange in self.exchanges:
            ours = [read_tensor(folder, manifest, spec.name) for spec in exchange.ours]
            yield from zip(exchange.theirs, exchange.to_theirs(ours), strict=True)
            on_tensor(sum(tensor.nbytes for tensor in ours))


def plan_export(candidate: Candidate, family: str, model: ModelConfig, dtype: torch.dtype | None = None) -> Export:
    """Plan the tensors that an export of this checkpoint writes.

    Args:
        candidate: of any layout; only its weights are read.
        family: one that can express the model (`hf_config.to_hugging_face`).
        dtype: None: that in which each tensor was saved (masters are fp32 or float64).

    Raises:
        CheckpointError: its tensors are not those of its model section.
    """
    manifest = candidate.manifest
    wanted = {spec.name: spec.shape for spec in model_specs(model)}
    there = {name: info.shape for name, info in manifest.tensors.items()}
    if differing := sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name)):
        name = differing[0]
        raise CheckpointError(
            f"{candidate.folder}: {name} has the shape {there.get(name)}, and its model section needs {wanted.get(name)} "
            f"({len(differing)} such tensors): the export would be another model. Make the checkpoint again."
        )
    saved = {piece.name: piece.dtype for file in manifest.files for piece in file.pieces if piece.kind == "master"}
    by_name = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    found = exchanges(family, model)
    plans: list[TensorPlan] = []
    for exchange in found:
        source = reduce(torch.promote_types, (by_name[saved[spec.name]] for spec in exchange.ours))
        plans += exchange.plans(source if dtype is None else dtype)
    return Export(candidate, found, plans, DTYPE_NAMES[DTYPES[plans[0].dtype]])


def _matrix_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Return [out, in] of a weight, [out] of a bias or norm."""
    if spec.name.endswith(".bias") or len(spec.shape) == 1:
        return (spec.numel,)
    # The output projection reads heads; every other weight of more than two dims writes them.
    out = spec.shape[0] if spec.name.endswith(".proj.weight") else math.prod(spec.shape[:-1])
    return (out, spec.numel // out)


def _missing_prefix(files: WeightFiles, naming: Naming) -> str:
    """Return `transformer.` where a file was saved from the model without its head, whose names lack it; else ""."""
    return "" if any(name.startswith(naming.base_prefix) for name in files.tensors) else naming.base_prefix


def _notes(model: ModelConfig, rows: int) -> tuple[str, ...]:
    if model.position_kind.has_table and rows != model.seq_length:
        return (f"of the {rows:,} learned positions the first {model.seq_length:,} are kept",)
    return ()


def _mismatches(found: HuggingFaceModel) -> Iterator[str]:
    there = dict(found.files.tensors)
    for exchange in found.exchanges:
        for plan in exchange.plans(DTYPES["BF16"]):
            stored = there.pop(plan.name.removeprefix(found.prefix), None)
            if stored is None:
                yield f"{plan.name.removeprefix(found.prefix)} {list(plan.shape)} is missing"
            elif stored.shape != plan.shape:
                yield f"{stored.name} has the shape {list(stored.shape)}; the config makes it {list(plan.shape)}"
            elif stored.dtype not in DTYPES:
                yield f"{stored.name} is {stored.dtype}; weights may be {', '.join(DTYPES)}"
    naming = NAMINGS[found.family]
    for name, stored in there.items():
        if naming.buffers.fullmatch(name):
            continue
        if name == "lm_head.weight" and found.model.tie_embeddings:
            word = found.exchanges[0].theirs[0].removeprefix(found.prefix)
            same = word in found.files.tensors and stored.shape == found.files.tensors[word].shape
            if not (same and torch.equal(found.files.read(name), found.files.read(word))):
                yield f"{name} differs from {word}, and tie_word_embeddings says that they are one"
            continue
        yield f"{name} {list(stored.shape)} is not a tensor of this model"
