"""Convert a Hugging Face `config.json` to a `model` section, and back.

    {"model_type": "llama", "hidden_size": 4096, "rms_norm_eps": 1e-5, ...}
      <->  {"model": {"hidden_size": 4096, "norm": "rmsnorm", "norm_eps": 1e-5, ...}}

Each family is a record (`families.py`): a table from its keys to our fields, plus values that the family fixes and its files
omit. A key for an unsupported feature is refused unless its value switches the feature off. An unknown key is refused too.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from triaxis.engine.config.load import MOST_UNKNOWN
from triaxis.engine.config.schema.model import MOST_LAYERS, ModelConfig
from triaxis.engine.config.schema.moe import BalanceConfig
from triaxis.engine.config.schema.mtp import MTPConfig
from triaxis.engine.errors import ConfigError, brief, counted, shown
from triaxis.engine.storage.elsewhere import how_to_bring
from triaxis.engine.storage.json_text import parse_json
from triaxis.engine.storage.state_files import read_text
from triaxis.models.interop.huggingface.attention_keys import attention_differences, attention_keys, read_attention
from triaxis.models.interop.huggingface.expert_keys import (
    expert_differences,
    expert_keys,
    expert_notes,
    one_value,
    read_experts,
)
from triaxis.models.interop.huggingface.facts import agrees, is_note
from triaxis.models.interop.huggingface.families import FAMILIES
from triaxis.models.interop.huggingface.family import Family
from triaxis.models.interop.huggingface.record import SPECIAL_IDS
from triaxis.models.interop.plain_model import beyond_plain
from triaxis.models.interop.sections import checked_model

Keys = Mapping[str, Any]


OFF_ONLY: Mapping[str, tuple[tuple[object, ...], str]] = {
    "rope_scaling": ((None,), "this family has no RoPE"),
    "rope_parameters": ((None,), "this family has no RoPE"),
    "mlp_bias": ((False, None), "biases in the MLP without LayerNorm biases are not built yet"),
    "attention_bias": ((False, None), "a bias on the attention's output projection alone is not built yet"),
    "rope_interleaved": ((False,), "RoPE that turns neighbouring elements is not built"),
    "use_mrope": ((False,), "RoPE over several positions is not built"),
    "partial_rotary_factor": ((1.0, None), "RoPE on a part of each head is not built yet"),
    "scale_attn_weights": ((True,), "attention without 1 / sqrt(head_dim) is not built"),
    "scale_attn_by_inverse_layer_idx": ((False,), "attention scaled by layer is not built"),
    "shared_expert_intermediate_size": ((0, None), "shared experts behind a gate of their own are not built"),
    "expert_capacity": ((None,), "experts that leave tokens out are not built"),
    "capacity_factor": ((None,), "experts that leave tokens out are not built"),
    "n_special": ((0, None), "embeddings of special tokens beside the vocabulary are not built"),
    "add_cross_attention": ((False,), "cross-attention is not built: Triaxis trains decoders"),
    "is_encoder_decoder": ((False,), "encoders are not built: Triaxis trains decoders"),
}
"""Key -> (allowed values, why no other is). Unless the family supports such a key, it must be absent or have an allowed value."""

WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path",
        "_num_labels",
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "is_decoder",
        "is_llama_config",
        "label2id",
        "model_type",
        "n_ctx",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "predict_special_tokens",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "reorder_and_upcast_attn",
        "return_dict",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys that do not affect training: names, token ids for generation, file dtypes, heads for other tasks."""

OF_GENERATION = frozenset(
    {
        "begin_suppress_tokens",
        "cache_implementation",
        "bad_words_ids",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "prefix",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "typical_p",
        "unk_token_id",
    }
)
"""Keys for text generation and tokenizers, which older transformers releases wrote to config.json."""

OF_OTHERS = frozenset(
    {"hidden_act", "layer_types", "max_window_layers", "sliding_window", "sliding_window_size", "use_sliding_window"}
)
"""Keys that some families read and that have no effect in the others."""

OF_BOTH = frozenset({"tie_word_embeddings", *SPECIAL_IDS})
"""Language-model keys that may also appear outside `text_config`."""


QUANTIZATION = "quantization_config"
"""Key that describes how weights are quantized."""


def fp8_block(quantization: object) -> tuple[int, int] | None:
    """Read the (rows, columns) of a weight block with one FP8 scale. None: the weights are not E4M3 with such blocks."""
    if not isinstance(quantization, Mapping):
        return None
    block = quantization.get("weight_block_size")
    if quantization.get("quant_method") != "fp8" or quantization.get("fmt", "e4m3") != "e4m3":
        return None
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or any(type(size) is not int or size < 1 for size in block)
    ):
        return None
    return block[0], block[1]


