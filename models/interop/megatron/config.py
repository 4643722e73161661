"""Convert Megatron-LM's arguments to config sections, and back.

    {"num_layers": 32, "group_query_attention": True, "num_query_groups": 8, "swiglu": True, ..}      args in common.pt
      <->  model: {num_layers: 32, num_kv_heads: 8, activation: swiglu, ..}, optimizer: {..}, train: {..}

An argument that switches on an unsupported feature is refused by name. Arguments that change only speed, layout or logging are
ignored.

Source: megatron/training/arguments.py and the TransformerConfig in Megatron-Core 0.16.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import Any, get_type_hints

from triaxis.engine.config.names.megatron_arguments import ARGUMENTS, LISTS, equal_fields, plain_text, taken_over
from triaxis.engine.config.quantities.plan import planned_steps
from triaxis.engine.config.schema.layer_kinds import KindFields
from triaxis.engine.config.schema.model import MOST_LAYERS, ModelConfig
from triaxis.engine.config.schema.section import Section
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.model_choices import ACTIVATIONS, NORMS, POSITIONS
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS, OptimizerName
from triaxis.engine.errors import ConfigError, shown
from triaxis.models.interop.megatron import schedule
from triaxis.models.interop.megatron.attention_args import (
    FIELDS,
    LISTS_BY_LAYER,
    attention_args,
    attention_differences,
    read_attention,
)
from triaxis.models.interop.plain_model import beyond_plain
from triaxis.models.interop.sections import checked_model

Args = Mapping[str, Any]

_OPTIMIZER_NAMES: Mapping[str, OptimizerName] = {
    kind.megatron: name for name, kind in OPTIMIZERS.items() if kind.megatron
}
"""Their `optimizer` -> our `optimizer.name`."""

_LESS_ONE = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
"""Arguments, before Megatron-LM 0.16 and since then, for norms whose stored weight is the gain minus one."""

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "padded_vocab_size")

_ONE_MORE = {"rmsnorm": "rmsnorm_1p"}
"""Our norm -> our norm that stores the gain minus one, as `apply_layernorm_1p` does."""

_NORMS = {kind.megatron: name for name, kind in NORMS.items() if kind.megatron is not None}
_POSITIONS = {kind.megatron: name for name, kind in POSITIONS.items() if kind.megatron is not None}

_OFF_ONLY: Mapping[str, tuple[Container[str], str]] = {
    **{each.dest: (each.accepted, each.why or "") for each in ARGUMENTS.values() if each.group == "another model"},
    "num_experts": (("0",), "checkpoints with experts cannot be imported yet"),
    "multi_latent_attention": ((), "multi-latent attention is not built"),
}
"""Argument -> (values that are allowed besides None and False, why no other is). An argument may also be absent."""

_PLAIN = (
    *(
        each.dest
        for each in ARGUMENTS.values()
        if each.group in ("model", "training") and each.kind not in ("pattern", "dtype", *LISTS)
    ),
    *("layernorm_epsilon", "softmax_scale", "tokenizer_type", *_LESS_ONE),
)
"""Arguments that are read from checkpoints, and are numbers or words there."""


def model_section(args: Args, vocab_size: int | None, source: str) -> dict[str, Any]:
    """Convert Megatron-LM's arguments to a `model` section.

    Args:
        args: Megatron-LM's arguments by name.
        vocab_size: number of tokens in the tokenizer; None takes it from the arguments.
        source: origin of the arguments, for messages.

    Raises:
        ConfigError: arguments are missing, illegal or switch on unsupported features.
    """
    problems = [
        f"{name} is missing; the model has no shape without it." for name in _REQUIRED if args.get(name) is None
    ]
    problems += _unusable(args)
    if nested := list(_nested(args)):
        raise ConfigError([*problems, *nested], source)
    model = taken_over(args, "model")
    model["num_kv_heads"] = args.get("num_query_groups") if args.get("group_query_attention") else None
    model["tie_embeddings"] = not args.get("untie_embeddings_and_output_weights", False)
    model["bias"] = "all" if args.get("add_bias_linear", True) else "qkv" if args.get("add_qkv_bias") else "none"
    model["norm_eps"] = args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5))
    model["qk_norm"] = bool(args.get("qk_layernorm", False))
    model["activation"] = _activation(args)
    for theirs, ours, values, default in (
        ("normalization", "norm", _NORMS, "LayerNorm"),
        ("position_embedding_type", "position", _POSITIONS, "learned_absolute"),
    ):
        given = args.get(theirs, default)
        if given not in values:
            problems.append(f"{theirs} = {shown(given)}: must be one of {', '.join(values)}; no other one is built.")
        model[ours] = values.get(given)
    if any(args.get(name) for name in _LESS_ONE):
        one_more = _ONE_MORE.get(model["norm"])
        if one_more is None:
            problems.append(
                f"apply_layernorm_1p with normalization = {shown(args.get('normalization', 'LayerNorm'))}: weights that are "
                "stored less one are built for RMSNorm only."
            )
        model["norm"] = one_more
    if isinstance(model.get("num_layers"), int) and 0 < model["num_layers"] <= MOST_LAYERS:
        problems += read_attention(args, model)
    problems += _read_mtp(args, model)
    if model["qk_norm"] and model["norm"] not in (*_ONE_MORE, *_ONE_MORE.values(), None):
        problems.append(
            f"qk_layernorm with normalization = {args.get('normalization', 'LayerNorm')}: queries and keys are normalised by "
            "RMSNorm only here."
        )
    model["vocab_size"] = vocab_size if vocab_size is not None else _tokens(args)
    if model["vocab_size"] is None:
        problems.append(
            f"vocab_size is not in the arguments, and padded_vocab_size = {args.get('padded_vocab_size')} counts rows that no "
            "token has. Give the tokenizer's size: --vocab-size N."
        )
    return checked_model(model, problems, source)[0]


def training_sections(args: Args) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Convert the arguments to `train`, `optimizer` and `precision` sections.

    Also returns notes on arguments without an equal counterpart in these sections.

    Raises:
        TypeError: a length, size or rate of the schedule is no number below 2^63.
    """
    notes = []
    optimizer = taken_over(args, "optimizer")
    theirs = args.get("optimizer", "adam")
    if theirs in _OPTIMIZER_NAMES:
        name = optimizer["name"] = _OPTIMIZER_NAMES[theirs]
        # Megatron-LM's arguments cover every optimizer; our section accepts only fields that the chosen optimizer uses.
        others = {field for kind in OPTIMIZERS.values() for field in kind.fields} - OPTIMIZERS[name].fields.keys()
        optimizer = {field: value for field, value in optimizer.items() if field not in others}
    else:
        notes.append(f"optimizer = {theirs} is not built: choose optimizer.name")
    if "clip_grad" in args:
        optimizer["clip_grad"] = args["clip_grad"] or None
    fields, more = schedule.schedule_fields(args)
    optimizer |= fields
    notes += more
    if args.get("rampup_batch_size"):
        notes.append(
            "the batch size was ramped up: here it is constant, and the step follows from samples / batch size"
        )
    if args.get("mtp_num_layers") and not args.get("calculate_per_token_loss"):
        notes.append(
            "losses of tokens further ahead were means over those tokens: here their sums are over the number of next tokens, as "
            "with --calculate-per-token-loss, which lowers them by a share of k / seq_length at k tokens further on"
        )
    dtype = "bf16" if args.get("bf16") else "fp16" if args.get("fp16") else "fp32"
    precision = {"dtype": dtype} | ({"loss_scale": _loss_scale(args)} if dtype == "fp16" else {})
    return {"train": taken_over(args, "train"), "optimizer": optimizer, "precision": precision}, notes


