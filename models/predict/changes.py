"""List changes with which a run needs less memory: legal ones, that leave the number of ranks as it is.

    single_changes    within the layout, those that cost least speed first
    larger_layouts    fewer replicas, whose ranks hold less of the model each, nearest first
    both together     where no single one is enough

Each is applied to the config, then all rules and the prediction run again. So every proposal is legal, and its bytes are those of
the whole run after it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

from triaxis.engine.config.quantities.head_pieces import HEAD_TOKENS, head_tokens
from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of
from triaxis.engine.config.quantities.run_phases import at_phase
from triaxis.engine.config.rules.check import RULES, broken_keys
from triaxis.engine.config.rules.problem import Rule, Subject
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.axis_sizes import in_all_sizes
from triaxis.models.predict.rank_memory import GATHERED, Prediction, can_keep, predict, resolve_recompute
from triaxis.models.predict.recompute_choice import ATTENTION, MLP, choice_for_layers, worthwhile_parts

MOST_OF_A_KIND = 2
"""At most this many changes within the layout that fit are proposed, and at most this many other layouts."""

MODEL_AXES = ("tp", "cp", "pp", "ep")
"""Axes over which the model is cut, or its samples."""

Changes = tuple[tuple[str, object], ...]
"""Dotted names and values that are set together."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Changes that are made together, and the memory of every rank after them."""

    changes: Changes
    memory: Prediction

    def __str__(self) -> str:
        """Format the changes as overrides on a command line."""
        return " ".join(_override(key, value) for key, value in self.changes)


def _override(key: str, value: object) -> str:
    if isinstance(value, RecomputeConfig):
        modules = "null" if value.modules is None else f"[{', '.join(value.modules)}]"
        head = "" if value.head_tokens == "auto" else f", head_tokens: {value.head_tokens or 'null'}"
        gathered = "".join(f", {name}: {getattr(value, name)}" for name in GATHERED if getattr(value, name) != "auto")
        return f"'{key}={{granularity: {value.granularity}, modules: {modules}{head}{gathered}}}'"
    return f"{key}={str(value).lower()}"


def savings(config: Config, pp: int, *, nccl: bool = True, most_bytes: int | None = None) -> Iterator[Proposal]:
    """Yield changes that reduce the predicted memory of pipeline rank `pp`, those that cost least speed first.

    Args:
        config: the run's configuration, with `parallel.dp` set.
        pp: pipeline index.
        nccl: whether NCCL connects the ranks, as in `predict`.
        most_bytes: bytes that no rank may exceed after a change; None: no limit.
    """
    sizes = parallel_sizes(config)
    now = predict(config, sizes, nccl=nccl).ranks[pp].total
    subject = Subject(config, sizes.world_size, None)
    tried = chain(((each,) for each in single_changes(config, sizes)), larger_layouts(subject))
    for one in _legal(subject, tried, most_bytes, nccl=nccl):
        if one.memory.ranks[pp].total < now:
            yield one


def fitting_changes(subject: Subject, most: int, *, nccl: bool) -> Iterator[Proposal]:
    """Yield changes after which no rank is predicted to hold more than `most` bytes.

    Up to `MOST_OF_A_KIND` changes within the same layout come first, those that cost least speed first. Then come up to as
    many of the nearest other layouts. If none of these fits, the only result combines several changes.
    """
    sizes = parallel_sizes(subject.config, subject.world_size)
    kinds = ((each,) for each in single_changes(subject.config, sizes)), larger_layouts(subject)
    found = [one for kind in kinds for one in islice(_legal(subject, kind, most, nccl=nccl), MOST_OF_A_KIND)]
    yield from found or islice(_legal(subject, _together(subject, sizes, nccl=nccl), most, nccl=nccl), 1)


def _legal(subject: Subject, tried: Iterable[Changes], most: int | None, *, nccl: bool) -> Iterator[Proposal]:
    """Yield those of the `tried` changes that break no rule and after which no rank holds more than `most` bytes."""
    for changes in tried:
        memory = _after(subject, changes, nccl=nccl)
        if memory is not None and (most is None or memory.fullest.total <= most):
            yield Proposal(changes, memory)


def _after(subject: Subject, changes: Changes, *, nccl: bool) -> Prediction | None:
    """Predict the memory after the changes. None: they break a rule that held before, or the prediction fails."""
    config = subject.config
    for key, value in changes:
        config = with_value(config, key, value)
    if not _broken(replace(subject, config=config)) <= _broken(subject):
        return None
    try:
        return predict(config, parallel_sizes(config, subject.world_size), nccl=nccl)
    except ConfigError:
        return None