def read_config_json(path: Path) -> dict[str, Any]:
    """Read a config.json as a mapping.

    Raises:
        ConfigError: the file is missing, is not JSON or is not a mapping.
    """
    try:
        keys: Any = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        how = how_to_bring(path.parent)
        raise ConfigError(
            [f"it cannot be read as JSON: {error}. Give the folder of a model.{how}"], str(path)
        ) from error
    if not isinstance(keys, dict):
        raise ConfigError(["it is no mapping of keys to values. Give the folder of a model."], str(path))
    return keys


def from_hugging_face(
    keys: Keys, seq_length: int | None = None, source: str = "config.json", ignore: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """Convert a Hugging Face config to config sections.

    The sections are `model`, and `kernels` if the model needs a setting there.

    Args:
        keys: content of config.json.
        seq_length: sample length to train with; None uses the model's maximum.
        source: file name, for messages.
        ignore: unknown keys to accept.

    Raises:
        ConfigError: the family is unknown; keys are missing, unknown, illegal or switch on unsupported features; an ignored key
            is absent or has a known effect; or `seq_length` exceeds the learned positions.
    """
    keys = text_keys(keys)
    family = FAMILIES.get(str(keys.get("model_type")))
    if family is None:
        raise ConfigError(
            [
                f"model_type = {shown(keys.get('model_type'))}: must be one of {', '.join(FAMILIES)}; no other family can be built "
                "here."
            ],
            source,
        )
    problems = list(_not_to_ignore(keys, family, ignore))
    model: dict[str, Any] = {}
    for theirs, ours in family.names.items():
        if theirs in keys or theirs in family.defaults:
            model[ours] = keys.get(theirs, family.defaults.get(theirs))
        elif not (ours == "seq_length" and seq_length is not None):
            problems.append(f"{theirs} is missing: it is our model.{ours}. Add it to the file.")
    model |= family.fixed
    if family.latents:
        model["mla"] = {field: keys.get(key, default) for key, (field, default) in family.latents.items()}
    if isinstance(num_layers := model.get("num_layers"), int) and 0 < num_layers <= MOST_LAYERS:
        problems += read_attention(keys, family, model)
        problems += read_experts(keys, family, model)
    problems += _read_functions(keys, family, model)
    problems += _read_mtp(keys, family, model)
    problems += _activation(keys, family, model)
    problems += _unusable({key: value for key, value in keys.items() if key not in ignore}, family, model)
    if seq_length is not None:
        problems += _too_long(model, seq_length)
        model["seq_length"] = seq_length
    if family.embedding_dropout is not None:
        given = keys.get("embd_pdrop", family.embedding_dropout)
        if given != model["hidden_dropout"]:
            problems.append(
                f"embd_pdrop = {given} and resid_pdrop = {model['hidden_dropout']}: here both are model.hidden_dropout. Make them "
                "equal."
            )
    section, built = checked_model(model, problems, source)
    if wrong := list(_not_derived(keys, family, built)):
        raise ConfigError(wrong, source)
    if built.attention_scale == built.head_size**-0.5:
        del section["attention_scale"]
    if model.get("attention_dropout"):
        # Only explicit attention can drop probabilities (engine/config/rules/needs.py).
        return {"model": section, "kernels": {"attention": "explicit"}}
    return {"model": section}


def _not_derived(keys: Keys, family: Family, model: ModelConfig) -> Iterator[str]:
    """Yield a problem for each derived key whose value does not follow from the model."""
    for key, derived in family.derived.items():
        given, wanted = keys.get(key), derived.value(model)
        if given != wanted and not (given is None and derived.may_lack):
            yield f"{key} = {shown(given)}: must be {shown(wanted)} here: {derived.why}."


def text_keys(keys: Keys) -> Keys:
    """Return the language model's keys: `text_config` and outer keys in OF_BOTH; without `text_config`, all keys."""
    text = keys.get("text_config")
    if not isinstance(text, Mapping):
        return keys
    return {**{key: value for key, value in keys.items() if key in OF_BOTH}, **text}


def _read_functions(keys: Keys, family: Family, model: dict[str, Any]) -> Iterator[str]:
    """Add to `model` the fields that are computed from a key or another field. Yields problems."""
    if family.scale is not None:
        given = keys.get(family.scale.key, family.scale.default)
        if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
            yield f"{family.scale.key} = {shown(given)}: must be a number above 0, on which the scale of attention depends."
        else:
            model["attention_scale"] = family.scale.to_ours(given)
    for ours, (source, function) in family.computed.items():
        if isinstance(value := model.get(source), int) and value > 0:
            model[ours] = function(value)


def _read_mtp(keys: Keys, family: Family, model: dict[str, Any]) -> Iterator[str]:
    """Add `mtp` to `model` if the family supports the file's multi-token prediction layers. Yields problems."""
    names = family.further if family.naming.ahead else ()
    number, problem = one_value(keys, names, "model.mtp.num_layers", 0)
    if problem:
        yield problem
    elif number != 0:
        model["mtp"] = {"num_layers": number}


def _unusable(keys: Keys, family: Family, model: Keys) -> Iterator[str]:
    known, rules = family.keys, {**OFF_ONLY, **family.off}
    unknown = []
    for key, value in keys.items():
        if key == QUANTIZATION:
            if value is not None and fp8_block(value) is None:
                yield (
                    f"{key} = {shown(value)}: of quantized weights only FP8 (e4m3) with a weight_block_size is read, and expanded "
                    "to bf16. Get the model in bf16, or have it expanded."
                )
        elif key in family.off or (key in OFF_ONLY and key not in known):
            off, why = rules[key]
            if value not in off and not agrees(key, value, model):
                yield f"{key} = {shown(value)}: {why}; the model would be another one."
        elif not (key in known or key in OF_OTHERS or _has_no_effect(key)):
            unknown.append(key)
    if len(unknown) > MOST_UNKNOWN:
        yield f"it has {counted(len(unknown), 'key')} that are not known here: it is no config.json of a published model."
    for key in unknown[:MOST_UNKNOWN]:
        # An unknown key that is null has no effect.
        if (value := keys[key]) is not None and not agrees(key, value, model):
            yield (
                f"{brief(key)} = {shown(value)}: not a key that is known here, so whether it changes the model is unknown too. If "
                f"it does not, let it through with --ignore {brief(key)}."
            )


def _not_to_ignore(keys: Keys, family: Family, ignore: Collection[str]) -> Iterator[str]:
    for key in ignore:
        if key not in keys:
            yield f"--ignore {key}: the file has no such key, so another one may be meant. Remove the option."
        elif key in family.keys or key in OF_OTHERS or key in ("model_type", QUANTIZATION) or key in OFF_ONLY:
            yield f"--ignore {key}: the key changes the model, which would be another one without it. Remove the option."


def _has_no_effect(key: str) -> bool:
    """Whether no layer reads the key. Keys that start with `_` are transformers' own notes."""
    return key in WITHOUT_EFFECT or key in OF_GENERATION or key.startswith("_") or is_note(key)


def passed_over(keys: Keys) -> list[str]:
    """List, sorted, the ignored keys to report: generation settings, keys starting with `_`, versions, tools' keys."""
    return sorted(
        key
        for key in keys
        if key in OF_GENERATION or key.startswith("_") or (is_note(key) and key not in WITHOUT_EFFECT)
    )


def passed_over_notes(keys: Keys, ignore: Collection[str] = ()) -> list[str]:
    """Build notes on keys that were not read, such as an image model's and those in `ignore`."""
    found, notes = passed_over(text_keys(keys)), []
    if "text_config" in keys:
        others = sorted(key for key, value in keys.items() if isinstance(value, Mapping) and key != "text_config")
        notes.append(
            f"of a model of several parts the language model (text_config) was taken, without {', '.join(map(brief, others))}"
        )
    if found:
        notes.append(f"keys of config.json without effect were ignored: {', '.join(map(brief, found[:MOST_UNKNOWN]))}")
    if (family := FAMILIES.get(str(text_keys(keys).get("model_type")))) is not None:
        notes += expert_notes(text_keys(keys), family)
    if ignore:
        notes.append(
            f"keys of config.json that are not known here were ignored (--ignore): {', '.join(map(brief, sorted(ignore)))}"
        )
    return notes


def _activation(keys: Keys, family: Family, model: dict[str, Any]) -> Sequence[str]:
    key, known = family.activation_key, family.activations
    given = keys.get(key, family.defaults[key])
    if not isinstance(given, str) or given not in known:
        return (f"{key} = {shown(given)}: must be one of {', '.join(known)}; no other one is built.",)
    model["activation"] = known[given]
    return ()


def _too_long(model: Keys, seq_length: int) -> Iterator[str]:
    longest = model.get("seq_length")
    if model["position"] == "learned" and isinstance(longest, int) and seq_length > longest:
        yield f"--seq-length {seq_length} is beyond the {longest} learned positions of the model. Give at most {longest}."


def family_of(model: ModelConfig, wanted: str | None = None) -> str:
    """Find a transformers `model_type` that can express the model.

    Returns `wanted`, or the first match in `FAMILIES` if `wanted` is None.

    Raises:
        ConfigError: the model differs from `wanted`, or from all families. The error lists the differences.
    """
    differences = {name: list(_differences(model, name)) for name in (FAMILIES if wanted is None else [wanted])}
    for name, found in differences.items():
        if not found:
            return name
    raise ConfigError(
        [f"as {name}: {'; '.join(found)}. It would be another model." for name, found in differences.items()],
        "an export of this model",
    )


def to_hugging_face(
    model: ModelConfig, family: str, *, dtype: str, special_ids: Keys | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Build the config.json content for a model.

    Also returns notes on training settings that the family has no key for.

    Args:
        family: family from `family_of`.
        dtype: weight dtype, as torch spells it (`bfloat16`).
        special_ids: `bos_token_id` and the like, written unchanged; None writes null for bos, eos and pad.
    """
    chosen = FAMILIES[family]
    keys: dict[str, Any] = {"architectures": [chosen.architecture], "model_type": family}
    resolved = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size, "ffn_hidden_size": model.ffn_size}
    keys |= {theirs: resolved.get(ours, getattr(model, ours)) for theirs, ours in chosen.names.items()}
    if chosen.scale is not None:
        keys[chosen.scale.key] = chosen.scale.to_theirs(_attention_scale(model))
    keys[chosen.activation_key] = model.activation_kind.hugging_face[0]
    keys |= {theirs: getattr(model.mla, ours) for theirs, (ours, _) in chosen.latents.items()}
    keys |= {theirs: derived.value(model) for theirs, derived in chosen.derived.items()}
    keys |= dict(expert_keys(model, chosen)) | ({chosen.further[0]: model.num_mtp_layers} if chosen.further else {})
    notes = []
    if chosen.embedding_dropout is not None:
        keys["embd_pdrop"] = model.hidden_dropout
    elif model.hidden_dropout and "hidden_dropout" not in chosen.fields:
        notes.append(f"model.hidden_dropout = {model.hidden_dropout} has no key in {family}: it acts in training only")
    if model.z_loss:
        notes.append(f"model.z_loss = {model.z_loss} has no key in {family}: it acts in training only")
    if model.moe is not None and model.moe.balance != BalanceConfig():
        notes.append(f"model.moe.balance has no keys in {family}: it acts in training only")
    if model.mtp is not None and model.mtp.loss_weight != MTPConfig().loss_weight:
        notes.append(
            f"model.mtp.loss_weight = {model.mtp.loss_weight} has no key in {family}: it acts in training only"
        )
    keys |= dict(attention_keys(model, chosen))
    # If left out, these default to the family's own vocabulary, and generation would stop at an unrelated token.
    keys |= dict.fromkeys(SPECIAL_IDS[:3]) if special_ids is None else special_ids
    # Both transformers 4 and 5 read `torch_dtype`.
    return {**keys, "torch_dtype": dtype}, notes


def _attention_scale(model: ModelConfig) -> float:
    """Factor that multiplies attention logits, by default 1 / sqrt(head size)."""
    return model.attention_scale if model.attention_scale is not None else model.head_size**-0.5


def _differences(model: ModelConfig, name: str) -> Iterator[str]:
    """Yield a phrase for each model feature that the family `name` cannot express."""
    family = FAMILIES[name]
    for ours, value in family.fixed.items():
        if getattr(model, ours) != value:
            yield f"model.{ours} = {getattr(model, ours)}, there it is {value}"
    for ours, (source, function) in family.computed.items():
        if getattr(model, ours) != (value := function(getattr(model, source))):
            yield f"model.{ours} = {getattr(model, ours)}, there it is {value} for model.{source} = {getattr(model, source)}"
    if model.activation not in (allowed := dict.fromkeys(family.activations.values())):
        yield f"model.activation = {model.activation}, there it is {' or '.join(allowed)}"
    if family.scale is not None and family.scale.to_theirs(_attention_scale(model)) is None:
        yield f"model.attention_scale = {_attention_scale(model)}, which its {family.scale.key} cannot express"
    for given in beyond_plain(model, family.fields):
        yield f"{given}, which it does not have"
    yield from attention_differences(model, family)
    yield from expert_differences(model, family)
    if family.latents:
        if model.mla is None:
            yield "model.mla = null, there attention is through latents"
        return
    fields = family.names.values()
    heads, width = model.num_attention_heads, model.hidden_size
    if "num_kv_heads" not in fields and model.kv_heads != heads:
        yield f"model.num_kv_heads = {model.kv_heads}, there each of the {heads} heads has its own"
    if "head_dim" not in fields and model.head_size * heads != width:
        yield f"model.head_dim = {model.head_size}, there heads x head_dim is the hidden size {width}"
    elif family.heads_divide_hidden and width % heads:
        yield f"model.hidden_size = {width}, there it is a multiple of num_attention_heads = {heads}"
