"""Prediction of a rank's memory from the configuration alone, and changes that reduce it.

    parameters     flat buffers, the run's dtype; with ZeRO-3 the owned parts, and two layers
    gradients      flat buffers, accumulation dtype (or as narrow as the parameters); from ZeRO-2 on the owned parts, and two layers
    optimizer      moments, and masters where the parameters are not wide enough; 1/(dp cp) of each bucket, of experts 1/edp
    activations    what microbatches in flight keep for their backwards (`models/predict/activation_memory.py`), at most
    temporaries    what experts at work add to the fullest moment (`models/predict/experts/temporaries.py`), FP8 copies of weights
    messages       activations and gradients between stages that are received early, in use or being sent, the most at one time
    communicators  NCCL's buffers, outside of torch's allocator: an estimate (`models/predict/communicators.py`)
    host           what they keep in the host's memory; no part of the rest

Not in it: what other operators need while they run, CUDA's context, an allocator's rounding. Parameters, gradients and optimizer
are exact, activations and messages as exact as their formulas.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from triaxis.engine.config.activations import RecomputeConfig
from triaxis.engine.config.context_parallel import gathers_keys
from triaxis.engine.config.layout import ScheduleConfig
from triaxis.engine.config.plan import batch_plan, local_seq_length, parallel_sizes, stages_of
from triaxis.engine.config.section import with_value
from triaxis.engine.config.tree import Config, problems
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.partition import StageLayers
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Kind
from triaxis.models.predict.activation_memory import (
    backward_bytes,
    deferred_bytes,
    forward_bytes,
    kept_bytes,
    layer_groups,
    moved_bytes,
)
from triaxis.models.predict.at_work import most_at_work
from triaxis.models.predict.communicators import communicator_bytes
from triaxis.models.predict.cut import Contents, Memo, StageCut
from triaxis.models.predict.experts.memory import BALANCED
from triaxis.models.predict.in_flight import PeakMoment, peaks_of
from triaxis.models.predict.recompute_choice import ATTENTION, MLP, candidates, choice_for_layers, worthwhile_parts
from triaxis.models.predict.state_memory import StateBytes, state_bytes
from triaxis.models.predict.terms import BYTES_PER_ELEMENT

GB = 10**9

HEAD_TOKENS = 1024
"""Tokens whose logits are worth having at a time: enough for the head's GEMMs, and few of a long sequence's."""


KINDS = ("parameters", "gradients", "optimizer", "activations", "messages", "communicators", "temporaries")
"""Fields of `Memory` that its `total` is the sum of."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank by kind; `total` is of its device, and `host` no part of it."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    messages: int
    communicators: int
    host: int
    temporaries: int = 0

    @property
    def tensors(self) -> int:
        """Return the bytes that torch's allocator hands out on the device."""
        kept = self.parameters + self.gradients + self.optimizer + self.activations
        return kept + self.temporaries + self.messages

    @property
    def total(self) -> int:
        return self.tensors + self.communicators


