"""Counts parameters by module in three ways.

    formula   uses the sizes in the config alone, and is written without looking at `models/specs.py`
    list      adds up the parameters that `models/specs.py` lists
    count     adds up the ranks' parameter records; a box (a rank's part of a parameter) that n ranks hold counts 1/n on each

Count and list must agree exactly. So the start banner shows a layer that was lost when the layers were divided among stages. List
and formula agree for every model that a configuration can name. Padding is outside the logical shapes and is never counted.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.moe import MoEConfig
from triaxis.engine.layout.shard_spec import ParamRecord, ReduceAxis

OTHER = "other"

MODULES = ("embedding", "attention", "mlp", "norms", "mtp", "head", OTHER)
"""Rows of the table. A tied head and learned positions count with the embedding. The formula leaves the last row at 0."""

_IN_FORMULA = re.compile(
    r"(^|\.)(word|position|(q|kv)(_[ab])?|proj|sinks|up|gate_up|down|router|projection|head"
    r"|((post|final|[qk]|(q|kv)_a|embedding|hidden)_)?norm)(\.(weight|bias))?$"
)
"""Pattern for the ends of parameter names that the formula counts."""


def parameters_by_module(model: ModelConfig) -> dict[str, int]:
    """Count parameters by module with a formula, for the logical vocabulary.

    V is the vocabulary size, h the hidden size, a the number of heads, g of kv heads, d the head size, f the MLP width and S the
    sequence length. The L layers include D multi-token prediction layers. A norm has h' parameters: h, or
    2 h in a LayerNorm. "+ X if C" adds X only if C holds:

        embedding   V h                           + S h if positions are learned
        attention   L (2 a d h + 2 g d h)         + L (a + 2 g) d if bias is qkv or all; + L h if all; + a for each layer with sinks
        mlp         L 2 f h   (gated: 3 f h)      + L (f + h) if bias is all   (gated: 2 f + h)
        mtp         D 2 h^2
        norms       (2 L + 3 D + 1) h'            + 2 L h' if norms stand both before and after each branch
                                                  + 2 L d if QK-norm, or L (a + g) d if over all heads; + L (r_q + r) for latents
        head        V h                           0 if tied

    In a layer with E experts and some shared ones, all f_e wide, (E + shared) f_e replaces f. The router adds E h, plus E for a
    choice bias. Latent attention has query and key latents of sizes r_q and r, and head sizes dn + dr and dv:

        attention   L ((r_q + r + dr) h + r_q a (dn + dr) + r a (dn + dv) + a dv h)

    If there are no query latents, r_q is 0 in the first factor, and h replaces r_q in the second product.
    """
    h, d, f = model.hidden_size, model.head_size, model.ffn_size
    ahead = 0 if model.mtp is None else model.mtp.num_layers
    a, g, layers = model.num_attention_heads, model.kv_heads, model.num_layers + ahead
    inputs_of_mlp = model.activation_kind.num_inputs

    attention, latents, mla = 2 * (a + g) * d * h, 0, model.mla
    if mla is not None:
        r_q, r, dn, dr, dv = (
            *(mla.q_lora_rank or 0, mla.kv_lora_rank),
            *(mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim),
        )
        attention = (r_q + r + dr) * h + (r_q or h) * a * (dn + dr) + r * a * (dn + dv) + a * dv * h
        latents = r_q + r
    mlp = (inputs_of_mlp + 1) * f * h
    if model.bias != "none":
        attention += (a + 2 * g) * d
    if model.bias == "all":
        attention += h
        mlp += inputs_of_mlp * f + h
    norm = len(model.norm_kind.parameters) * h
    with_experts = len(model.expert_layers)
    of_heads = {False: 0, True: 2 * d, "all_heads": (a + g) * d}
    positions = model.seq_length * h if model.position_kind.has_table else 0
    return {
        "embedding": model.vocab_size * h + positions,
        "attention": layers * attention + a * sum(kind.sinks for kind in model.kinds),
        "mlp": (layers - with_experts) * mlp + with_experts * _experts(model, model.moe),
        "norms": (2 * (model.norms_before + model.norms_after) * layers + 3 * ahead + 1) * norm
        + layers * (of_heads[model.qk_norm] + latents),
        "mtp": ahead * 2 * h * h,
        "head": 0 if model.tie_embeddings else model.vocab_size * h,
        OTHER: 0,
    }


def _experts(model: ModelConfig, moe: MoEConfig | None) -> int:
    """Count the parameters in the router and the experts of one layer."""
    if moe is None:
        return 0
    width = (moe.num_experts + moe.shared_experts) * moe.ffn_hidden_size
    has_bias = moe.choice_bias or moe.balance.bias_rate > 0
    of_router = moe.num_experts * (model.hidden_size + has_bias)
    return of_router + (model.activation_kind.num_inputs + 1) * width * model.hidden_size


def num_active(model: ModelConfig) -> int:
    """Count the parameters that one token uses, without the experts that the token skips."""
    moe = model.moe
    total = sum(parameters_by_module(model).values())
    if moe is None:
        return total
    of_expert = (model.activation_kind.num_inputs + 1) * moe.ffn_hidden_size * model.hidden_size
    return total - len(model.expert_layers) * (moe.num_experts - moe.top_k) * of_expert


def module_of(name: str) -> str:
    """Find a parameter's module in `MODULES` from its global name. Every norm belongs to the module `norms`."""
    parts = name.split(".")
    if any(part == "norm" or part.endswith("_norm") for part in parts):
        return "norms"
    return next((module for module in MODULES if module in parts), OTHER)


