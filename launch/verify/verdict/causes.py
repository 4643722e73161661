"""Describe a difference, and find the axis that causes it.

These measurements can name an axis, in this order:

    sub-layouts     the axis without which the difference vanishes
    which ranks     the axis that separates right ranks from wrong ranks
    partial sums    the axis along which projections of the ranks' gradients add up to 1
    factor          the only axis whose size, or its inverse, is the factor between wrong and right values

A sub-layout is the same run without one axis or feature. If sub-layouts were run, the next two rows only choose between the axes
that the first row names. If none were run, only the last two rows are used; for wrong samples, `_axis_of_samples` decides instead.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from triaxis.engine.config.values.optimizer_kinds import EMA, MASTER
from triaxis.launch.verify.verdict.deviation import Deviation
from triaxis.launch.verify.verdict.evidence import ALONE, Cause, Difference, Evidence, SublayoutVerdict, relative_errors
from triaxis.launch.verify.verdict.records import RankReport, together

AXES = ("tp", "pp", "cp", "dp", "ep", "etp")
"""The mesh axes, then the expert axes, which cut the same ranks of a stage in another way."""
LOOSEST_SUM = 0.05
"""Largest distance from 1 at which the sum of projections indicates partial sums; the rounding bound is used if it is smaller."""

FP32_ROUNDING = 1e-6
"""Largest relative error of a tensor that fp32 rounding explains: a few times one element's rounding, 6e-8."""


def cause_of(evidence: Evidence, differing: Sequence[Difference], outcomes: Sequence[SublayoutVerdict] = ()) -> Cause:
    """Find the axis that causes a difference, and describe the measurements.

    Args:
        differing: all differences in the first quantity (`Difference.what`) that differs.
        outcomes: sub-layout verdicts; empty: no sub-layouts were run.
    """
    parts = [_appearance(evidence, differing)]
    apart = axes_apart(evidence, differing)
    parts += [
        f"ranks with {axis} {', '.join(map(str, wrong))} are wrong and the others right"
        for axis, wrong in apart.items()
    ]
    parts += _said_by(outcomes)
    axis = _from_outcomes(evidence, differing, outcomes) if outcomes else _from_ranks(evidence, differing)
    return Cause(axis, "; ".join(parts))


def axes_apart(evidence: Evidence, differing: Sequence[Difference]) -> dict[str, tuple[int, ...]]:
    """Find the axes that separate right ranks from wrong ranks.

    Returns:
        The wrong ranks' coordinates on each such axis.
    """
    right_ranks: list[RankReport] = []
    wrong_ranks: list[RankReport] = []
    for rank in evidence.ranks:
        found = _deviation_on(rank, differing)
        if found is not None:
            is_wrong = not found.error <= differing[0].bound * found.wanted_norm
            (wrong_ranks if is_wrong else right_ranks).append(rank)
    apart = {}
    for axis in AXES:
        wrong = {rank.place(axis)[axis] for rank in wrong_ranks}
        right = {rank.place(axis)[axis] for rank in right_ranks}
        if wrong and right and not wrong & right:
            apart[axis] = tuple(sorted(wrong))
    return apart


def _deviation_on(rank: RankReport, differing: Sequence[Difference]) -> Deviation | None:
    """Add up this rank's deviations over the differing tensors.

    If outputs differ, only the first differing output counts. None: the rank holds no part of these tensors or this output.
    """
    first, names = differing[0], {one.name for one in differing}
    if first.what == "output":
        found = [one.deviation for one in rank.sites if one.name == first.name]
    else:
        found = [
            one.deviation
            for one in rank.tensors
            if one.step == first.step and one.kind == first.what and one.name in names
        ]
    return together(found) if found else None


def _from_outcomes(
    evidence: Evidence, differing: Sequence[Difference], outcomes: Sequence[SublayoutVerdict]
) -> str | None:
    """Find the axis without which the difference vanishes.

    If there are several such axes, two tests choose: `axes_apart`, then `are_partial_sums` for gradients. None: there is no such
    axis, or neither test leaves exactly one.
    """
    vanished = {one.axis for one in outcomes if one.axis is not None and one.equal}
    is_gradient = differing[0].what == "gradient"
    summed = {axis for axis in AXES[:2] if is_gradient and are_partial_sums(evidence, differing, axis)}
    for spoken_for in (set(AXES), set(axes_apart(evidence, differing)), summed):
        if len(vanished & spoken_for) == 1:
            (axis,) = vanished & spoken_for
            return axis
    return None