def megatron_args(model: ModelConfig) -> dict[str, Any]:
    """Convert a `model` section to Megatron-LM's arguments.

    Raises:
        ConfigError: Megatron-LM has no equivalent model.
    """
    problems = []
    stored_less_one = {ours: plain for plain, ours in _ONE_MORE.items()}
    norm = NORMS[stored_less_one.get(model.norm, model.norm)]
    for field in ("activation", "position"):
        if getattr(model, f"{field}_kind").megatron is None:
            given = f"model.{field} = {getattr(model, field)}"
            problems.append(f"{given}: Megatron-LM has no argument for it; the model would be another one.")
    problems += [
        f"{given}: an exchange with Megatron-LM is not built for it." for given in beyond_plain(model, {*FIELDS, "mtp"})
    ]
    problems += attention_differences(model)
    if model.qk_norm == "all_heads":
        problems.append("model.qk_norm = all_heads: Megatron-LM normalises each head by itself.")
    if model.qk_norm and model.norm not in ("rmsnorm", *stored_less_one):
        problems.append(
            f"model.qk_norm with norm = {model.norm}: Megatron would normalise queries and keys by it, here it is RMSNorm."
        )
    if problems:
        raise ConfigError(problems)
    bias = model.bias == "all"
    return (
        _given_back(model, "model")
        | attention_args(model)
        | ({} if model.mtp is None else _given_back(model.mtp, "model.mtp"))
        | {
            "kv_channels": model.head_size,
            "ffn_hidden_size": model.ffn_size,
            "group_query_attention": model.kv_heads != model.num_attention_heads,
            "num_query_groups": model.kv_heads,
            "max_position_embeddings": model.seq_length,
            "position_embedding_type": model.position_kind.megatron,
            "add_position_embedding": True,
            "use_rotary_position_embeddings": model.position_kind.is_rotary,
            "rotary_interleaved": False,
            "normalization": norm.megatron,
            **dict.fromkeys(_LESS_ONE, model.norm in stored_less_one),
            "norm_epsilon": model.norm_eps,
            "untie_embeddings_and_output_weights": not model.tie_embeddings,
            "add_bias_linear": bias,
            "add_qkv_bias": bias or model.bias == "qkv",
            "qk_layernorm": bool(model.qk_norm),
            **{kind.megatron: kind == model.activation_kind for kind in ACTIVATIONS.values() if kind.megatron},
            # Without fusion, Megatron-LM computes the exact GELU; its tanh form has a separate name.
            "bias_gelu_fusion": False,
            "vocab_size": model.vocab_size,
            "padded_vocab_size": model.vocab_size,
            "make_vocab_size_divisible_by": 1,
        }
    )