def _broken(subject: Subject) -> set[tuple[Rule, str]]:
    """Collect the rules that are broken in any of the run's phases."""
    phases = (at_phase(subject.config, entry["name"]) for entry in subject.config.phases)
    return {key for one in (subject.config, *phases) for key in broken_keys(replace(subject, config=one), RULES)}


def _together(subject: Subject, sizes: ParallelSizes, *, nccl: bool) -> Iterator[Changes]:
    """Yield combinations of changes to try.

    Single changes are added one by one, and kept if they lower the fullest rank's total; each sum is yielded. Then all
    kept changes are yielded together with each other layout, nearest first.
    """
    taken: dict[str, object] = {}
    least = _after(subject, (), nccl=nccl)
    for key, value in single_changes(subject.config, sizes):
        memory = _after(subject, tuple({**taken, key: value}.items()), nccl=nccl)
        if memory is not None and (least is None or memory.fullest.total < least.fullest.total):
            taken, least = {**taken, key: value}, memory
            yield tuple(taken.items())
    for layout in larger_layouts(subject):
        yield (*taken.items(), *layout)


def larger_layouts(subject: Subject) -> Iterator[Changes]:
    """Yield changes to layouts of as many ranks with larger `MODEL_AXES`, hence fewer replicas.

    The smallest tp x cp x pp x ep come first; of equal ones, those with the smallest cp x ep, then pp.
    """
    config, axes = subject.config, [*MODEL_AXES, "dp"]
    sizes = parallel_sizes(config, subject.world_size)
    per_node = subject.ranks_per_node or config.runtime.ranks_per_node or sizes.world_size
    all_sizes = (one.parallel for one in in_all_sizes(config, sizes.world_size, per_node, MODEL_AXES))
    found = [one for one in all_sizes if all(getattr(one, axis) >= sizes.size(axis) for axis in MODEL_AXES)]
    for one in sorted(found, key=lambda one: (one.tp * one.cp * one.pp * one.ep, one.cp * one.ep, one.pp)):
        changes = [(f"parallel.{axis}", getattr(one, axis)) for axis in axes if getattr(one, axis) != sizes.size(axis)]
        if changes:
            yield tuple(changes)
            if one.tp > 1 and not one.sequence_parallel:
                yield (*changes, ("parallel.sequence_parallel", True))


def single_changes(config: Config, sizes: ParallelSizes) -> Iterator[tuple[str, object]]:
    """Yield (field, new value) for changes that may reduce memory in the same layout, those that cost least speed first.

    Callers must check each change, since it may break a rule.
    """
    recompute = config.recompute
    if config.kernels.attention == "explicit":
        yield "kernels.attention", "sdpa"
    resolved = resolve_recompute(config, sizes)
    for name in GATHERED:
        if can_keep(resolved, name) and getattr(resolved.recompute, name) == "keep":
            yield f"recompute.{name}", "regather"
    yield "precision.masters", "split"
    if head_tokens(config) is None:
        yield "recompute.head_tokens", HEAD_TOKENS
    if recompute.granularity in ("none", "selective"):
        parts = worthwhile_parts(config, sizes)
        elementwise = [part for part in parts if part not in (ATTENTION, MLP)]
        for chosen in (elementwise, parts):
            # A part that is recomputed already stays so.
            modules = sorted(recompute.parts | set(chosen))
            if set(modules) != recompute.parts and (chosen is elementwise or len(chosen) > len(elementwise)):
                yield "recompute", choice_for_layers(recompute, granularity="selective", modules=modules)
    if sizes.tp > 1 and not config.parallel.sequence_parallel:
        yield "parallel.sequence_parallel", True
    if sizes.owners("dp") > 1:
        yield from (("parallel.zero", zero) for zero in range(config.parallel.zero + 1, 4))
    if sizes.dp_replicas > 1:
        yield "parallel.dp_replicas", 1
    if config.optimizer.offload == "none":
        yield "optimizer.offload", "cpu"
    yield from _more_offloaded(config, sizes)
    if config.train.micro_batch_size > 1:
        yield "train.micro_batch_size", config.train.micro_batch_size // 2
    if recompute.granularity in ("none", "selective"):
        yield "recompute", choice_for_layers(recompute, granularity="full")


def _more_offloaded(config: Config, sizes: ParallelSizes) -> Iterator[tuple[str, object]]:
    """Yield changes that offload more layers: half of a chunk's, then all but the last, whose copies nothing could overlap."""
    most = max(len(stage.layers) for stage in stages_of(config))
    for num_layers in sorted({most // 2, most - 1}):
        if num_layers > config.offload.num_layers:
            yield "offload.num_layers", num_layers
