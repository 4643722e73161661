"""Map the expert keys of a Hugging Face config.json to our fields, and back.

num_experts, num_experts_per_tok, norm_topk_prob ..                          <->  model.moe
first_k_dense_replace | decoder_sparse_step, mlp_only_layers                 <->  model.layers: [dense*3, moe*58]

A family's keys are data (`family.py`). The loss terms that transformers adds in training are left out, because they average over
one microbatch's tokens and so depend on the layout.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.moe import MoEConfig
from triaxis.engine.errors import shown
from triaxis.models.interop.huggingface.family import ExpertKeys, Family

Keys = Mapping[str, Any]
Fields = dict[str, Any]

DENSE, MOE = "dense", "moe"
"""Names for the two layer kinds in every model with experts."""

IN_TRAINING = ("router_aux_loss_coef", "aux_loss_alpha")
"""Factors for expert load-balancing losses."""

NO_PART_OF_A_MODEL = frozenset({"balance", "choice_bias", "row_headroom"})
"""`model.moe` fields that are not compared with the family's keys: those that do not change logits, and `choice_bias`, for which
`ExpertKeys.has_bias` is compared.
"""


def read_experts(keys: Keys, family: Family, model: Fields) -> list[str]:
    """Add `moe` and `layers` to `model`, which has `num_layers`. Returns problems.

    If there are problems, or no layer has experts, `model` is unchanged.
    """
    experts = family.experts
    if experts is None:
        return []
    kinds, problems = _kinds(keys, experts, model["num_layers"])
    if problems or MOE not in kinds:
        return problems
    moe, problems = _section(keys, experts)
    if problems:
        return problems
    assert "layers" not in model, "layers of this family differ by their attention too"
    model["moe"] = moe
    model["layers"] = [name if (count := len(list(run))) == 1 else f"{name}*{count}" for name, run in groupby(kinds)]
    return []


def _kinds(keys: Keys, experts: ExpertKeys, num_layers: int) -> tuple[list[str], list[str]]:
    """Read which layers have experts. Returns DENSE or MOE for each layer, and problems."""
    first, step = (keys.get(key, default) if key else default for key, default in (experts.first, experts.step))
    listed = keys.get(experts.listed) or []
    problems = [
        f"{key} = {shown(value)}: must be a whole number of at least {least}; which layers have experts would be a guess."
        for (key, _), value, least in ((experts.first, first, 0), (experts.step, step, 1))
        if isinstance(value, bool) or not isinstance(value, int) or value < least
    ]
    if not isinstance(listed, list):
        problems.append(
            f"{experts.listed} = {shown(listed)}: must be a list of layers; which have experts would be a guess."
        )
    if problems:
        return [], problems
    has_experts = (layer >= first and (layer + 1) % step == 0 and layer not in listed for layer in range(num_layers))
    return [MOE if each else DENSE for each in has_experts], []


def one_value(keys: Keys, names: Iterable[str], field: str, default: Any = None) -> tuple[Any, str | None]:
    """Read our `field` from the first of several keys that is given. Returns `default` if none is, and a problem if they differ."""
    given = {name: keys[name] for name in names if keys.get(name) is not None}
    value = next(iter(given.values()), default)
    if all(other == value for other in given.values()):
        return value, None
    spelled = " and ".join(f"{name} = {shown(other)}" for name, other in given.items())
    return value, f"{spelled}: both are our {field}, and which is meant would be a guess. Remove one."


def _section(keys: Keys, experts: ExpertKeys) -> tuple[Fields, list[str]]:
    """Build the `model.moe` section, and list problems."""
    moe: Fields = dict(experts.fixed) | ({"choice_bias": True} if experts.has_bias else {})
    problems = []
    for names, (field, default) in experts.names.items():
        value, problem = one_value(keys, names, f"model.moe.{field}", default)
        if problem:
            problems.append(problem)
        elif value is not None:
            moe[field] = value
        elif MoEConfig.model_fields[field].is_required():
            problems.append(f"{names[0]} is missing: it is our model.moe.{field}. Add it to the file.")
    if experts.method:
        key, without, with_groups = experts.method
        given_method = keys.get(key) or without
        if given_method not in (without, with_groups):
            problems.append(
                f"{key} = {shown(given_method)}: must be {without} or {with_groups}; no other choice is built."
            )
        elif given_method == without:
            moe |= {"groups": 1, "top_groups": 1}
    return moe, problems


def expert_notes(keys: Keys, family: Family) -> Iterator[str]:
    """Yield a note if transformers would add a load-balancing loss, which is not imported."""
    given = [f"{key} = {keys[key]}" for key in IN_TRAINING if keys.get(key)]
    if family.experts is not None and given:
        yield (
            f"{', '.join(given)} acts in training only and is not taken over: model.moe.balance has the losses of Triaxis"
        )


def expert_keys(model: ModelConfig, family: Family) -> Iterator[tuple[str, object]]:
    """Yield the keys that describe the experts and their layers, with their values."""
    experts = family.experts
    if experts is None:
        return
    # Multi-token prediction layers count too: if they follow dense layers they are dense, and their numbers must be listed.
    dense = [number for number, kind in enumerate(model.kinds) if not kind.has_experts]
    if experts.first[0]:
        yield experts.first[0], len(dense)
    if experts.step[0]:
        yield experts.step[0], 1
    if experts.listed:
        yield experts.listed, dense
    if model.moe is None:
        return
    for (key, *_), (field, _) in experts.names.items():
        yield key, getattr(model.moe, field)
    if experts.method:
        yield experts.method[0], experts.method[2 if model.moe.groups > 1 else 1]


def expert_differences(model: ModelConfig, family: Family) -> Iterator[str]:
    """Yield a phrase for each of the model's expert features that the family lacks."""
    experts, moe = family.experts, model.moe
    if experts is None:
        return
    if moe is None:
        if not experts.may_be_dense:
            yield "model.moe = null, there every layer has experts"
        return
    known = {field for field, _ in experts.names.values()} | NO_PART_OF_A_MODEL
    for field, info in MoEConfig.model_fields.items():
        value = getattr(moe, field)
        if field in experts.fixed:
            is_idle = field == "group_score" and moe.groups == 1
            if value != experts.fixed[field] and not is_idle:
                yield f"model.moe.{field} = {value}, there it is {experts.fixed[field]}"
        elif field not in known and value != info.get_default(call_default_factory=True):
            yield f"model.moe.{field} = {value}, which it does not have"
    if moe.has_bias and not experts.has_bias:
        yield "a bias of the choice (model.moe.choice_bias or balance.bias_rate), which it does not have"
    elif experts.has_bias and not moe.has_bias:
        yield "no bias of the choice, there is one: model.moe.choice_bias = True"
    if experts.has_shared and not moe.shared_experts:
        yield "model.moe.shared_experts = 0, there is at least one"
    dense = [number for number, kind in enumerate(model.kinds[: model.num_layers]) if not kind.has_experts]
    if dense and not experts.may_be_dense:
        yield f"layer {dense[0]} without experts, there every layer has some"
    elif not experts.listed and dense != list(range(len(dense))):
        yield f"layer {dense[-1]} without experts comes after layers with experts, there all dense layers come first"