def megatron_training_args(config: Config) -> dict[str, Any]:
    """Convert the sections `train`, `optimizer` and `precision` to Megatron-LM's arguments.

    Raises:
        ConfigError: an extension provides the learning-rate schedule.
    """
    optimizer, dtype, scaling = config.optimizer, config.precision.dtype, config.precision.scaling
    return {
        **_given_back(config.train, "train"),
        **_given_back(optimizer, "optimizer"),
        "optimizer": OPTIMIZERS[optimizer.name].megatron,
        "train_iters": planned_steps(config),
        **schedule.schedule_args(config),
        "clip_grad": optimizer.clip_grad or 0.0,
        "bf16": dtype == "bf16",
        "fp16": dtype == "fp16",
        **({} if scaling is None else {"loss_scale": scaling.static, **_given_back(scaling, "precision.loss_scale")}),
    }


def differences(section: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """List differing model settings that change the outputs of the same weights.

    Args:
        section: `model` section read from Megatron-LM's arguments.
        model: model that the user's config asks for.
    """
    theirs = ModelConfig.model_validate(section)
    free = {"seq_length", "vocab_size", "vocab_multiple", "init_std", "hidden_dropout", "attention_dropout"}
    names = {
        "num_kv_heads": "kv_heads",
        "head_dim": "head_size",
        "ffn_hidden_size": "ffn_size",
        "mtp": "num_mtp_layers",
    }
    if "rope" not in (theirs.position, model.position):
        free.add("rope_base")
    found = []
    if theirs.layers is not None or model.layers is not None:
        # Layer kinds may differ in name only.
        free |= {"layers", "layer_kinds", *get_type_hints(KindFields)}
        if [replace(kind, name="") for kind in theirs.kinds] != [replace(kind, name="") for kind in model.kinds]:
            found.append(
                "model.layers: windows, RoPE or sinks of some layers in the config are not those of Megatron's arguments."
            )
    for field in ModelConfig.model_fields:
        there, here = (getattr(one, names.get(field, field)) for one in (theirs, model))
        if field not in free and there != here:
            found.append(f"model.{field} = {here!r} in the config, {there!r} in Megatron's arguments.")
    return found


def _loss_scale(args: Args) -> dict[str, Any] | None:
    """Build an fp16 run's `precision.loss_scale`, or None if no argument mentions it."""
    if args.get("loss_scale"):
        return {"static": args["loss_scale"]}
    scale = taken_over(args, "precision.loss_scale")
    # Megatron-LM stores the window, a whole number of steps, as a float.
    return {ours: int(value) if ours == "window" else value for ours, value in scale.items()} or None


def _given_back(section: Section, name: str) -> dict[str, Any]:
    """Build the arguments whose values are those of fields in a section, such as `model`."""
    return {theirs: getattr(section, ours) for theirs, ours in equal_fields(name).items()}


def _read_mtp(args: Args, model: dict[str, Any]) -> Iterator[str]:
    """Add `mtp` to `model` if the arguments ask for multi-token prediction layers. Yields problems."""
    number = args.get("mtp_num_layers")
    if not number:
        return
    model["mtp"] = {"loss_weight": ARGUMENTS["mtp-loss-scaling-factor"].default, **taken_over(args, "model.mtp")}
    if model["position"] == "learned":
        yield f"mtp_num_layers = {number} with learned positions: tokens ahead are embedded without a position here."
    for name in LISTS_BY_LAYER:
        if args.get(name):
            yield f"mtp_num_layers = {number} with {name}: which entry the layers of tokens ahead have is not built."


def _unusable(args: Args) -> Iterator[str]:
    for name, (off, why) in _OFF_ONLY.items():
        value = args.get(name)
        # Nested values are never compared: comparing a tensor, or lists within lists, can take unbounded time.
        is_off = value is None or value is False or (isinstance(value, int | float | str) and plain_text(value) in off)
        if not is_off:
            yield f"{name} = {shown(value)}: {why}; the model would be another one."


def _nested(args: Args) -> Iterator[str]:
    for name in dict.fromkeys(_PLAIN):
        value = args.get(name)
        if value is not None and not isinstance(value, bool | int | float | str):
            yield f"{name} = {shown(value)}: must be a number or a word; Megatron-LM writes no other. Restore the file from a copy."


def _activation(args: Args) -> str:
    # Megatron-LM's GELU is the tanh approximation when fused with a bias, and exact otherwise. A gated activation overrides both.
    fused = args.get("bias_gelu_fusion", False) and args.get("add_bias_linear", True)
    gated_first = sorted(ACTIVATIONS.values(), key=lambda kind: not kind.is_gated)
    switched_on = (kind.name for kind in gated_first if kind.megatron and args.get(kind.megatron))
    return next(switched_on, "gelu_tanh" if fused else "gelu")


def _tokens(args: Args) -> int | None:
    """Read the tokenizer's number of tokens, or None if it is not given. A NullTokenizer has one more than `vocab_size`."""
    vocab_size = args.get("vocab_size")
    return vocab_size + 1 if vocab_size and args.get("tokenizer_type") == "NullTokenizer" else vocab_size
