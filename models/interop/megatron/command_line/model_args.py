"""Convert a Megatron-LM command line's model arguments to a `model` section.

    --hidden-size, --swiglu, --normalization ..          model: {hidden_size, activation, norm, ..}      (../config.py)
    --num-experts, --moe-router-topk, --moe-layer-freq   model.moe, model.layers
    --multi-latent-attention, --kv-lora-rank ..          model.mla, model.rope_scaling

Sources: `topk_routing_with_score_function` and `switch_load_balancing_loss_func` (transformer/moe/moe_utils.py),
`get_gpt_decoder_block_spec` and `MultiLatentAttention` in Megatron-Core 0.16.
"""

import math
from itertools import groupby
from typing import Any

from triaxis.engine.config.names.foreign_names import OF_THE_LAYOUT
from triaxis.engine.config.names.megatron_arguments import taken_over
from triaxis.engine.errors import ConfigError
from triaxis.models.interop.megatron.attention_args import LISTS_BY_LAYER
from triaxis.models.interop.megatron.command_line.parse import Parsed
from triaxis.models.interop.megatron.config import model_section

Fields = dict[str, Any]

_OF_MLA = ("num_query_groups", "group_query_attention", "kv_channels", "qk_layernorm", "add_qkv_bias")
"""Arguments that do not apply to latent attention, or have another meaning there."""

_YARN = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
"""MLATransformerConfig constants that no argument in version 0.16 changes."""

OF_A_SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
"""Arguments without which a model has no shape."""


def model_fields(parsed: Parsed, vocab_size: int | None) -> Fields:
    """Build the `model` section, and add problems and missing features to `parsed`.

    The result is {} if a required argument is missing or `model_section` refuses the arguments.

    Args:
        vocab_size: number of tokens in the tokenizer; None takes it from the arguments.
    """
    if any(parsed.args[name] is None for name in OF_A_SHAPE):
        return {}
    args = parsed.args | _completed(parsed.args)
    _positions_have_rows(parsed, args)
    plain = {name: value for name, value in args.items() if name not in ("num_experts", "multi_latent_attention")}
    if args["multi_latent_attention"]:
        plain = {name: value for name, value in plain.items() if name not in _OF_MLA}
        # A placeholder: the checks for a single head size do not apply to latent attention.
        plain["kv_channels"] = 2
    if vocab_size is None and args["vocab_size"] is None:
        parsed.problems.append(
            "--vocab-size is missing: the embedding has a row for each of the tokenizer's tokens. Give their number, inside or "
            "after the quotes."
        )
        vocab_size = 1
    try:
        model = model_section(plain, vocab_size, "the command line")
    except ConfigError as error:
        parsed.problems += error.problems
        return {}
    model["vocab_multiple"] = args["make_vocab_size_divisible_by"] * args["tensor_model_parallel_size"]
    if args["multi_latent_attention"]:
        _read_latents(parsed, args, model)
    elif args["rope_type"] not in (None, "rope"):
        parsed.lacks("rope-type", "it is for latent attention")
    if args["num_experts"]:
        _read_experts(parsed, args, model)
    return model


