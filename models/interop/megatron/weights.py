"""Convert GPT weights and optimizer state between Megatron-Core's format and ours.

    ours (models/specs.py)                  Megatron-Core, below decoder.layers
    attention.norm.{weight,bias}            self_attention.linear_qkv.layer_norm_{weight,bias}, or input_layernorm.{weight,bias}
    attention.q, attention.kv               self_attention.linear_qkv     [kv_heads, heads / kv_heads + 2, d, h]: per kv head its
                                                                          query heads, its key head, its value head
    attention.{q,k}_norm.weight             self_attention.{q,k}_layernorm.weight
    attention.proj                          self_attention.linear_proj
    mlp.norm.{weight,bias}                  mlp.linear_fc1.layer_norm_{weight,bias}, or pre_mlp_layernorm.{weight,bias}
    mlp.up, mlp.gate_up                     mlp.linear_fc1                [2 f, h]: gate, then up
    mlp.down                                mlp.linear_fc2

    multi-token prediction (MTP)            below mtp.layers.K, with a layer as above below mtp.layers.K.transformer_layer
    mtp.{embedding_norm,hidden_norm,norm}   enorm, hnorm, final_layernorm
    mtp.projection                          eh_proj               [h, 2 h]: columns of the embedding first, as ours

A checkpoint either stacks all layers in one tensor with a leading layer dim, or has the layer's number in the key. An import reads
either form; an export writes the stacked one. Optimizer state has the same keys below optimizer.state.{exp_avg, exp_avg_sq, param}.
Padding rows in the vocabulary are dropped.
"""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from triaxis.engine.checkpoint.format.manifest import Kind
from triaxis.engine.checkpoint.format.store import Shard
from triaxis.engine.checkpoint.import_weights import whole
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import CheckpointError, shown
from triaxis.engine.layout.shard_spec import Box
from triaxis.models.interop.finite import check_finite
from triaxis.models.interop.megatron.files import TorchDist
from triaxis.models.interop.megatron.writer import OutgoingChunk
from triaxis.models.specs import model_specs

Prefixes = Mapping[Kind, tuple[str, ...]]
"""For each kind of tensor, the prefixes that its keys may have; the first prefix that the checkpoint has is used."""

WEIGHTS: Prefixes = {"master": ("",)}
TRAINING: Prefixes = {
    # New versions call the exact weights `param`, old ones `fp32_param`; an fp32 run may have only the weights.
    "master": ("optimizer.state.param.", "optimizer.state.fp32_param.", ""),
    "exp_avg": ("optimizer.state.exp_avg.",),
    "exp_avg_sq": ("optimizer.state.exp_avg_sq.",),
}

RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space")
"""Storage formats of optimizer state in which keys name parameters, so that the state can be read."""

_LAYERS = "decoder.layers."
_AHEAD, _AHEAD_LAYER = "mtp.layers.", "transformer_layer."
_SHOWN = 12