def _said_by(outcomes: Sequence[SublayoutVerdict]) -> list[str]:
    said = []
    for equal, verb in ((True, "vanishes"), (False, "stays"), (None, "is unknown (the run failed)")):
        changes = [one.change for one in outcomes if one.equal is equal]
        said += [f"it {verb} with {', with '.join(changes)}"] if changes else []
    if any(one.change == ALONE and one.equal is False for one in outcomes):
        said.append(
            "one process differs from itself: random numbers not drawn from the run's seed, outside input, or a loss "
            "that is divided by what its microbatch holds"
        )
    return said


def _from_ranks(evidence: Evidence, differing: Sequence[Difference]) -> str | None:
    what = differing[0].what
    if what == "samples":
        return _axis_of_samples(evidence, differing[0].step)
    if what == "gradient":
        summed = [axis for axis in AXES[:2] if are_partial_sums(evidence, differing, axis)]
        if len(summed) == 1:
            return summed[0]
    factor = common_factor(differing)
    axes = [
        axis
        for axis in AXES
        if factor is not None
        and (size := evidence.sizes.size(axis)) > 1
        and any(math.isclose(factor, wanted, rel_tol=1e-3) for wanted in (size, 1 / size))
    ]
    is_of_all = what in ("loss", "gradient norm") or _are_all(evidence, differing)
    return axes[0] if is_of_all and len(axes) == 1 else None


def _axis_of_samples(evidence: Evidence, step: int) -> str | None:
    """Return the axis to blame for wrong samples, tp, pp or dp.

    tp or pp is to blame if ranks that differ only there read different samples. Otherwise dp is. None: dp has one rank.
    """
    for axis in AXES[:2]:
        for ranks in _along(evidence, axis):
            if len({rank.samples[step] for rank in ranks}) > 1:
                return axis
    return "dp" if evidence.sizes.dp > 1 else None


def common_factor(differing: Sequence[Difference]) -> float | None:
    """Return f if all wrong values are f x the right ones, to one part in 10^3; None: they share no factor."""
    factors = [one.factor for one in differing]
    first = factors[0]
    if first is None or any(one is None or not math.isclose(one, first, rel_tol=1e-3) for one in factors):
        return None
    return first


def are_partial_sums(evidence: Evidence, differing: Sequence[Difference], axis: str) -> bool:
    """Whether the ranks' gradients along an axis add up to the right ones.

    Rank i's gradient g_i is measured by its projection <w, g_i> / <w, w> on the wanted gradient w. If g_0 + g_1 + ... = w, the
    projections add up to 1. Multiples of the right gradient are excluded, since their projections could add up to 1 by chance.
    """
    first = differing[0]
    close = max(1e-6, min(first.bound, LOOSEST_SUM))
    for difference in differing:
        for ranks in _along(evidence, axis):
            parts = [part for rank in ranks if (part := _deviation_on(rank, [difference])) is not None]
            parts = [part for part in parts if part.wanted_square]
            if not parts:
                continue
            if len(parts) == 1 or all(part.is_multiple for part in parts):
                return False
            if abs(sum(part.product / part.wanted_square for part in parts) - 1) > close:
                return False
    return True


def _along(evidence: Evidence, axis: str) -> list[list[RankReport]]:
    """Group the ranks whose coordinates differ on this axis alone."""
    groups: dict[tuple[int, ...], list[RankReport]] = {}
    for rank in evidence.ranks:
        groups.setdefault(tuple(at for name, at in rank.place(axis).items() if name != axis), []).append(rank)
    return list(groups.values())


# Descriptions ------------------------------------------------------------------------------------------------------------