def _completed(args: Fields) -> Fields:
    """Derive arguments that follow from others, as Megatron-LM's validation does."""
    more: Fields = {}
    if args["use_rotary_position_embeddings"]:
        more["position_embedding_type"] = "rope"
    if args["ffn_hidden_size"] is None:
        width = 4 * args["hidden_size"]
        more["ffn_hidden_size"] = int((width * 2 / 3) / 64) * 64 if args["swiglu"] else width
    multiple = args["make_vocab_size_divisible_by"] * args["tensor_model_parallel_size"]
    rows = args["vocab_size"] or 0
    more["padded_vocab_size"] = args["padded_vocab_size"] or -(-rows // multiple) * multiple
    return more


def _positions_have_rows(parsed: Parsed, args: Fields) -> None:
    """Check that --max-position-embeddings, if given, is at least --seq-length.

    With learned positions, both must be equal. Too few positions are added to `parsed.problems`, too many to `parsed.missing`.
    """
    rows = args["max_position_embeddings"]
    is_learned = args["position_embedding_type"] == "learned_absolute"
    if rows is not None and rows < args["seq_length"]:
        parsed.problems.append(
            f"--max-position-embeddings {rows}: must be at least --seq-length {args['seq_length']}, or tokens have no position."
        )
    elif rows is not None and is_learned and rows > args["seq_length"]:
        parsed.lacks(
            "max-position-embeddings",
            f"the table of learned positions has a row for each of --seq-length {args['seq_length']} tokens, and {rows:,} rows are "
            "another model",
        )


def _read_latents(parsed: Parsed, args: Fields, model: Fields) -> None:
    """Add `mla` and YaRN's `rope_scaling` to `model`, and remove `head_dim` and `num_kv_heads`.

    Problems and missing features are added to `parsed`.
    """
    if args["mscale_all_dim"] and not args["mscale"]:
        parsed.lacks("mscale-all-dim", "it goes with an --mscale above 0")
    if not args["qk_layernorm"]:
        parsed.lacks("multi-latent-attention", "latents are normalised here: add --qk-layernorm")
    for name in ("head_dim", "num_kv_heads"):
        model.pop(name, None)
    model["mla"] = taken_over(args, "model.mla")
    factor, model_has_rope = args["rotary_scaling_factor"], model["position"] == "rope"
    if args["rope_type"] != "rope" and factor != 1 and model_has_rope:
        model["rope_scaling"] = {
            "type": "yarn",
            "factor": factor,
            **_YARN,
            **_magnitudes(factor, args["mscale"], args["mscale_all_dim"]),
        }


def _magnitudes(factor: float, mscale: float, all_dim: float) -> Fields:
    """Build the fields for YaRN's factor on cos and sin.

    The factor is m(mscale) / m(all_dim). m(x) is 0.1 * x * ln(factor) + 1 if `factor` is above 1, else 1.
    """
    if all_dim and mscale:
        return {"mscale": mscale, "mscale_all_dim": all_dim}
    # If mscale_all_dim is not given, our factor defaults to m(1).
    return {} if mscale == 1 else {"attention_factor": 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0}


def _read_experts(parsed: Parsed, args: Fields, model: Fields) -> None:
    """Add `moe` and `layers` to `model`. Problems and missing features are added to `parsed`."""
    width = args["moe_ffn_hidden_size"] or model["ffn_hidden_size"]
    moe = {
        **taken_over(args, "model.moe"),
        "ffn_hidden_size": width,
        # Softmax over the k largest logits equals softmax over all, divided by the sum of the k probabilities.
        "normalize": args["moe_router_topk"] > 1
        if args["moe_router_score_function"] == "sigmoid"
        else not args["moe_router_pre_softmax"],
    }
    shared = args["moe_shared_expert_intermediate_size"] or 0
    if shared % width:
        parsed.lacks(
            "moe-shared-expert-intermediate-size",
            f"shared experts have the width of the others: {shared} is no multiple of {width}",
        )
    moe["shared_experts"] = shared // width
    _read_groups(parsed, args, moe)
    moe["balance"] = balance = _balance(parsed, args)
    if args["moe_router_enable_expert_bias"] and not balance.get("bias_rate"):
        moe["choice_bias"] = True
    model["moe"] = moe
    if "layers" in model:
        given = next(name for name in LISTS_BY_LAYER if args[name] is not None)
        parsed.lacks(given.replace("_", "-"), "layers that differ by their attention, with experts, are not taken over")
        del model["layer_kinds"]
    kinds = _expert_layers(parsed, args["moe_layer_freq"] or 1, model["num_layers"])
    model["layers"] = [name if (count := len(list(run))) == 1 else f"{name}*{count}" for name, run in groupby(kinds)]


def _read_groups(parsed: Parsed, args: Fields, moe: Fields) -> None:
    groups, top_groups = args["moe_router_num_groups"], args["moe_router_group_topk"]
    if not groups:
        return
    top_groups = top_groups or groups
    moe |= {"groups": groups, "top_groups": top_groups}
    summed = moe["top_k"] // top_groups
    if summed not in (1, 2) or (summed == 2 and moe["score"] == "softmax" and moe["normalize"]):
        parsed.lacks(
            "moe-router-num-groups",
            f"a group's score is its best expert's, or the sum of its best two; here it is a sum of {summed} {moe['score']} logits",
        )
    moe["group_score"] = "top2" if summed == 2 else "max"


def _balance(parsed: Parsed, args: Fields) -> Fields:
    """Build the `balance` section. Loss terms other than `seq_aux_loss` are added to `parsed.missing`."""
    balance: Fields = {}
    if args["moe_router_enable_expert_bias"]:
        balance["bias_rate"] = args["moe_router_bias_update_rate"]
    if args["moe_z_loss_coeff"]:
        balance["z_loss"] = args["moe_z_loss_coeff"]
    kinds, factors = args["moe_router_load_balancing_type"], args["moe_aux_loss_coeff"]
    if len(factors) == 1:
        factors = factors * len(kinds)
    if len(factors) != len(kinds):
        parsed.problems.append(
            f"--moe-aux-loss-coeff has {len(factors)} numbers for {len(kinds)} of --moe-router-load-balancing-type: one each."
        )
        return balance
    for kind, factor in zip(kinds, factors, strict=True):
        if kind == "seq_aux_loss":
            balance["sequence_loss"] = factor
        elif kind != "none" and factor:
            why = OF_THE_LAYOUT["moe_aux_loss_coeff"] if kind == "aux_loss" else "it weighs the load of a global batch"
            parsed.lacks("moe-aux-loss-coeff", f"{why}: use --moe-router-load-balancing-type seq_aux_loss, or the bias")
    return balance


def _expert_layers(parsed: Parsed, given: Any, num_layers: int) -> list[str]:
    """List each layer's kind, "moe" or "dense".

    A number n in `given` puts experts on every n-th layer, starting with the first. A list has a flag for each layer. Anything
    else is added to `parsed.problems`.
    """
    if isinstance(given, int) and given > 0:
        flags = [int(layer % given == 0) for layer in range(num_layers)]
    else:
        flags = given if isinstance(given, list) else []
    if len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        parsed.problems.append(
            f"--moe-layer-freq: must be a number above 0, or a 0 or 1 for each of {num_layers} layers; it has {len(flags)}."
        )
    return ["moe" if flag else "dense" for flag in flags]
