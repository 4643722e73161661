"""Predict each rank's memory from the configuration alone.

    parameters     flat buffers in the run's dtype; with ZeRO-3 only the rank's own shards, and room for two whole buckets
    gradients      flat buffers in the accumulation dtype (or the run's); from ZeRO-2 on only the rank's shards, and two buckets
    optimizer      moments, and masters if the parameters are too narrow: 1 / (dp cp) of each bucket, 1 / edp of an expert bucket
    activations    peak bytes that microbatches keep on the device for their backwards (`models/predict/activation_memory.py`)
    temporaries    bytes by which running experts raise that peak (`models/predict/experts/temporaries.py`); FP8 weight copies
    messages       peak bytes of activations and gradients that are received early, in use or being sent between stages
    communicators  NCCL's buffers, outside torch's allocator: an estimate (`models/predict/communicators.py`)
    host           peak bytes that microbatches keep in host memory, and optimizer state there; not part of a rank's total

Not counted: other operators' temporaries, CUDA's context, an allocator's rounding. Parameters, gradients and optimizer state are
exact; activations and messages are as exact as their formulas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from triaxis.engine.config.quantities.context_parallel import gathers_keys
from triaxis.engine.config.quantities.head_pieces import head_tokens
from triaxis.engine.config.quantities.plan import batch_plan, local_seq_length
from triaxis.engine.config.schema.layout import ScheduleConfig
from triaxis.engine.config.tree import Config
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
from triaxis.models.predict.recompute_choice import candidates
from triaxis.models.predict.state_memory import StateBytes, state_bytes
from triaxis.models.predict.terms import BYTES_PER_ELEMENT

GB = 10**9

KINDS = ("parameters", "gradients", "optimizer", "activations", "messages", "communicators", "temporaries")
"""Fields of `Memory` that its `total` is the sum of."""


@dataclass(frozen=True, slots=True)
class Memory:
    """One rank's predicted bytes, by kind of memory. `total` counts device memory, so it leaves out `host`."""

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
        """Device bytes that torch's allocator hands out: all kinds but communicators."""
        kept = self.parameters + self.gradients + self.optimizer + self.activations
        return kept + self.temporaries + self.messages

    @property
    def total(self) -> int:
        return self.tensors + self.communicators


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted memory of every rank of a run.

    Attributes:
        ranks: memory of a rank at each pipeline index; ranks that differ only in tp, cp or dp index hold the same.
    """

    ranks: tuple[Memory, ...]

    @property
    def pp(self) -> int:
        """Pipeline index of the ranks that hold the most memory; the lowest index if several hold equally much."""
        totals = [rank.total for rank in self.ranks]
        return totals.index(max(totals))

    @property
    def fullest(self) -> Memory:
        """Memory of the ranks that hold the most."""
        return self.ranks[self.pp]


def predict(
    config: Config,
    sizes: ParallelSizes,
    *,
    nccl: bool = True,
    memo: Memo | None = None,
    load: Fraction = BALANCED,
) -> Prediction:
    """Predict the memory of every rank from the configuration alone; neither a device nor torch is needed.

    Args:
        config: configuration that breaks no rule.
        nccl: whether NCCL connects the ranks; if False, gloo does, which has no buffers on a device.
        memo: cache of this run's predictions with other layouts, batch sizes and recomputation; read and filled.
        load: rows that a rank's experts get in each layer, over the rows under balanced routing.

    Raises:
        ConfigError: from `resolve_recompute`.
    """
    memo = {} if memo is None else memo
    resolved = resolve_recompute(config, sizes)
    return Prediction(_Pipeline.of(config, sizes, memo).memory(resolved, nccl=nccl, memo=memo, load=load))


def predicted_memory(config: Config, sizes: ParallelSizes, pp: int, *, nccl: bool = True) -> Memory:
    """Predict the memory of the ranks with pipeline index `pp`; the other arguments are those of `predict`."""
    return predict(config, sizes, nccl=nccl).ranks[pp]


def resolve_recompute(config: Config, sizes: ParallelSizes) -> Config:
    """Return the configuration with each `auto` in its `recompute` section replaced by a choice, equal on all ranks.

    An `auto` granularity becomes the first of `recompute_choice.candidates` with which every rank's prediction fits `memory_gb`.
    Communicators are not counted, so that the choice does not depend on the device. Then gathered keys and values are kept if
    every rank still fits, and after them gathered inputs. Otherwise, and without `memory_gb`, they are gathered again. The head is
    cut by its tokens alone (`engine/config/quantities/head_pieces.py`).

    Raises:
        ConfigError: no choice fits in `memory_gb`; the message has the predictions.
    """
    asked = config.recompute
    if asked.is_resolved:
        return config
    open_choices = [name for name in GATHERED if getattr(asked, name) == "auto"]
    closed = {"head_tokens": head_tokens(config), "memory_gb": None, **dict.fromkeys(open_choices, "regather")}
    config = config.model_copy(update={"recompute": asked.model_copy(update=closed)})
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
    """Whether a run has gathered tensors that `recompute.NAME` can keep; `name` is one of `GATHERED`."""
    if name == "gathered_kv":
        # Attention in plain operators keeps it anyway, and latents are kept.
        return gathers_keys(config) and config.kernels.attention != "explicit" and config.model.mla is None
    # Gathered inputs are outputs of norms: those are not kept where they are made again.
    return config.parallel.cuts_sequence and "norm" not in config.recompute.parts


def _with_gathered_kept(config: Config, name: str, pipeline: "_Pipeline", budget_gb: float) -> Config:
    """Return the config with `recompute.NAME` set to keep if every rank then fits in `budget_gb`; else the config unchanged."""
    if not can_keep(config, name):
        return config
    kept = config.model_copy(update={"recompute": config.recompute.model_copy(update={name: "keep"})})
    return kept if max(rank.total for rank in pipeline.memory(kept, nccl=False)) <= budget_gb * GB else config


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """The part of a prediction that does not depend on recomputation: each pipeline rank's stages and training state."""

    sizes: ParallelSizes
    cut: StageCut
    states: tuple[StateBytes, ...]

    @classmethod
    def of(cls, config: Config, sizes: ParallelSizes, memo: Memo | None = None) -> "_Pipeline":
        memo = {} if memo is None else memo
        cut = StageCut.of(config, memo)
        parallel = config.parallel
        owners = sizes.tp, sizes.owners("dp"), sizes.ep, sizes.etp
        layout = ("state", *owners, parallel.zero, config.optimizer.offload, parallel.sequence_parallel)
        for stages, contents in cut.ranks:
            if (*layout, contents) not in memo:
                memo[*layout, contents] = state_bytes(config, sizes, [cut.stages[stage] for stage in stages])
        return cls(sizes, cut, tuple(memo[*layout, contents] for _, contents in cut.ranks))

    def memory(
        self, config: Config, *, nccl: bool, memo: Memo | None = None, load: Fraction = BALANCED
    ) -> tuple[Memory, ...]:
        """Predict each pipeline rank's memory with the recomputation and offloading that `config` asks for."""
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
            stages = [held[one] for one in dict.fromkeys(chunks)]
            activations, temporaries, host = _most_activations(stages, peaks)
            if config.kernels.graphs == "on":
                activations, temporaries = _in_pools(stages, peaks, has_gathers=sizes.owners("dp") > 1), 0
            found.append(
                Memory(
                    state.parameters,
                    state.gradients,
                    state.optimizer,
                    activations,
                    _most_messages(sizes, pp) * message,
                    communicators[pp],
                    host + state.host,
                    temporaries + state.copies,
                )
            )
        return tuple(found)

    def _peaks(self, config: Config, memo: Memo) -> list[tuple[PeakMoment, ...]]:
        """List each pipeline rank's peak moments. Chunks with equal contents get the same index in `PeakMoment`."""
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
    """Find a small number of microbatches that fills the pipeline as much as all of the step's microbatches do.

    It is at most a few rounds of pp microbatches, and the last, partial round. With GPipe or a schedule from a file it is the
    number of all microbatches, since such a schedule may hold all of them at once.
    """
    num_microbatches = batch_plan(config, sizes.dp).num_microbatches
    if config.schedule.name == "gpipe" or config.schedule.file is not None:
        return num_microbatches
    return min(num_microbatches, FULL_ROUNDS * sizes.pp + num_microbatches % sizes.pp)


