"""A Hugging Face `config.json` as our `model` section, and the reverse (no torch, no transformers here).

    {"model_type": "llama", "hidden_size": 4096, "rms_norm_eps": 1e-5, ...}
      <->  {"model": {"hidden_size": 4096, "norm": "rmsnorm", "norm_eps": 1e-5, ...}}

Each family is a table from their keys to our fields, with the values that a family fixes and its file omits (RMSNorm, biases
on queries, keys and values). A key whose effect is not built here is refused unless its value switches it off. An unknown key
is refused as well: a model that differs without a message costs more than a deleted line.

Sources: the configuration classes of transformers (`configuration_gpt2.py`, `..._llama.py`, `..._mistral.py`,
`..._qwen2.py`, `..._qwen3.py`) for keys and for the defaults of those that a file may leave out.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from engine.config.attention_kinds import beyond_plain
from engine.config.layer_kinds import ACTIVATIONS
from engine.config.model import ModelConfig
from engine.errors import ConfigError
from models.interop.huggingface.attention_keys import read_windows, unknown_kinds, window_keys, with_rope_parameters

Keys = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """The keys and rules of one `model_type`.

    Attributes:
        architecture: the class of transformers that is a language model of this family.
        activation_key: their key of the activation.
        is_gated: the MLP is gated with any activation.
        names: their key -> our field.
        fixed: our fields that the family decides, not the file.
        defaults: values of keys that a file may leave out; other keys of `names` must be there.
        attention: our fields of attention that it has too (`engine.config.attention_kinds.BEYOND_PLAIN`).
    """

    architecture: str
    activation_key: str
    is_gated: bool
    names: Mapping[str, str]
    fixed: Mapping[str, object]
    defaults: Mapping[str, object]
    attention: tuple[str, ...] = ()

    @property
    def activations(self) -> dict[str, str]:
        """Return our activation for each of theirs."""
        kinds = [kind for kind in ACTIVATIONS.values() if kind.is_gated == self.is_gated]
        return {theirs: kind.name for kind in kinds for theirs in kind.hugging_face}


_LLAMA_NAMES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "seq_length",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_base",
    "tie_word_embeddings": "tie_embeddings",
    "attention_dropout": "attention_dropout",
    "initializer_range": "init_std",
}
_LLAMA_FIXED = {"norm": "rmsnorm", "position": "rope", "bias": "none", "qk_norm": False}
_LLAMA_DEFAULTS = {
    "hidden_act": "silu",
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}


def _llama_like(
    architecture: str,
    fixed: Mapping[str, object] | None = None,
    attention: tuple[str, ...] = ("rope_scaling",),
    **defaults: object,
) -> Family:
    """Build a family with Llama's keys and with these fixed fields and defaults in place of Llama's."""
    fixed, defaults = {**_LLAMA_FIXED, **(fixed or {})}, {**_LLAMA_DEFAULTS, **defaults}
    return Family(architecture, "hidden_act", True, _LLAMA_NAMES, fixed, defaults, attention)


_BY_LAYER = ("rope_scaling", "window", "layers", "layer_kinds")
"""Windows on some layers, which `layer_types` lists."""


FAMILIES = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        activation_key="activation_function",
        is_gated=False,
        names={
            "n_layer": "num_layers",
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_inner": "ffn_hidden_size",
            "n_positions": "seq_length",
            "vocab_size": "vocab_size",
            "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tie_embeddings",
            "resid_pdrop": "hidden_dropout",
            "attn_pdrop": "attention_dropout",
            "initializer_range": "init_std",
        },
        fixed={"norm": "layernorm", "position": "learned", "bias": "all", "qk_norm": False},
        defaults={
            "activation_function": "gelu_new",
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "resid_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "initializer_range": 0.02,
        },
    ),
    "llama": _llama_like("LlamaForCausalLM"),
    "mistral": _llama_like("MistralForCausalLM", None, ("rope_scaling", "window"), num_key_value_heads=8),
    "qwen2": _llama_like("Qwen2ForCausalLM", {"bias": "qkv"}, _BY_LAYER, num_key_value_heads=32),
    "qwen3": _llama_like("Qwen3ForCausalLM", {"qk_norm": True}, _BY_LAYER, num_key_value_heads=32, head_dim=128),
}
"""By `model_type`, those first that an export takes where several would do."""

OFF_ONLY: Mapping[str, tuple[tuple[object, ...], str]] = {
    "rope_scaling": ((None,), "is a mapping"),
    "rope_parameters": ((None,), "is a mapping"),
    "mlp_bias": ((False, None), "biases in the MLP without LayerNorm biases are not built yet"),
    "attention_bias": ((False, None), "a bias on the attention's output projection alone is not built yet"),
    "rope_interleaved": ((False,), "RoPE that turns neighbouring elements is not built"),
    "use_mrope": ((False,), "RoPE over several positions is not built"),
    "partial_rotary_factor": ((1.0, None), "RoPE on a part of each head is not built yet"),
    "scale_attn_weights": ((True,), "attention without 1 / sqrt(head_dim) is not built"),
    "scale_attn_by_inverse_layer_idx": ((False,), "attention scaled by layer is not built"),
    "add_cross_attention": ((False,), "cross-attention is not built: Triaxis trains decoders"),
    "is_encoder_decoder": ((False,), "encoders are not built: Triaxis trains decoders"),
    "quantization_config": ((None,), "quantized weights are not trained"),
}
"""Keys that must be absent or have one of these values, and why."""

WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path",
        "_num_labels",
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "is_llama_config",
        "label2id",
        "model_type",
        "n_ctx",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
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
"""Keys that do not change what is trained: names, token ids of generation, dtypes of files, heads of other tasks."""

OF_GENERATION = frozenset(
    {
        "begin_suppress_tokens",
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
"""Keys of text generation and of the tokenizer, which older releases of transformers wrote into config.json."""

HANDLED = frozenset(
    {
        "activation_function",
        "embd_pdrop",
        "hidden_act",
        "layer_types",
        "max_window_layers",
        "sliding_window",
        "use_sliding_window",
    }
)
"""Keys that the functions below look at by name."""


def from_hugging_face(
    keys: Keys, seq_length: int | None = None, source: str = "config.json", ignore: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """Convert a Hugging Face config to our sections: `model`, and `kernels` where the model needs a choice there.

    Args:
        keys: the file's content.
        seq_length: training samples of this length in place of the longest that the model was made for.
        source: the file's name, for messages.
        ignore: unknown keys that are accepted.

    Raises:
        ConfigError: another family; keys that are missing, unknown, or switch on what is not built; a key to ignore that is not
            there or whose effect is known. All at once.
    """
    family = FAMILIES.get(str(keys.get("model_type")))
    if family is None:
        raise ConfigError(
            [
                f"model_type = {keys.get('model_type')!r}: must be one of {', '.join(FAMILIES)}; no other family can be built here."
            ],
            source,
        )
    keys, scaling, problems = with_rope_parameters(keys)
    problems += _unusable({key: value for key, value in keys.items() if key not in ignore}, family)
    problems += _not_to_ignore(keys, family, ignore)
    model: dict[str, Any] = {}
    for theirs, ours in family.names.items():
        if theirs in keys or theirs in family.defaults:
            model[ours] = keys.get(theirs, family.defaults.get(theirs))
        elif not (ours == "seq_length" and seq_length is not None):
            problems.append(f"{theirs} is missing: it is our model.{ours}. Add it to the file.")
    model |= family.fixed
    model["rope_scaling"] = scaling
    if seq_length is not None:
        problems += _too_long(model, seq_length)
        model["seq_length"] = seq_length
    problems += _activation(keys, family, model)
    problems += read_windows(keys, family.attention, model)
    if keys["model_type"] == "gpt2" and keys.get("embd_pdrop", 0.1) != model["hidden_dropout"]:
        problems.append(
            f"embd_pdrop = {keys.get('embd_pdrop', 0.1)} and resid_pdrop = {model['hidden_dropout']}: here both are "
            f"model.hidden_dropout. Make them equal."
        )
    if problems:
        raise ConfigError(problems, source)
    section = {name: value for name, value in model.items() if value is not None}
    try:
        ModelConfig.model_validate(section)
    except ValidationError as error:
        wrong = [f"model.{detail['loc'][0]} = {detail['input']!r}: {detail['msg']}." for detail in error.errors()]
        raise ConfigError(wrong, source) from error
    if model.get("attention_dropout"):
        # Only explicit attention can drop probabilities (engine/config/model.py).
        return {"model": section, "kernels": {"attention": "explicit"}}
    return {"model": section}


def _unusable(keys: Keys, family: Family) -> Iterator[str]:
    for key, value in keys.items():
        if key in OFF_ONLY:
            off, why = OFF_ONLY[key]
            if value not in off:
                yield f"{key} = {value!r}: {why}; the model would be another one."
        elif key not in family.names and key not in HANDLED and not _has_no_effect(key):
            yield (
                f"{key} = {value!r}: not a key that is known here, so whether it changes the model is not known either. If it "
                f"does not, let it through with --ignore {key}."
            )


def _not_to_ignore(keys: Keys, family: Family, ignore: Collection[str]) -> Iterator[str]:
    for key in ignore:
        if key not in keys:
            yield f"--ignore {key}: the file has no such key, so another one may be meant. Remove the option."
        elif key in family.names or key in HANDLED or key == "model_type" or key in OFF_ONLY:
            yield f"--ignore {key}: the key changes the model, which would be another one without it. Remove the option."


def _has_no_effect(key: str) -> bool:
    """Return whether no layer reads the key, such as one that begins with `_`: transformers keeps its own notes there."""
    return key in WITHOUT_EFFECT or key in OF_GENERATION or key.startswith("_")


def passed_over(keys: Keys) -> list[str]:
    """Return the keys of generation and of bookkeeping that are in the file and compute nothing, sorted."""
    return sorted(key for key in keys if key in OF_GENERATION or key.startswith("_"))


def passed_over_notes(keys: Keys, ignore: Collection[str] = ()) -> list[str]:
    """Return a line on the keys without effect, and one on those that `--ignore` named; empty where there is none."""
    found, notes = passed_over(keys), []
    if found:
        notes.append(f"keys of config.json that compute nothing were passed over: {', '.join(found)}")
    if ignore:
        notes.append(
            f"keys of config.json that are not known here were ignored (--ignore): {', '.join(sorted(ignore))}"
        )
    return notes


def _activation(keys: Keys, family: Family, model: dict[str, Any]) -> Sequence[str]:
    key, known = family.activation_key, family.activations
    given = keys.get(key, family.defaults[key])
    if not isinstance(given, str) or given not in known:
        return (f"{key} = {given!r}: must be one of {', '.join(known)}; no other one is built.",)
    model["activation"] = known[given]
    return ()


def _too_long(model: Keys, seq_length: int) -> Iterator[str]:
    longest = model.get("seq_length")
    if model["position"] == "learned" and isinstance(longest, int) and seq_length > longest:
        yield f"--seq-length {seq_length} is beyond the {longest} learned positions of the model. Give at most {longest}."


def family_of(model: ModelConfig, wanted: str | None = None) -> str:
    """Return the `model_type` of transformers that can express our model: `wanted`, or the first of `FAMILIES`.

    Raises:
        ConfigError: `wanted`, or every one of them, differs from the model: in what, by name.
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
    model: ModelConfig, family: str, *, dtype: str, end_of_document: int | None = None, special_ids: Keys | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Build the content of a config.json for our model, and notes for the reader.

    Args:
        family: from `family_of`.
        dtype: of the weights, in torch's word (`bfloat16`).
        end_of_document: the id at which generation stops; None: none is known.
        special_ids: `bos_token_id` and the like of the model that this one came from, written as they are; None: it came from none.
    """
    chosen = FAMILIES[family]
    keys: dict[str, Any] = {"architectures": [chosen.architecture], "model_type": family}
    resolved = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size, "ffn_hidden_size": model.ffn_size}
    keys |= {theirs: resolved.get(ours, getattr(model, ours)) for theirs, ours in chosen.names.items()}
    keys[chosen.activation_key] = model.activation_kind.hugging_face[0]
    notes = []
    if family == "gpt2":
        keys["embd_pdrop"] = model.hidden_dropout
    elif model.hidden_dropout:
        notes.append(f"model.hidden_dropout = {model.hidden_dropout} has no key in {family}: it acts in training only")
    if model.rope_scaling is not None:
        fields = model.rope_scaling.model_dump(mode="json", exclude_defaults=True)
        keys["rope_scaling"] = {"rope_type": fields.pop("type"), **fields}
    keys |= dict(window_keys(model, chosen.attention))
    # Left out, these would be ids of the family's own vocabulary: generation would stop at a token that means something else.
    none_but_eos = {"bos_token_id": None, "eos_token_id": end_of_document, "pad_token_id": None}
    keys |= none_but_eos if special_ids is None else special_ids
    # The word that transformers 4 and 5 both read.
    return {**keys, "torch_dtype": dtype}, notes


def _differences(model: ModelConfig, name: str) -> Iterator[str]:
    """List the features of the model that a family cannot express."""
    for ours, value in FAMILIES[name].fixed.items():
        if getattr(model, ours) != value:
            yield f"model.{ours} = {getattr(model, ours)}, there it is {value}"
    if model.activation not in (allowed := dict.fromkeys(FAMILIES[name].activations.values())):
        yield f"model.activation = {model.activation}, there it is {' or '.join(allowed)}"
    for given in beyond_plain(model, FAMILIES[name].attention):
        yield f"{given}, which it does not have"
    yield from unknown_kinds(model)
    fills = model.head_size * model.num_attention_heads == model.hidden_size
    if name == "gpt2":
        if model.kv_heads != model.num_attention_heads:
            yield f"model.num_kv_heads = {model.kv_heads}, there each of the {model.num_attention_heads} heads has its own"
        if not fills:
            yield f"model.head_dim = {model.head_size}, there heads x head_dim is the hidden size {model.hidden_size}"
    elif name == "llama" and model.hidden_size % model.num_attention_heads:
        yield (
            f"model.hidden_size = {model.hidden_size}, there it is a multiple of num_attention_heads = "
            f"{model.num_attention_heads}"
        )