def shown_kinds(ranks: Sequence[Memory]) -> tuple[str, ...]:
    """Return the kinds of a table: temporaries belong to it where some rank has any, so with experts or FP8."""
    return KINDS if any(rank.temporaries for rank in ranks) else KINDS[:-1]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted memory of every rank of a run.

    Attributes:
        ranks: by pipeline index; tp and dp indices make no difference.
    """

    ranks: tuple[Memory, ...]

    @property
    def pp(self) -> int:
        """Return the pipeline index of the ranks that hold the most; the first of several."""
        totals = [rank.total for rank in self.ranks]
        return totals.index(max(totals))

    @property
    def fullest(self) -> Memory:
        """Return the memory of the ranks that hold the most."""
        return self.ranks[self.pp]


def predict(
    config: Config,
    sizes: ParallelSizes,
    *,
    nccl: bool = True,
    memo: Memo | None = None,
    load: Fraction = BALANCED,
) -> Prediction:
    """Predict the memory of every rank from the configuration alone; no device and no torch are needed.

    Args:
        config: of a run that breaks no rule.
        nccl: NCCL connects the ranks; gloo has no buffers on a device.
        memo: of earlier predictions of this run in other layouts, batches and recomputations; filled and used.
        load: rows of a rank's experts over those of all alike, in each of its layers (`triaxis.models.predict.experts.memory`).

    Raises:
        ConfigError: as `resolve_recompute`.
    """
    memo = {} if memo is None else memo
    resolved = resolve_recompute(config, sizes)
    return Prediction(_Pipeline.of(config, sizes, memo).memory(resolved, nccl=nccl, memo=memo, load=load))


def predicted_memory(config: Config, sizes: ParallelSizes, pp: int, *, nccl: bool = True) -> Memory:
    """Predict the memory of the ranks with pipeline index `pp`, as `predict` does."""
    return predict(config, sizes, nccl=nccl).ranks[pp]


def resolve_recompute(config: Config, sizes: ParallelSizes) -> Config:
    """Replace each `auto` of `recompute` by what it comes to: the same on every rank.

    The granularity is the first of `triaxis.models.predict.recompute_choice.candidates` with which no pipeline rank is
    predicted to hold more than `memory_gb`, communicators left out: the choice must not depend on the device. Gathered keys
    and values, then gathered inputs are kept where that many bytes hold them as well; without `memory_gb` they are gathered again.

    Raises:
        ConfigError: no choice is enough; the message has the predictions.
    """
    asked = config.recompute
    if asked.is_resolved:
        return config
    open_choices = [name for name in GATHERED if getattr(asked, name) == "auto"]
    again = dict.fromkeys(open_choices, "regather")
    config = config.model_copy(update={"recompute": asked.model_copy(update={**again, "memory_gb": None})})
    budget_gb = asked.memory_gb
    if budget_gb is None:
        assert asked.granularity != "auto", "a rule asks for it"
        return config
    pipeline = _Pipeline.of(config, sizes)
    lines = []
    for choice in candidates(config, sizes) if asked.granularity == "auto" else [config.recompute]:
        changed = config.model_copy(update={"recompute": choice})
        ranks = pipeline.memory(changed, nccl=False)
        totals = [rank.total for rank in ranks]
        if max(totals) <= budget_gb * GB:
            for name in open_choices:
                changed = _with_gathered_kept(changed, name, pipeline, budget_gb)
            return changed
        worst = totals.index(max(totals))
        lines.append(f"{max(totals) / GB:,.4g} GB with {choice}" + (f" (pp {worst})" if sizes.pp > 1 else ""))
    whatever = ", whatever is recomputed" if asked.granularity == "auto" else ""
    shown = lines if len(lines) <= 4 else [lines[0], lines[-2], lines[-1]]
    state = max(totals) - max(rank.activations for rank in ranks)
    raise ConfigError(
        [
            f"recompute.memory_gb = {budget_gb:g}: a rank is predicted to hold more{whatever}: {'; '.join(shown)}. "
            f"It would run out of memory. Of the last, about {state / GB:,.4g} GB are parameters, gradients and optimizer state: "
            "those take more ranks (parallel.tp, parallel.pp, parallel.dp) or precision.masters=split; activations take less with "
            "offload.num_layers, a smaller train.micro_batch_size or parallel.sequence_parallel=true."
        ]
    )


FULL_ROUNDS = 3
"""Microbatches per pipeline rank after which no rank holds more: zbv is full after two rounds, the others sooner."""

GATHERED = ("gathered_kv", "gathered_inputs")
"""Fields of `recompute` for what is gathered, in the order of choice: cp's links are the slower ones."""


def can_keep(config: Config, name: str) -> bool:
    """Return whether there is something gathered of this name to keep."""
    if name == "gathered_kv":
        # Attention in plain operators keeps it anyway, and latents are kept.
        return gathers_keys(config) and config.kernels.attention != "explicit" and config.model.mla is None
    # Gathered inputs are outputs of norms: those are not kept where they are made again.
    return config.parallel.cuts_sequence and "norm" not in config.recompute.parts