def _message_bytes(config: Config) -> int:
    """Count the bytes of an activation between stages: [s/c, b, h], or [s/(c t), b, h] with sequence parallelism."""
    elements = local_seq_length(config) * config.train.micro_batch_size * config.model.hidden_size
    return elements * BYTES_PER_ELEMENT[config.precision.dtype]


def _most_messages(sizes: ParallelSizes, pp: int) -> int:
    """Count the most activations and gradients between stages that a pipeline rank holds at one time.

    `triaxis.engine.pipeline.lowering` posts them. A rank with two neighbours holds three: one received early, one in use, and one
    being sent. The first and last ranks hold two if the last rank does not send to the first.
    """
    if sizes.pp == 1:
        return 0
    is_open = sizes.vpp == 1 or sizes.is_v
    return 2 if is_open and pp in (0, sizes.pp - 1) else 3


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes that one microbatch holds on one stage.

    Attributes:
        kept, moved: bytes between forward and backward, on the device and in host memory.
        in_forward, in_backward: peak bytes in each pass; with deferred weight gradients the backward is an I.
        deferred: bytes held between an I and its W.
        in_whole_backward: peak bytes in a B.
        at_work: peak bytes while experts run, their temporaries included: (in the forward, in the backward).
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
    """Compute the peak bytes that microbatches keep on a rank.

    Args:
        held: bytes of one microbatch on a stage, for each index that `peaks` uses for stage contents.
        peaks: the rank's peak moments.

    Returns:
        Peak bytes on the device, bytes by which the experts' temporaries raise that peak, and peak bytes in host memory.
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


def _in_pools(held: Sequence[_Held], peaks: Sequence[PeakMoment], *, has_gathers: bool) -> int:
    """Compute the bytes of the memory pools of CUDA graphs (`triaxis.engine.run.cuda_graphs`): one for each live microbatch.

    A pool is as large as the peak of a microbatch that uses it. With `has_gathers`, a step's first microbatch runs without a graph
    and takes other memory.
    """
    num_pools = max(1 + sum(peak.kept) + sum(peak.deferred) for peak in peaks) + has_gathers
    largest = max(max(one.in_forward, one.in_backward, one.in_whole_backward, *one.at_work) for one in held)
    return num_pools * largest