def _appearance(evidence: Evidence, differing: Sequence[Difference]) -> str:
    first = differing[0]
    if first.bound < max(one.error for one in differing) < FP32_ROUNDING:
        return "differences have the size of fp32's rounding: part of the computation runs in fp32"
    if first.what == "output":
        return _of_output(evidence, first)
    if first.what == "routing":
        return _of_routing(first)
    if first.what == "gradient":
        return _of_gradients(evidence, differing)
    if first.what == "loss" and not evidence.sites:
        return _of_forward(evidence, first)
    texts = {
        "samples": "samples of the step are read twice, by no rank, or with other contents: check how samples are "
        "distributed over dp ranks, labels and masks, and document ends",
        "start": "initial weights depend on the layout: a parameter is drawn from its part, not from the whole tensor",
        "loss": f"the outputs are right, and the loss of the global batch is {_times(first.factor)} what it should be: ranks that "
        "count the same tokens are added, or a mean of means is taken over microbatches with unequal masks",
        "gradient norm": f"every gradient is right and their norm is {_times(first.factor)} what it should be: replicas of a "
        "parameter are counted more than once, or an owned part not at all; clipping then scales every update",
        "parameter": "masters are right and the weights that the next forward uses are not: the all-gather after the update is "
        "missing, or ran before the owner had written its part",
    }
    # Another engine may have no masters to compare.
    is_of_update = first.what == "parameter" and (first.step, MASTER) not in evidence.tensors
    return texts[first.what] if first.what in texts and not is_of_update else _of_update(evidence, differing)


def _of_output(evidence: Evidence, first: Difference) -> str:
    sites = list(evidence.sites)
    place = sites.index(first.name)
    if first.name == "token_losses":
        return (
            "every hidden state is right and the tokens' losses are not: the columns of the head, padded rows of the vocabulary "
            "in the softmax, or labels of another microbatch"
        )
    if first.name == "loss":
        return (
            "every token's loss is right, but their sum over a microbatch is not: the mask of another microbatch, or a "
            "mean over the counted tokens of the microbatch in place of a sum"
        )
    if place and _begins_a_stage(evidence, first.name):
        return (
            f"the output of {sites[place - 1]} is right, but {first.name}, the first site of the next stage, did not "
            "read it: microbatches or chunks of the pipeline are in another order than their inputs"
        )
    what = {
        "attention": "heads, positions (RoPE) or dropout of a rank's part",
        "mlp": "columns, or the sum of the row-parallel output; with experts, how tokens reach them and return, and "
        "their weights",
        "embedding": "rows of the vocabulary, or positions of a rank's part of the sequence; in MTP, the token ahead",
        "losses": "the token that is predicted: tokens ahead belong to the whole row, not to a rank's part",
    }.get(first.name.rsplit(".", 1)[-1], "dropout or residual of a rank's part of the sequence")
    return f"{first.name} is the first wrong output, and its inputs are right: {what}"


def _of_routing(first: Difference) -> str:
    if first.got >= first.wanted:
        return (
            f"the chosen experts of {first.name} are right, but the tokens are not: some are routed more than once, as "
            "in a replay, or in the place of others"
        )
    share = f"{first.wanted - first.got:.0f} of {first.wanted:.0f} expert choices of {first.name} are not one process's"
    if first.step == 0:
        return (
            f"{share}, but the layer's input is right: the router's scores, its bias, the rule for ties or groups, or "
            "tokens that are not routed"
        )
    return (
        f"{share}, from step {first.step + 1} on: the router bias is updated from counts other than the global "
        "batch's, or not on every rank"
    )


def _of_forward(evidence: Evidence, first: Difference) -> str:
    """Describe a wrong loss by the errors of its step's gradients. Used only if the ranks reported no outputs."""
    gradients = evidence.tensors.get((first.step, "gradient"), {})
    errors = relative_errors(gradients)
    wrong = sorted((name for name, error in errors.items() if not error <= first.bound), key=lambda name: -errors[name])
    times = f"the loss is {_times(first.factor)} what it should be"
    if not wrong:
        return (
            f"{times} and every gradient is right: only the number that is reported is wrong, such as a sum over ranks"
        )
    factors = [one.factor if one.is_multiple else None for one in gradients.values()]
    if all(factor is not None and math.isclose(factor, first.factor or 0.0, rel_tol=1e-3) for factor in factors):
        return f"{times}, and so is every gradient: the loss is divided by another number of tokens, or added twice"
    most = ", ".join(f"{name} ({errors[name]:.1e})" for name in wrong[:3])
    if first.step:
        return (
            f"step {first.step} ended with the right weights, but the next loss is {_times(first.factor)} what it "
            "should be: the forward uses other weights (not gathered, or of an earlier step) or other samples; the "
            f"gradients that differ most: {most}"
        )
    return (
        f"{times}, and no single factor explains all gradients: a forward that computes something else (a wrong cut, "
        "positions, a sum over ranks), samples that are left out or read twice, or wrong weights of a mean; the "
        f"gradients that differ most: {most}"
    )