def local_counts(
    records: Iterable[ParamRecord], owners: Mapping[ReduceAxis, int], replicas: Mapping[str, int]
) -> dict[str, float]:
    """Compute this rank's share of the parameters, by module. Summed over all ranks, the shares give the model's parameter count.

    Args:
        records: records of all parameters that this rank holds.
        owners: number of ranks on each axis that gradients are reduced over; these ranks hold the same part of a parameter.
        replicas: number of ranks that hold equal copies, by the name in a record's `replicas` (`tp`, `kv_replicas`, `ends`).

    Returns:
        Shares as floats. If n ranks hold the same k elements, each rank's share is k/n. Sums rounded by `round_counts` are exact
        below 2^50 parameters.
    """
    shares = dict.fromkeys(MODULES, Fraction(0))
    for record in records:
        holders = owners[record.reduce_over] * (replicas[record.replicas] if record.replicas else 1)
        shares[module_of(record.name)] += Fraction(record.box_numel, holders)
    return {module: float(share) for module, share in shares.items()}


def round_counts(sums: Mapping[str, float]) -> dict[str, int]:
    """Round each module's sum over all ranks to a whole number.

    A parameter that several ranks hold counts as a fraction on each, so the sums have rounding errors.
    """
    return {module: round(value) for module, value in sums.items()}


def comparison(counted: Mapping[str, int], listed: Mapping[str, int], model: ModelConfig) -> list[str]:
    """Format the parameter count by module, and how it differs from two other counts.

    These are the sums over `listed` and the formula's numbers (`parameters_by_module`).

    Args:
        counted: parameters on the ranks, by module.
        listed: number of elements in each parameter that `models/specs.py` lists, by name.
    """
    of_list, formula = dict.fromkeys(MODULES, 0), parameters_by_module(model)
    for name, numel in listed.items():
        of_list[module_of(name)] += numel
    modules = ", ".join(f"{module} {counted[module]:,}" for module in MODULES if counted[module])
    total, wanted, by_formula = (sum(counts.values()) for counts in (counted, of_list, formula))
    if dict(counted) != of_list:
        wrong = [
            f"{module}: {counted[module]:,} counted, {of_list[module]:,} listed"
            for module in MODULES
            if counted[module] != of_list[module]
        ]
        said = f"{total:,} counted on the ranks, but {wanted:,} listed: the model is not the configured one"
        return [said, *wrong]
    if of_list != formula:
        difference, places = total - by_formula, ", ".join(_beside_formula(listed, of_list, formula))
        more = f"{abs(difference):,} {'fewer' if difference < 0 else 'more'} than"
        return [f"{total:,} parameters: {more} this configuration's formula, in {places}", modules]
    used = f"; a token uses {num_active(model):,}" if model.has_experts else ""
    return [f"{total:,} counted = {by_formula:,} by the formula{used}: {modules}"]


def _beside_formula(listed: Mapping[str, int], of_list: Mapping[str, int], formula: Mapping[str, int]) -> Iterator[str]:
    """Yield listed parameters' names that the formula lacks, with `*` for the layer number.

    If these names do not explain a module's difference between list and formula, yield the module's name instead.
    """
    new: dict[str, dict[str, int]] = {module: {} for module in MODULES}
    for name, numel in listed.items():
        if not _IN_FORMULA.search(name):
            alike, of_module = re.sub(r"^layers\.\d+", "layers.*", name), new[module_of(name)]
            of_module[alike] = of_module.get(alike, 0) + numel
    for module, names in new.items():
        if of_list[module] - formula[module] == sum(names.values()):
            yield from names
        else:
            yield module
