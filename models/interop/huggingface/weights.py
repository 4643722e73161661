"""Convert weights between Hugging Face models' names and layouts and ours.

These lines name the same tensors, with their shapes, here and in two families:

    ours  layers.3.attention.q.weight  [heads, d, h]   kv.weight [2, kv_heads, d, h]   proj.weight [h, heads, d]
    Llama model.layers.3.self_attn.{q,k,v}_proj.weight  [out, in]                      o_proj.weight [h, heads d]
    GPT-2 transformer.h.3.attn.c_attn.weight            [in, q out + k out + v out]    c_proj.weight [heads d, h]

Each of our tensors is an [out, in] matrix or a vector, viewed with more dims. An `Exchange` concatenates some of our tensors along
`out`. It splits the result into equal parts, which are their tensors. The tables (`namings.py`) set the order: gate before up, keys
before values.

RoPE turns the pair (i, i + d/2) in a head of size d, here and in all families but DeepSeek's. The rows of DeepSeek's heads are
[not rotated | pairs (2 i, 2 i + 1)]. Ours are [first rows of all pairs | second rows of all pairs | not rotated].

Our expert tensors are [E, ..] for E experts. Most files store each expert separately; others store one tensor [E, out, in].
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from triaxis.engine.checkpoint.directory import Candidate
from triaxis.engine.checkpoint.format.store import DTYPE_NAMES, Shard
from triaxis.engine.checkpoint.import_weights import read_weights, whole
from triaxis.engine.checkpoint.inspect.weights import WhichWeights
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import CheckpointError, counted
from triaxis.engine.layout.shard_spec import ParamSpec
from triaxis.engine.numerics.precision import accumulation_dtype
from triaxis.models.interop.finite import check_finite
from triaxis.models.interop.huggingface.config import (
    QUANTIZATION,
    fp8_block,
    from_hugging_face,
    passed_over_notes,
    read_config_json,
    text_keys,
)
from triaxis.models.interop.huggingface.families import FAMILIES
from triaxis.models.interop.huggingface.family import Family, Names, Naming, Table
from triaxis.models.interop.huggingface.files import DTYPES, TensorPlan, WeightFiles, format_name
from triaxis.models.interop.huggingface.fp8_files import Fp8Files
from triaxis.models.interop.huggingface.gguf_file import GgufFile
from triaxis.models.interop.huggingface.record import ImportRecord, record_of
from triaxis.models.specs import model_specs

Files = WeightFiles | Fp8Files | GgufFile

OF_LANGUAGE = "language_model."
"""Prefix for the language model's tensors in a multi-part model."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Our tensors and the Hugging Face tensors that hold the same numbers.

    Attributes:
        ours: our specs. Concatenated in this order along the output dim, their tensors give one matrix.
        theirs: names of the Hugging Face tensors, equal parts of that matrix, in order.
        transposed: whether Hugging Face stores the matrices as [in, out].
        num_heads: number of heads if the Hugging Face rows are ordered [heads, parts, d]; 0 if they are ordered part by part, as
            ours always are.
        num_experts: number of experts E if `ours` is one tensor of all experts, otherwise 0. With experts, `theirs` lists equally
            many tensors for each expert, expert by expert, or one tensor [E, out, in].
        row_order: order of rows within each group of `len(row_order)` rows; empty if the order is the same. Row i of our group is
            row `row_order[i]` of the Hugging Face group.
    """

    ours: tuple[ParamSpec, ...]
    theirs: Names
    transposed: bool
    num_heads: int = 0
    num_experts: int = 0
    row_order: tuple[int, ...] = ()

    @property
    def is_by_expert(self) -> bool:
        """Whether each Hugging Face tensor belongs to one expert."""
        return 0 < self.num_experts <= len(self.theirs)

    def by_expert(self) -> Iterator[tuple[int, Names]]:
        """Yield each expert's index and Hugging Face tensor names; nothing if each tensor holds all experts."""
        count = len(self.theirs) // self.num_experts if self.num_experts else 0
        for expert in range(self.num_experts if self.is_by_expert else 0):
            yield expert, self.theirs[expert * count : (expert + 1) * count]

    def to_theirs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Convert our tensors, ordered as `ours`, to the Hugging Face tensors, ordered as `theirs`."""
        parts = [tensor.reshape(_matrix_shape(spec)) for spec, tensor in zip(self.ours, tensors, strict=True)]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.num_heads:
            joined = _swapped(joined, len(joined) // self._rows_of_a_part, self.num_heads)
        if self.row_order:
            joined = _reordered(joined, sorted(range(len(self.row_order)), key=self.row_order.__getitem__))
        if self.num_experts and not self.is_by_expert:
            return [joined.unflatten(0, (self.num_experts, -1))]
        return [self._transpose(part) for part in joined.chunk(len(self.theirs))]

    def to_ours(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Convert the Hugging Face tensors, ordered as `theirs`, to our tensors, ordered as `ours`."""
        parts = [self._transpose(tensor if tensor.ndim < 3 else tensor.flatten(0, 1)) for tensor in tensors]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.num_heads:
            joined = _swapped(joined, self.num_heads, len(joined) // self._rows_of_a_part)
        if self.row_order:
            joined = _reordered(joined, self.row_order)
        cut = joined.split([_matrix_shape(spec)[0] for spec in self.ours])
        return [part.reshape(spec.shape) for spec, part in zip(self.ours, cut, strict=True)]

    def plans(self, dtype: torch.dtype) -> list[TensorPlan]:
        """List the Hugging Face tensors' names and shapes, with weights in `dtype`."""
        nothing = [torch.empty(spec.shape, device="meta") for spec in self.ours]
        shapes = [tuple(tensor.shape) for tensor in self.to_theirs(nothing)]
        return [TensorPlan(name, shape, format_name(dtype)) for name, shape in zip(self.theirs, shapes, strict=True)]

    @property
    def _rows_of_a_part(self) -> int:
        """Number of rows that the queries of all heads have together.

        The keys have as many rows, and so do the values. Only valid if `num_heads` is not 0.
        """
        return _matrix_shape(self.ours[0])[0]

    def _transpose(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t() if self.transposed and tensor.ndim == 2 else tensor


def exchanges(family: str, model: ModelConfig, naming: Naming | None = None) -> list[Exchange]:
    """List pairings (`Exchange`) of our tensors with Hugging Face's, for all tensors in forward order.

    `naming` is the family's naming, or its `fused`, for files with one tensor for all experts; None: the family's naming.
    """
    naming = naming or FAMILIES[family].naming
    specs = {spec.name: spec for spec in model_specs(model)}
    found: list[Exchange] = []

    def add(rows: Table, ours_prefix: str = "", prefix: str = "") -> None:
        for ours, theirs in rows:
            if f"{ours_prefix}{ours[0]}" in specs:
                held = tuple(specs.pop(f"{ours_prefix}{name}") for name in ours)
                num_heads = model.num_attention_heads if naming.by_head.intersection(theirs) else 0
                order = _row_order(held[0], model) if naming.interleaved.intersection(theirs) else ()
                # Embedding tables and the head are [V, h] everywhere; GPT-2 transposes only the layers' matrices.
                found.append(
                    Exchange(
                        held,
                        tuple(f"{prefix}{name}" for name in theirs),
                        naming.transposed and bool(prefix),
                        num_heads,
                        row_order=order,
                    )
                )

    def add_experts(ours_prefix: str, prefix: str) -> None:
        for (ours,), theirs in naming.experts:
            if (spec := specs.pop(f"{ours_prefix}{ours}", None)) is not None:
                count = spec.shape[0]
                is_each = any("{}" in name for name in theirs)
                names = [name.format(expert) for expert in range(count if is_each else 1) for name in theirs]
                found.append(Exchange((spec,), tuple(f"{prefix}{name}" for name in names), False, num_experts=count))

    add(naming.first)
    for number in range(model.num_layers + model.num_mtp_layers):
        add((*naming.layer, *naming.ahead), f"layers.{number}.", naming.layer_prefix.format(number))
        add_experts(f"layers.{number}.", naming.layer_prefix.format(number))
    add(naming.last)
    assert not specs, f"no tensor of a {family} holds {sorted(specs)}"
    return found


def copies(family: str, model: ModelConfig) -> Iterator[Exchange]:
    """Pair our tensors with their copies in multi-token prediction layers. An import only compares the two."""
    naming, specs = FAMILIES[family].naming, {spec.name: spec for spec in model_specs(model)}
    for number in range(model.num_layers, model.num_layers + model.num_mtp_layers):
        for (ours,), (theirs,) in naming.copies:
            name = "embedding.word.weight" if ours == "head.weight" and model.tie_embeddings else ours
            yield Exchange((specs[name],), (f"{naming.layer_prefix.format(number)}{theirs}",), transposed=False)


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """An opened folder whose config is supported and whose tensors match the config.

    Attributes:
        sections: config sections: `model`, and others if the model needs them.
        exchanges: pairings of our tensors with the files' tensors; together they cover the whole model.
        spelling: function (a family's tensor name) -> the tensor's name in the files.
        is_part: whether the files hold a model of several parts, of which the language model is imported.
        notes: what the import leaves out or changes, as text for the user.
        record: facts that a later export restores.
    """

    family: str
    model: ModelConfig
    sections: dict[str, dict[str, Any]]
    exchanges: Sequence[Exchange]
    files: Files
    spelling: Callable[[str], str]
    is_part: bool
    notes: tuple[str, ...]
    record: ImportRecord

    def shards(
        self, dtype: torch.dtype | None = None, on_tensor: Callable[[int], None] = lambda num_bytes: None
    ) -> Iterator[Shard]:
        """Yield our tensors in `dtype`, loading one expert or `Exchange` (paired tensors) at a time.

        If `dtype` is None, each tensor keeps the file's dtype. A bias for choosing experts stays at least fp32. Learned positions
        beyond `seq_length` are dropped. `on_tensor` receives the number of bytes read from the files.

        Raises:
            CheckpointError: a tensor has elements that are not finite.
        """
        for exchange in self.exchanges:
            for expert, names in exchange.by_expert():
                (spec,), theirs = exchange.ours, self._read(names)
                values = torch.cat(theirs).reshape(-1)
                box = ((expert, expert + 1), *((0, size) for size in spec.shape[1:]))
                yield Shard(spec.name, "master", spec.shape, box, 0, values if dtype is None else values.to(dtype))
                on_tensor(sum(tensor.nbytes for tensor in theirs))
            if exchange.is_by_expert:
                continue
            theirs = self._read(exchange.theirs)
            for spec, values in zip(exchange.ours, exchange.to_ours(theirs), strict=True):
                if spec.name == "embedding.position.weight":
                    values = values[: self.model.seq_length]
                yield whole(spec.name, values if dtype is None else values.to(_kept(spec, dtype)))
            on_tensor(sum(tensor.nbytes for tensor in theirs))

    def _read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Read tensors by the family's names, and check that they are finite."""
        theirs = []
        for name in map(self.spelling, names):
            theirs.append(self.files.read(name))
            check_finite(theirs[-1], name, self.files.folder)
        return theirs

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of the weights in the files."""
        names = [self.spelling(name) for exchange in self.exchanges for name in exchange.theirs]
        return sum(self.files.tensors[name].num_bytes for name in names)


def open_folder(folder: Path, seq_length: int | None = None, ignore: Sequence[str] = ()) -> HuggingFaceModel:
    """Open a Hugging Face model and check its tensors by the files' headers.

    Copies of embedding and head are read, since they must equal the original. `model.mtp` is dropped if no file has its layers.

    Args:
        folder: folder with config.json and safetensors, or a `.gguf` file.
        seq_length: sample length to train with; None uses the model's maximum.
        ignore: unknown config.json keys to accept.

    Raises:
        ConfigError: the family or some features are not supported; the error names them.
        CheckpointError: the weights are pickles, or GGUF in a folder; or files are missing, damaged, or of another model.
    """
    if (ggufs := sorted(folder.glob("*.gguf"))) and not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has its weights as GGUF: give the path of one file, such as {ggufs[0]}.")
    gguf = GgufFile(folder) if folder.suffix == ".gguf" else None
    source = str(folder if gguf is not None else folder / "config.json")
    whole_keys = read_config_json(Path(source)) if gguf is None else gguf.keys
    keys = text_keys(whole_keys)
    sections = from_hugging_face(keys, seq_length, source, ignore)
    family = str(keys["model_type"])
    files: Files = gguf if gguf is not None else _files(folder, keys)
    model = ModelConfig.model_validate(sections["model"])
    notes = []
    if model.mtp is not None and all(_place_behind(name, model, FAMILIES[family]) is None for name in files.tensors):
        notes.append(
            f"config.json names {counted(model.num_mtp_layers, 'layer')} to predict further tokens, and the files have none: "
            "model.mtp is null"
        )
        del sections["model"]["mtp"]
        model = ModelConfig.model_validate(sections["model"])
    # A learned position table is stored whole, and truncated if samples are shorter.
    stored = model
    if model.position_kind.has_table:
        stored = ModelConfig.model_validate(from_hugging_face(keys, None, source, ignore)["model"])
    naming = _naming(files, FAMILIES[family].naming)
    found = HuggingFaceModel(
        family=family,
        model=model,
        sections=sections,
        exchanges=exchanges(family, stored, naming),
        files=files,
        spelling=_spelling(files, FAMILIES[family].naming),
        is_part="text_config" in whole_keys,
        notes=(
            *notes,
            *_notes(model, stored.seq_length, files, FAMILIES[family]),
            *(() if isinstance(files, WeightFiles) else files.notes),
            *passed_over_notes(whole_keys, ignore),
        ),
        record=record_of(folder, keys, {key: keys[key] for key in ignore}),
    )
    if problems := list(_mismatches(found)):
        shown = problems[:12] + ([f"and {len(problems) - 12} more"] if len(problems) > 12 else [])
        raise CheckpointError(
            f"the tensors of {folder} are not those of its config.json ({family}); importing them would leave weights random or "
            "lose some. Get files and config of one model:\n" + "\n".join(f"  {text}" for text in shown)
        )
    return found


def _files(folder: Path, keys: Mapping[str, Any]) -> WeightFiles | Fp8Files:
    """Open a folder's safetensors, with FP8 weights as bf16."""
    files, block = WeightFiles(folder), fp8_block(keys.get(QUANTIZATION))
    return files if block is None else Fp8Files(files, block)


@dataclass(frozen=True, slots=True)
class Export:
    """A planned export of a checkpoint to a Hugging Face folder.

    Attributes:
        candidate: checkpoint to export.
        exchanges: pairings of our tensors with Hugging Face's, in the order in which they are written.
        plans: name, shape and dtype of each tensor to write, in that order.
        dtype: dtype of the first tensor, the word embedding, as torch spells it, for config.json.
    """

    candidate: Candidate
    exchanges: Sequence[Exchange]
    plans: Sequence[TensorPlan]
    dtype: str

    def tensors(
        self, on_tensor: Callable[[int], None] = lambda num_bytes: None, which: WhichWeights = "trained"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the Hugging Face tensors' names and values in the saved dtype.

        Memory holds one `Exchange` at a time. `which`: trained or averaged weights. `on_tensor` receives the number of bytes read.
        """
        for exchange in self.exchanges:
            ours = [read_weights(self.candidate, spec.name, which) for spec in exchange.ours]
            yield from zip(exchange.theirs, exchange.to_theirs(ours), strict=True)
            on_tensor(sum(tensor.nbytes for tensor in ours))


def plan_export(candidate: Candidate, family: str, model: ModelConfig, dtype: torch.dtype | None = None) -> Export:
    """Plan the tensors to export.

    Args:
        candidate: checkpoint in any layout; only its weights are read.
        family: family that can express the model (see `family_of` in config.py).
        dtype: target dtype, though a bias for choosing experts stays at least fp32; None keeps the saved fp32 or float64.

    Raises:
        CheckpointError: the tensors do not match the checkpoint's model section.
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
    # A moving average has its master's dtype.
    saved = {piece.name: piece.dtype for file in manifest.files for piece in file.pieces if piece.kind == "master"}
    by_name = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    found = [*exchanges(family, model), *copies(family, model)]
    plans: list[TensorPlan] = []
    for exchange in found:
        source = reduce(torch.promote_types, (by_name[saved[spec.name]] for spec in exchange.ours))
        plans += exchange.plans(source if dtype is None else _kept(exchange.ours[0], dtype))
    return Export(candidate, found, plans, DTYPE_NAMES[DTYPES[plans[0].dtype]])


def _kept(spec: ParamSpec, dtype: torch.dtype) -> torch.dtype:
    """Choose a tensor's dtype if weights are converted to `dtype`.

    The bias for choosing experts stays at least fp32, because its updates are small steps.
    """
    return dtype if spec.is_trained else accumulation_dtype(dtype)


def _row_order(spec: ParamSpec, model: ModelConfig) -> tuple[int, ...]:
    """Compute `Exchange.row_order` for DeepSeek's heads, whose RoPE pairs are neighbouring rows (see the module)."""
    assert model.mla is not None
    pairs = range(0, model.mla.qk_rope_head_dim, 2)
    is_key = len(spec.shape) == 2
    first = spec.shape[-2] - model.mla.qk_rope_head_dim
    rotated, others = (*(first + i for i in pairs), *(first + i + 1 for i in pairs)), tuple(range(first))
    # The key comes after its latent in both.
    return (*others, *rotated) if is_key else (*rotated, *others)


def _reordered(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Reorder rows within groups of `len(order)` rows. Row i of a result group is row `order[i]` of the given group."""
    return tensor.unflatten(0, (-1, len(order)))[:, list(order)].flatten(0, 1)


def _swapped(tensor: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Reorder rows from [outer, inner, d] to [inner, outer, d]."""
    return tensor.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def _matrix_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Compute the shape of our tensor without head and part dims. A weight has [out, in], a bias or norm [out]."""
    if spec.name.endswith((".bias", "norm.weight")) or len(spec.shape) == 1:
        return (spec.numel,)
    # The output projection reads heads; every other weight with more than two dims writes them.
    out = spec.shape[0] if spec.name.endswith(".proj.weight") else math.prod(spec.shape[:-1])
    return (out, spec.numel // out)


def _spelling(files: Files, naming: Naming) -> Callable[[str], str]:
    """Find the function from the family's tensor names to the files' names.

    The files' names lack `base_prefix` if the model was saved without its head. In a model of several parts, they also have
    `language_model.`, after `base_prefix`, or at the start in files older than transformers 5.
    """
    base = naming.base_prefix
    embedding = naming.first[0][1][0]
    ways: tuple[Callable[[str], str], ...] = (
        lambda name: name,
        lambda name: name.removeprefix(base),
        lambda name: f"{OF_LANGUAGE}{name}",
        lambda name: name.replace(base, f"{base}{OF_LANGUAGE}", 1),
    )
    has_base = any(name.startswith(base) for name in files.tensors)
    return next((way for way in ways if way(embedding) in files.tensors), ways[0] if has_base else ways[1])


def _naming(files: Files, naming: Naming) -> Naming:
    """Choose the naming that the files follow, `naming` or `naming.fused`."""
    stacked = () if naming.fused is None else tuple(name for _, names in naming.fused.experts for name in names)
    return naming.fused if naming.fused and any(name.endswith(stacked) for name in files.tensors) else naming


def _notes(model: ModelConfig, rows: int, files: Files, family: Family) -> Iterator[str]:
    if model.position_kind.has_table and rows != model.seq_length:
        yield f"of the {rows:,} learned positions the first {model.seq_length:,} are kept"
    if left_out := sum(_is_left_out(name, model, family) for name in files.tensors):
        yield f"layers behind the last, which predict further tokens, were left out ({counted(left_out, 'tensor')})"


def _place_behind(name: str, model: ModelConfig, family: Family) -> int | None:
    """Index of a tensor's layer, from 0, among the layers after the model's last one; None for other tensors."""
    prefix = re.escape(family.naming.layer_prefix.removeprefix(family.naming.base_prefix)).replace(r"\{\}", r"(\d+)")
    match = re.search(rf"(?:^|\.){prefix}", name) if family.further else None
    return None if match is None or int(match[1]) < model.num_layers else int(match[1]) - model.num_layers


def _is_left_out(name: str, model: ModelConfig, family: Family) -> bool:
    """Whether a tensor's layer comes after the model's last layer, counting multi-token prediction layers."""
    place = _place_behind(name, model, family)
    return place is not None and place >= model.num_mtp_layers


def _is_same(files: Files, name: str, other: str) -> bool:
    """Whether two tensors have the same shape, dtype and bits. False if `other` is missing."""
    one, two = files.tensors[name], files.tensors.get(other)
    if two is None or (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    return torch.equal(*(files.read(each).contiguous().view(torch.uint8) for each in (name, other)))


def _mismatches(found: HuggingFaceModel) -> Iterator[str]:
    there = dict(found.files.tensors)
    for exchange in found.exchanges:
        for plan in exchange.plans(DTYPES["BF16"]):
            stored = there.pop(spelled := found.spelling(plan.name), None)
            if stored is None:
                yield f"{spelled} {list(plan.shape)} is missing"
            elif stored.shape != plan.shape:
                yield f"{stored.name} has the shape {list(stored.shape)}; the config makes it {list(plan.shape)}"
            elif stored.dtype not in DTYPES:
                yield f"{stored.name} is {stored.dtype}; weights may be {', '.join(DTYPES)}"
    family, model = FAMILIES[found.family], found.model
    own = {exchange.ours[0].name: found.spelling(exchange.theirs[0]) for exchange in found.exchanges}
    head = found.spelling(family.naming.last[-1][1][0])
    shared = [
        (
            found.spelling(copy.theirs[0]),
            copy.ours[0].name,
            "which the layers that predict further tokens share with the model here",
        )
        for copy in copies(found.family, model)
    ]
    if model.tie_embeddings:
        shared.append((head, "embedding.word.weight", "and tie_word_embeddings says that they are one"))
    for name, word, why in shared:
        if there.pop(name, None) is not None and not _is_same(found.files, name, own[word]):
            yield f"{name} differs from {own[word]}, {why}"
    for name, stored in there.items():
        is_of_another_part = found.is_part and OF_LANGUAGE not in name and name != head
        if not (family.naming.buffers.fullmatch(name) or is_of_another_part or _is_left_out(name, model, family)):
            yield f"{name} {list(stored.shape)} is not a tensor of this model"