def _with_gathered_kept(config: Config, name: str, pipeline: "_Pipeline", budget_gb: float) -> Config:
    """Keep what is gathered if the budget holds it."""
    if not can_keep(config, name):
        return config
    kept = config.model_copy(update={"recompute": config.recompute.model_copy(update={name: "keep"})})
    return kept if max(rank.total for rank in pipeline.memory(kept, nccl=False)) <= budget_gb * GB else config


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """The part of a prediction that does not depend on what is recomputed: the stages and state of each pipeline rank."""

    sizes: ParallelSizes
    cut: StageCut
    states: tuple[StateBytes, ...]

    @classmethod
    def of(cls, config: Config, sizes: ParallelSizes, memo: Memo | None = None) -> "_Pipeline":
        memo = {} if memo is None else memo
        cut = StageCut.of(config, memo)
        layout = ("state", sizes.tp, sizes.dp_cp, sizes.ep, sizes.etp, config.parallel.sequence_parallel)
        for stages, contents in cut.ranks:
            if (*layout, contents) not in memo:
                memo[*layout, contents] = state_bytes(config, sizes, [cut.stages[stage] for stage in stages])
        return cls(sizes, cut, tuple(memo[*layout, contents] for _, contents in cut.ranks))

    def memory(
        self, config: Config, *, nccl: bool, memo: Memo | None = None, load: Fraction = BALANCED
    ) -> tuple[Memory, ...]:
        """Predict the memory of each pipeline rank with what `config` recomputes and offloads."""
        sizes = self.sizes
        memo = {} if memo is None else memo
        ranks = (sizes.tp, sizes.cp, sizes.ep, sizes.etp)
        layout = (*ranks, config.parallel.sequence_parallel, config.train.micro_batch_size, load)
        choice = config.schedule.defers_weight_gradients, config.recompute.model_dump_json()
        held: dict[Contents, _Held] = {}
        for one, stage in dict(zip(self.cut.contents, self.cut.stages, strict=True)).items():
            key = ("held", layout, choice, one)
            if key not in memo:
                memo[key] = _Held.of(config, sizes, stage, load)
            held[one] = memo[key]
        connected = "communicators", sizes
        if connected not in memo:
            model = config.model
            memo[connected] = communicator_bytes(sizes, model.kv_heads, has_experts=model.has_experts)
        communicators: tuple[int, ...] = memo[connected] if nccl else (0,) * sizes.pp
        message = _message_bytes(config)
        found = []
        for pp, ((_, chunks), peaks, state) in enumerate(
            zip(self.cut.ranks, self._peaks(config, memo), self.states, strict=True)
        ):
            activations, temporaries, host = _most_activations([held[one] for one in dict.fromkeys(chunks)], peaks)
            found.append(
                Memory(
                    state.parameters,
                    state.gradients,
                    state.optimizer,
                    activations,
                    _most_messages(sizes, pp) * message,
                    communicators[pp],
                    host,
                    temporaries + state.copies,
                )
            )
        return tuple(found)

    def _peaks(self, config: Config, memo: Memo) -> list[tuple[PeakMoment, ...]]:
        """Return the peaks of each pipeline rank; its chunks are numbered by their contents."""
        sizes, num_microbatches = self.sizes, _as_full(config, self.sizes)
        numbers = []
        for _, chunks in self.cut.ranks:
            found = {one: number for number, one in enumerate(dict.fromkeys(chunks))}
            numbers.append(tuple(found[one] for one in chunks))
        schedule = "peaks", schedules.title(config), sizes.pp, sizes.vpp, num_microbatches
        keys = [(*schedule, pp, of_chunk) for pp, of_chunk in enumerate(numbers)]
        if any(key not in memo for key in keys):
            rows = schedules.of_config(config, sizes.pp, sizes.vpp, num_microbatches).actions
            for key, row, of_chunk in zip(keys, rows, numbers, strict=True):
                if key not in memo:
                    memo[key] = peaks_of(row, of_chunk)
        return [memo[key] for key in keys]