# Our name, within a layer or outside the layers -> alternatives in Megatron-Core. An alternative is one key, or several keys whose
# tensors are concatenated. The first alternative is written.
_QKV = "self_attention.linear_qkv"
_FC1 = "mlp.linear_fc1"
_KEYS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "embedding.word.weight": (("embedding.word_embeddings.weight",),),
    "embedding.position.weight": (("embedding.position_embeddings.weight",),),
    "attention.norm.weight": ((f"{_QKV}.layer_norm_weight",), ("input_layernorm.weight",)),
    "attention.norm.bias": ((f"{_QKV}.layer_norm_bias",), ("input_layernorm.bias",)),
    "attention.q.weight": ((f"{_QKV}.weight",),),
    "attention.q.bias": ((f"{_QKV}.bias",),),
    "attention.q_norm.weight": (("self_attention.q_layernorm.weight",),),
    "attention.k_norm.weight": (("self_attention.k_layernorm.weight",),),
    "attention.sinks": (("self_attention.core_attention.softmax_offset",),),
    "attention.proj.weight": (("self_attention.linear_proj.weight",),),
    "attention.proj.bias": (("self_attention.linear_proj.bias",),),
    "mlp.norm.weight": ((f"{_FC1}.layer_norm_weight",), ("pre_mlp_layernorm.weight",)),
    "mlp.norm.bias": ((f"{_FC1}.layer_norm_bias",), ("pre_mlp_layernorm.bias",)),
    "mlp.up.weight": ((f"{_FC1}.weight",),),
    "mlp.up.bias": ((f"{_FC1}.bias",),),
    "mlp.gate_up.weight": ((f"{_FC1}.weight",), (f"{_FC1}.weight_w", f"{_FC1}.weight_v")),
    "mlp.gate_up.bias": ((f"{_FC1}.bias",), (f"{_FC1}.bias_w", f"{_FC1}.bias_v")),
    "mlp.down.weight": (("mlp.linear_fc2.weight",),),
    "mlp.down.bias": (("mlp.linear_fc2.bias",),),
    "mtp.embedding_norm.weight": (("enorm.weight",),),
    "mtp.embedding_norm.bias": (("enorm.bias",),),
    "mtp.hidden_norm.weight": (("hnorm.weight",),),
    "mtp.hidden_norm.bias": (("hnorm.bias",),),
    "mtp.projection.weight": (("eh_proj.weight",),),
    "mtp.norm.weight": (("final_layernorm.weight",),),
    "mtp.norm.bias": (("final_layernorm.bias",),),
    "final_norm.weight": (("decoder.final_layernorm.weight",),),
    "final_norm.bias": (("decoder.final_layernorm.bias",),),
    "head.weight": (("output_layer.weight",),),
}
_MORE_ROWS = ("embedding.word.weight", "embedding.position.weight", "head.weight")
"""Megatron-Core's tables may have more rows than ours: vocabulary padding, positions that no sample reaches. Extra rows are
dropped.
"""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A Megatron-Core parameter, and the one or two of our tensors that it contains.

    Attributes:
        ours: names and shapes of our tensors: one, or q and kv.
        short: our first tensor's name, without the layer prefix.
        layer: (index of its layer, number of layers); None if it is outside the decoder's layers.
        ahead: index of its layer among the multi-token prediction layers, from 0; None if it is outside these.
        shape: Megatron-Core's shape, without the leading dim for stacked layers and without padding.
    """

    ours: tuple[tuple[str, tuple[int, ...]], ...]
    short: str
    layer: tuple[int, int] | None
    ahead: int | None
    shape: tuple[int, ...]

    def key_among(self, names: Container[str]) -> str:
        """Find the parameter's key in a live Megatron-Core model, whose parameter names are `names`."""
        keys = [place.keys[0] for place in _candidates(self, "") if not place.stacked and len(place.keys) == 1]
        return next(key for key in keys if key in names)

    def to_ours(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Convert Megatron-Core's tensor, shaped `shape`, to our tensors."""
        if len(self.ours) == 1:
            return [values.reshape(self.ours[0][1])]
        (_, q_shape), (_, kv_shape) = self.ours
        groups = values.reshape(kv_shape[1], -1, *kv_shape[2:])
        return [groups[:, :-2].reshape(q_shape), groups[:, -2:].transpose(0, 1).contiguous()]

    def to_theirs(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Convert our tensors to Megatron-Core's tensor, shaped `shape`."""
        if len(self.ours) == 1:
            return tensors[0].reshape(self.shape)
        q, kv = tensors
        groups = torch.cat((q.unflatten(0, (kv.shape[1], -1)), kv.transpose(0, 1)), dim=1)
        return groups.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class _Place:
    """Keys under which a checkpoint may store a parameter.

    Attributes:
        keys: keys of tensors that, concatenated along the first dim, are the parameter.
        stacked: whether each tensor has a leading dim for all layers.
    """

    keys: tuple[str, ...]
    stacked: bool


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Yield Megatron-Core's parameters for the model, in our forward order. Our q and kv are one parameter there."""
    specs = {spec.name: spec.shape for spec in model_specs(model)}
    for name, shape in specs.items():
        layer, ahead, short = None, None, name
        if name.startswith("layers."):
            number = int(name.split(".")[1])
            short = name.removeprefix(f"layers.{number}.")
            if number < model.num_layers:
                layer = (number, model.num_layers)
            else:
                ahead = number - model.num_layers
        if short.startswith("attention.kv."):
            continue  # handled with its q
        ours = [(name, shape)]
        if short.startswith("attention.q."):
            kv = name.replace(".q.", ".kv.")
            ours.append((kv, specs[kv]))
            inner = shape[2:]
            theirs = ((model.num_attention_heads + 2 * model.kv_heads) * model.head_size, *inner)
        elif short == "attention.proj.weight":
            theirs = (shape[0], shape[1] * shape[2])
        elif short.startswith("mlp.gate_up."):
            theirs = (shape[0] * shape[1], *shape[2:])
        else:
            theirs = shape
        yield Parameter(tuple(ours), short, layer, ahead, theirs)


def check(source: TorchDist, model: ModelConfig, prefixes: Prefixes) -> None:
    """Check that a checkpoint has the model's tensors, and no other weights.

    Each parameter needs a tensor for its weights, and one for each kind in `prefixes`.

    Raises:
        CheckpointError: tensors are missing, unknown, or have the wrong shape.
    """
    problems, used = [], set()
    for parameter in parameters(model):
        for below in [("",), *prefixes.values()]:
            place = _find(source, parameter, below)
            if place is None:
                problems.append(f"{_candidates(parameter, below[0])[0].keys[0]}: not there")
                continue
            used |= set(place.keys)
            problems += [problem for key in place.keys if (problem := _misfit(source, parameter, place, key))]
    problems += [
        f"{key} {list(stored.shape)}: this model has no such parameter"
        for key, stored in source.tensors.items()
        if key not in used and not key.startswith("optimizer.")
    ]
    if problems:
        problems = list(dict.fromkeys(problems))
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise CheckpointError(
            f"{source.folder} does not fit the model:\n"
            + "\n".join(f"  {problem}" for problem in [*problems[:_SHOWN], *more])
            + "\nWhat is missing would stay random, and what is left over would be lost. Give the config of this model: --config."
        )


def optimizer_format(source: TorchDist) -> str | None:
    """Find the storage format of the optimizer state, as Megatron-Core spells it.

    None if the checkpoint has no optimizer state. If no format is recorded, the result is fully_reshardable if keys
    name each parameter's moments, else unknown.
    """
    keys = (*source.tensors, *source.objects)
    if not any(key.startswith("optimizer.") or ".optimizer." in key for key in keys):
        return None
    for holder, word in (
        ("optimizer", "param_state_sharding_type"),
        ("content_metadata", "distrib_optim_sharding_type"),
    ):
        state = source.common.get(holder)
        if isinstance(state, dict) and isinstance(state.get(word), str):
            return str(state[word])
    # A non-distributed optimizer records no format; its state tensors have the weights' shapes.
    whole_tensors = any(key.startswith("optimizer.state.exp_avg.") for key in source.tensors)
    return "fully_reshardable" if whole_tensors else "unknown"


def check_optimizer(source: TorchDist) -> None:
    """Check that the optimizer state can be read.

    Raises:
        CheckpointError: there is no optimizer state, it is not Adam's, or it is stored as one layout's buckets.
    """
    if (name := source.args.get("optimizer", "adam")) != "adam":
        raise CheckpointError(
            f"{source.folder} was saved with --optimizer {shown(name)}; only the state of adam is read here, and without its "
            "moments the run would not go on as it was. Import the weights: --weights-only."
        )
    stored = optimizer_format(source)
    if stored is None:
        raise CheckpointError(
            f"{source.folder} has no optimizer state, so a run cannot be resumed from it. Import the weights: --weights-only."
        )
    if stored not in RESHARDABLE:
        raise CheckpointError(
            f"{source.folder}: the optimizer's state is stored as {stored}, by the buckets of one layout of Megatron's; only "
            f"{' and '.join(RESHARDABLE)} name the parameters. Let the Megatron job save once more with "
            "--dist-ckpt-optim-fully-reshardable, or import the weights with a fresh optimizer: --weights-only."
        )


def dropped_rows(source: TorchDist, model: ModelConfig) -> dict[str, int]:
    """Count the extra rows in Megatron-Core's vocabulary and position tables.

    Returns {key: rows} for the tables that have any.
    """
    found = {}
    for parameter in parameters(model):
        if parameter.short in _MORE_ROWS and (place := _find(source, parameter, ("",))) is not None:
            (key,) = place.keys
            found[key] = source.tensors[key].shape[0] - parameter.shape[0]
    return {key: rows for key, rows in found.items() if rows}


def import_shards(source: TorchDist, model: ModelConfig, prefixes: Prefixes) -> Iterator[Shard]:
    """Yield our whole tensors from a checkpoint that `check` accepts.

    Only one Megatron-Core tensor is in memory at a time.

    Raises:
        CheckpointError: part of a file disagrees with `.metadata`, or has elements that are not finite.
    """
    for parameter in parameters(model):
        for kind, below in prefixes.items():
            place = _find(source, parameter, below)
            assert place is not None, f"{parameter.ours[0][0]} was not checked"
            pieces = [_read(source, parameter, place, key) for key in place.keys]
            for key, piece in zip(place.keys, pieces, strict=True):
                check_finite(piece, key, source.folder)
            values = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            for (name, _), tensor in zip(parameter.ours, parameter.to_ours(values), strict=True):
                yield whole(name, tensor, kind)


def export_chunks(
    read: Callable[[str, Kind], torch.Tensor], model: ModelConfig, *, dtype: torch.dtype | None, has_moments: bool
) -> Iterator[OutgoingChunk]:
    """Yield Megatron-Core's tensors, one chunk per parameter, layer and kind.

    Args:
        read: function (name, kind) -> our whole logical tensor.
        dtype: dtype for the weights; None keeps the saved dtype.
        has_moments: whether to write the optimizer state too: moments, and the exact weights in their own dtype.
    """
    for parameter in parameters(model):
        for kind in TRAINING if has_moments else WEIGHTS:
            values = parameter.to_theirs([read(name, kind) for name, _ in parameter.ours])
            if kind == "master":
                yield _written(parameter, "", values.to(dtype or values.dtype))
            if has_moments:
                yield _written(parameter, TRAINING[kind][0], values)


def empty_objects(model: ModelConfig) -> Iterator[str]:
    """Yield the keys of extra state that Megatron-Core's modules expect in a checkpoint.

    The state is empty if there is no fp8.
    """
    modules = [_QKV, "self_attention.linear_proj", "self_attention.core_attention", _FC1, "mlp.linear_fc2"]
    if model.qk_norm:
        modules += ["self_attention.q_layernorm", "self_attention.k_layernorm"]
    for module in modules:
        for layer in range(model.num_layers):
            yield f"{_LAYERS}{module}._extra_state/shard_{layer}_{model.num_layers}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"
    inner = [f"{_AHEAD_LAYER}{module}" for module in modules]
    for ahead in range(model.num_mtp_layers):
        for module in (*inner, "enorm", "hnorm", "eh_proj", "final_layernorm"):
            yield f"{_AHEAD}{ahead}.{module}._extra_state/shard_0_1"


def _candidates(parameter: Parameter, below: str) -> list[_Place]:
    """List the places where a checkpoint may store the parameter.

    `below` is the key prefix. An export writes to the first place.
    """
    if parameter.ahead is not None:
        inner = "" if parameter.short.startswith("mtp.") else _AHEAD_LAYER
        places = [(f"{_AHEAD}{parameter.ahead}.{inner}", False)]
    elif parameter.layer is None:
        places = [("", False)]
    else:
        places = [(_LAYERS, True), (f"{_LAYERS}{parameter.layer[0]}.", False)]
    return [
        _Place(tuple(f"{below}{at}{key}" for key in keys), stacked)
        for keys in _KEYS[parameter.short]
        for at, stacked in places
    ]


def _find(source: TorchDist, parameter: Parameter, prefixes: Sequence[str]) -> _Place | None:
    for below in prefixes:
        for place in _candidates(parameter, below):
            if all(key in source.tensors for key in place.keys):
                return place
    return None


def _expected(source: TorchDist, parameter: Parameter, place: _Place, key: str) -> tuple[int, ...]:
    """Compute the shape that a key's tensor must have.

    The shape has the leading layer dim if layers are stacked. A vocabulary or position table may have more rows than ours. The
    shape then has the stored number of rows.
    """
    shape = (parameter.shape[0] // len(place.keys), *parameter.shape[1:])
    stored = source.tensors[key].shape
    if parameter.short in _MORE_ROWS:
        shape = (max(shape[0], math.prod(stored) // math.prod(shape[1:])), *shape[1:])
    return (parameter.layer[1], *shape) if place.stacked and parameter.layer is not None else shape


def _misfit(source: TorchDist, parameter: Parameter, place: _Place, key: str) -> str | None:
    stored, expected = source.tensors[key].shape, _expected(source, parameter, place, key)
    if stored == expected:
        return None
    cuts = stored[:-1]
    flattened = len(cuts) == len(expected) and all(
        size % parts == 0 for size, parts in zip(expected, cuts, strict=True)
    )
    if flattened and math.prod(stored) == math.prod(expected) and (not place.stacked or cuts[0] == expected[0]):
        return None
    return f"{key} {list(stored)}: this model has {list(expected)}"


def _read(source: TorchDist, parameter: Parameter, place: _Place, key: str) -> torch.Tensor:
    """Read a key's tensor, or the parameter's layer of a stacked one, without rows that our tensor lacks."""
    stored, shape = source.tensors[key].shape, _expected(source, parameter, place, key)
    first: Box = ()
    if place.stacked and parameter.layer is not None:
        layer = parameter.layer[0]
        first, shape = ((layer, layer + 1),), shape[1:]
    rest = stored[len(first) :]
    rows = parameter.shape[0] // len(place.keys)
    if len(rest) == len(shape):
        box = (*first, (0, rows), *((0, size) for size in shape[1:]))
        return source.read(key, box).view(rows, *shape[1:])
    # Old versions flatten each rank's part: [cuts along dim 0, cuts along dim 1, .., elements per part].
    cuts, n = rest[:-1], len(shape)
    parts = source.read(key, (*first, *((0, size) for size in rest))).view(
        *cuts, *(size // count for size, count in zip(shape, cuts, strict=True))
    )
    whole_again = parts.permute([dim for pair in zip(range(n), range(n, 2 * n), strict=True) for dim in pair])
    return whole_again.reshape(shape)[:rows]


def _written(parameter: Parameter, below: str, values: torch.Tensor) -> OutgoingChunk:
    place = _candidates(parameter, below)[0]
    (key,) = place.keys
    at, layers = ((), ()) if parameter.layer is None else ((parameter.layer[0],), (parameter.layer[1],))
    whole_shape, start = (*layers, *parameter.shape), (*at, *(0,) * values.ndim)
    return OutgoingChunk(key, whole_shape, start, values.reshape(*(1 for _ in layers), *values.shape))