def _begins_a_stage(evidence: Evidence, site: str) -> bool:
    """Whether a site (recorded output) is in a pipeline stage's first layer. The model's first stage does not count."""
    stages = {".".join(facts.name.split(".")[:2]): facts.stage for facts in evidence.parameters}
    layer = ".".join(site.split(".")[:2])
    return any(after == layer and stages[before] != stages[after] for before, after in pairwise(stages))


def _of_gradients(evidence: Evidence, differing: Sequence[Difference]) -> str:
    is_of_all, num_gradients = _are_all(evidence, differing), len(_of_same_kind(evidence, differing))
    which = "every gradient" if is_of_all else f"{len(differing)} of {num_gradients} gradients"
    parts = (
        "each rank along {axis} has a part of the gradient, and these parts add up to the right one: they are not added over "
        "{axis}"
    )
    axes = [axis for axis in AXES[: 4 if evidence.are_whole else 2] if evidence.sizes.size(axis) > 1]
    for axis in axes:
        if are_partial_sums(evidence, differing, axis):
            return f"{which}: {parts.format(axis=axis)}"
    factor = common_factor(differing)
    if factor is not None:
        sizes = [
            axis for axis in AXES if evidence.sizes.size(axis) > 1 and math.isclose(factor, evidence.sizes.size(axis))
        ]
        equal_to = f" (the size of {' and of '.join(sizes)})" if sizes else ""
        reason = (
            "the loss is scaled twice or not at all, or a mean is taken where a sum belongs (or the other way round)"
            if is_of_all
            else "replicas that hold the whole gradient are added, or it is added twice"
            if factor > 1
            else "a mean is taken where a sum belongs, or it is scaled already, as by clipping"
        )
        return f"{which}: {factor:.4g} times what it should be{equal_to}: {reason}"
    # Backward spreads a wrong gradient to everything that it reaches later.
    order = [facts.name for facts in evidence.parameters]
    reached = max(differing, key=lambda one: order.index(one.name))
    if evidence.are_whole:
        for axis in axes:
            if are_partial_sums(evidence, [reached], axis):
                return f"{which}: backward reaches {reached.name} first; of it, {parts.format(axis=axis)}"
    if is_of_all:
        right = "loss and outputs are" if evidence.sites else "the loss is"
        return f"{right} right and every gradient is wrong: the backward of the head or of the loss"
    right = "the outputs are right" if evidence.sites else "the loss is right"
    times = "" if reached.factor is None else f", where it is {reached.factor:.4g} times what it should be"
    return (
        f"{which}: no single factor explains the error, and {right}; backward reaches {reached.name} first{times}: a "
        "wrong backward, a sum that has not seen every microbatch, or an owned part that received another rank's sum"
    )


def _of_same_kind(evidence: Evidence, differing: Sequence[Difference]) -> Mapping[str, Deviation]:
    """Return each tensor's deviation, by name, for the kind and step of the differences."""
    return evidence.tensors.get((differing[0].step, differing[0].what), {})


def _are_all(evidence: Evidence, differing: Sequence[Difference]) -> bool:
    return len(differing) == len(_of_same_kind(evidence, differing))


def _of_update(evidence: Evidence, differing: Sequence[Difference]) -> str:
    decays: Mapping[str, bool] = {one.name: one.decay for one in evidence.parameters}
    kind = differing[0].what
    if kind == EMA:
        return (
            "gradients and masters are right and the moving average is not: it follows the masters of another step, moves in a "
            "step without an update, or starts from other weights"
        )
    if kind == "master" and all(one.name.endswith("router.bias") for one in differing):
        return (
            "gradients, their norm and all trained weights are right, but the router bias is not: it is updated from "
            "counts other than the global batch's, or more than once a step"
        )
    if kind == "master" and not any(decays[one.name] for one in differing):
        return "gradients and their norm are right, and only weights without decay are not: decay on norms or biases"
    return (
        f"gradients and their norm are right and {kind} is not: masters that do not follow the weights, another learning rate "
        "or bias correction, decay on the wrong weights, or an update that reads more than its own element"
    )


def _times(factor: float | None) -> str:
    return "not a multiple of" if factor is None else f"{factor:.4g} times"