def _as_full(config: Config, sizes: ParallelSizes) -> int:
    """Return microbatches with which a pipeline is as full as with all of the step's: a few rounds, and the partial last one.

    GPipe holds all of them, and a schedule from a file may.
    """
    num_microbatches = batch_plan(config, sizes.dp).num_microbatches
    if config.schedule.name == "gpipe" or config.schedule.file is not None:
        return num_microbatches
    return min(num_microbatches, FULL_ROUNDS * sizes.pp + num_microbatches % sizes.pp)


def _message_bytes(config: Config) -> int:
    """Count the bytes of one activation between two stages, [s/c (/ t), b, h] in the run's dtype."""
    elements = local_seq_length(config) * config.train.micro_batch_size * config.model.hidden_size
    return elements * BYTES_PER_ELEMENT[config.precision.dtype]


def _most_messages(sizes: ParallelSizes, pp: int) -> int:
    """Count the messages that a pipeline rank holds at one time, as `triaxis.engine.pipeline.lowering` posts them.

    A rank with two neighbours holds an early receive, a gradient in use and a send; at the ends of a pipeline whose last rank does
    not send to the first, a rank has one neighbour, and one message less.
    """
    if sizes.pp == 1:
        return 0
    is_open = sizes.vpp == 1 or sizes.is_v
    return 2 if is_open and pp in (0, sizes.pp - 1) else 3


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes that one microbatch holds on one stage.

    Attributes:
        kept, moved: between its passes, on the device and in the host's memory.
        in_forward, in_backward: at most in each pass; the backward is an I where weight gradients wait.
        in_whole_backward: at most in a B.
        deferred: for its weight gradients, behind the gradient of its input.
        at_work: at most in the forward and in the backward while experts are at work, with what they hold beside what is kept.
    """

    kept: int
    moved: int
    in_forward: int
    in_backward: int
    deferred: int
    in_whole_backward: int
    at_work: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, config: Config, sizes: ParallelSizes, stage: StageLayers, load: Fraction) -> "_Held":
        groups = layer_groups(config, sizes, stage, load)
        functions = (kept_bytes, moved_bytes, forward_bytes, backward_bytes)
        kept, moved, forward, backward = (function(config, sizes, stage, groups, load) for function in functions)
        deferred = deferred_bytes(config, sizes, stage, load)
        # A file may mix B with I and W, where a name has one of both.
        whole = backward
        if config.schedule.file is not None and config.schedule.defers_weight_gradients:
            plain = config.model_copy(update={"schedule": ScheduleConfig()})
            whole = backward_bytes(plain, sizes, stage, load=load)
        at_work = most_at_work(config, sizes, stage, groups, load)
        return cls(kept, moved, forward, backward, deferred, whole, at_work)


def _most_activations(held: Sequence[_Held], peaks: Sequence[PeakMoment]) -> tuple[int, int, int]:
    """Find the most that microbatches keep at one time on a rank, on the device and in the host's memory; `held` by number of
    contents.

    Returns:
        Bytes on the device, bytes more that it holds at one time with temporaries, bytes in the host's memory.
    """
    most = most_in_all = most_host = 0
    for kind, stage, kept, deferred in peaks:
        one = held[stage]
        during = one.in_forward if kind is Kind.F else one.in_backward if kind is Kind.I else one.in_whole_backward
        beside = sum(each.kept * count for each, count in zip(held, kept, strict=True))
        beside += sum(each.deferred * count for each, count in zip(held, deferred, strict=True))
        most = max(most, beside + during)
        most_in_all = max(most_in_all, beside + one.at_work[0 if kind is Kind.F else 1])
        if kind is Kind.F:
            most_host = max(
                most_host, one.moved + sum(each.moved * count for each, count in zip(held, kept, strict=True))
            )
    return most, max(0, most_in_all - most), most_host


Changes = tuple[tuple[str, object], ...]
"""Dotted names and values that are set together."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Changes of fields (or of `recompute` as a whole) that belong together, and the prediction after them.

    Attributes:
        total: bytes of the ranks for which savings were asked.
        fullest: bytes of the ranks that then hold the most.
    """

    changes: Changes
    total: int
    fullest: int

    @property
    def key(self) -> str:
        """Return the field that makes the difference; the others follow from it."""
        return self.changes[0][0]

    def __str__(self) -> str:
        """Format the changes as overrides on a command line."""
        return override_words(self.changes)


def override_words(changes: Changes) -> str:
    """Format changes as overrides on a command line."""
    return " ".join(_override(key, value) for key, value in changes)


def _override(key: str, value: object) -> str:
    if isinstance(value, RecomputeConfig):
        modules = "null" if value.modules is None else f"[{', '.join(value.modules)}]"
        head = "" if value.head_tokens is None else f", head_tokens: {value.head_tokens}"
        gathered = "".join(f", {name}: {getattr(value, name)}" for name in GATHERED if getattr(value, name) != "auto")
        return f"'{key}={{granularity: {value.granularity}, modules: {modules}{head}{gathered}}}'"
    return f"{key}={str(value).lower()}"


def savings(config: Config, pp: int, *, nccl: bool = True, most_bytes: int | None = None) -> Iterator[Saving]:
    """Find legal changes that make the predicted memory of pipeline rank `pp` smaller, from the cheapest in speed on.

    Those of the layout keep the number of ranks, so dp gets smaller where tp or pp gets larger.

    Args:
        config: of the run, `parallel.dp` included.
        nccl: as for `predict`.
        most_bytes: memory of a device, which no rank may exceed after a change; None: unknown.
    """
    sizes = parallel_sizes(config)
    now = predict(config, sizes, nccl=nccl).ranks[pp].total
    for changes in _candidates(config, sizes):
        changed = config
        for key, value in changes:
            changed = with_value(changed, key, value)
        if problems(changed, sizes.world_size):
            continue
        predicted = predict(changed, parallel_sizes(changed), nccl=nccl)
        total, fullest = predicted.ranks[pp].total, predicted.fullest.total
        if total < now and (most_bytes is None or fullest <= most_bytes):
            yield Saving(changes, total, fullest)


def _candidates(config: Config, sizes: ParallelSizes) -> Iterator[Changes]:
    for key, value in single_changes(config, sizes):
        yield ((key, value),)
    for key, size in (("parallel.tp", sizes.tp), ("parallel.cp", sizes.cp), ("parallel.pp", sizes.pp)):
        if sizes.dp % 2 == 0:
            yield (key, size * 2), ("parallel.dp", sizes.dp // 2)
    if config.model.has_experts:
        yield (("parallel.ep", sizes.ep * 2),)


def single_changes(config: Config, sizes: ParallelSizes) -> Iterator[tuple[str, object]]:
    """List changes of one field that may make a rank hold less in the same layout, from the cheapest in speed on.

    They need not be legal.
    """
    recompute = config.recompute
    if config.kernels.attention == "explicit":
        yield "kernels.attention", "sdpa"
    resolved = resolve_recompute(config, sizes)
    for name in GATHERED:
        if can_keep(resolved, name) and getattr(resolved.recompute, name) == "keep":
            yield f"recompute.{name}", "regather"
    yield "precision.masters", "split"
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
    if sizes.dp_cp > 1:
        yield from (("parallel.zero", zero) for zero in range(config.parallel.zero + 1, 4))
    if recompute.head_tokens is None:
        yield "recompute.head_tokens", HEAD_TOKENS
    yield from _more_offloaded(config, sizes)
    if config.train.micro_batch_size > 1:
        yield "train.micro_batch_size", config.train.micro_batch_size // 2
    if recompute.granularity in ("none", "selective"):
        yield "recompute", choice_for_layers(recompute, granularity="full")


def _more_offloaded(config: Config, sizes: ParallelSizes) -> Iterator[tuple[str, object]]:
    """List offload candidates: half the chunk's layers, then all but the last, whose copies could not be overlapped."""
    most = max(len(stage.layers) for stage in stages_of(config))
    for num_layers in sorted({most // 2, most - 1}):
        if num_layers > config.offload.num_layers:
            yield "offload.num_layers", num_layers
