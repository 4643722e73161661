"""The search for a run's fastest layout on a cluster: legal, fitting, by predicted step time.

    sizes x stages x sequence parallelism x micro batch x schedule  ->  rules  ->  closed form (models/predict/step_time)
    fastest first: what must it recompute or cut to fit?    ->  memory (models/predict/rank_memory.py), tens of milliseconds
    the fastest that fit                                    ->  their schedules are simulated and sorted by the simulated time

Memory is predicted for few layouts. Layouts are in a heap, ordered by predicted time. A layout's time includes the cheapest
recomputation that is not ruled out yet. The fastest layout is popped, and its memory is predicted. If the layout does not fit, it
goes back into the heap twice: with the next recomputation, and with the next ZeRO stage. Both take more time, so popped layouts
that fit come in the same order as if every layout's memory had been predicted. A layout is found once, with the recomputation and
ZeRO stage that are fastest of those that fit.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count
from math import floor

from triaxis.engine.config.activations import RecomputeConfig
from triaxis.engine.config.extension import NO_COSTS, Measure, as_ours
from triaxis.engine.config.extension_section import with_costs
from triaxis.engine.config.section import Subject
from triaxis.engine.config.tree import RULES, Config, broken_keys
from triaxis.engine.errors import ConfigError, counted
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.telemetry.outlets.format import gigabytes
from triaxis.engine.telemetry.record.flops import model_flops_per_token
from triaxis.launch.planning.legal_layouts import legal_layouts
from triaxis.launch.tuning.choose_layout import MARGIN
from triaxis.models.predict.cut import Memo
from triaxis.models.predict.rank_memory import GB, Prediction, predict
from triaxis.models.predict.recompute_choice import candidates
from triaxis.models.predict.step_time.cluster import Cluster
from triaxis.models.predict.step_time.estimate import Estimator, StepTime
from triaxis.models.predict.step_time.implementation import OURS, Implementation
from triaxis.models.specs import num_parameters

SIMULATED = 50
"""Number of layouts, fastest by the closed form, whose schedules are simulated."""


@dataclass(frozen=True, slots=True)
class Found:
    """A layout that fits.

    Attributes:
        config: the run's configuration in this layout, with the ZeRO stage and the recomputation that make it fit.
        sizes: size of every axis.
        time: predicted step time. The closed form gives it during the search, and a simulated schedule in a finished plan.
        memory: predicted memory of every pipeline rank.
    """

    config: Config
    sizes: ParallelSizes
    time: StepTime
    memory: Prediction

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all devices."""
        return self.config.train.global_batch_size * self.config.model.seq_length / self.time.seconds

    @property
    def model_tflops(self) -> float:
        """Model TFLOP/s per device, without the FLOPs of recomputation
        (`triaxis.engine.telemetry.record.flops`)."""
        return model_flops_per_token(self.config.model) * self.tokens_per_second / self.sizes.world_size / 1e12

    @property
    def layout(self) -> str:
        """The layout in words, including its recomputation."""
        return describe(self.config, self.sizes)

    @property
    def cut(self) -> str:
        """The layout in words, without its recomputation."""
        return describe_cut(self.config, self.sizes)


@dataclass(slots=True)
class Plan:
    """The outcome of a search.

    Attributes:
        cluster: requested devices.
        usable_bytes: memory per device that a layout may be predicted to hold.
        expert_load: assumed rows for the slowest rank's experts, over the mean rank's rows.
        margin_bytes: memory per device that stays free in addition to the share `MARGIN`.
        found: layouts that fit, by predicted step time, fastest first.
        illegal: number of illegal layouts, by the field whose rule they break.
        too_large: reasons why layouts do not fit, by layout in words.
        num_too_large: number of layouts that do not fit; it includes those ruled out without a prediction, because the same
            layout with a smaller microbatch does not fit.
        num_legal: number of legal layouts, whose times were predicted.
    """

    cluster: Cluster
    usable_bytes: int
    expert_load: float = 1.0
    margin_bytes: int = 0
    found: list[Found] = field(default_factory=list)
    illegal: Counter[str] = field(default_factory=Counter)
    too_large: dict[str, str] = field(default_factory=dict)
    num_too_large: int = 0
    num_legal: int = 0

    @property
    def best(self) -> Found:
        return self.found[0]

    def mfu(self, one: Found) -> float:
        """Compute a layout's model FLOPs utilization: its model TFLOP/s over the device's peak in the run's dtype, 0 to 1."""
        peaks, dtype = self.cluster.load_device().peak_tflops, one.config.precision.dtype
        return one.model_tflops / peaks[dtype if dtype in peaks else "fp32"]

    @property
    def memory_line(self) -> str:
        """How much of a device's memory a layout may hold, and how much stays free."""
        whole = round(self.cluster.load_device().memory_gb * GB)
        margin = f" and a margin of {gigabytes(self.margin_bytes)} (--margin)" if self.margin_bytes else ""
        return f"{gigabytes(self.usable_bytes)} of {gigabytes(whole)} may be filled: {MARGIN:.0%}{margin} stay free"

    @property
    def pareto(self) -> list[Found]:
        """Layouts that no other beats in both speed and memory, fastest first."""
        kept: list[Found] = []
        for one in self.found:
            if not kept or one.memory.fullest.total < kept[-1].memory.fullest.total:
                kept.append(one)
        return kept

    def slower_by(self, one: Found) -> str:
        """Format how much slower `one` is than the fastest layout, and the component that adds most; "" if it is not slower."""
        best = self.best
        more = one.time.seconds / best.time.seconds - 1
        names = one.time.components.keys() | best.time.components.keys()
        extra = {name: one.time.components.get(name, 0.0) - best.time.components.get(name, 0.0) for name in names}
        worst = max(sorted(extra), key=lambda name: extra[name])
        return f"{more:.1%} {worst.removeprefix('pipeline ')}" if more > 0 else ""


WORDS = "sp: sequence parallelism; mb: micro batch; balanced: parallel.layers_per_stage=auto"
"""Meanings of the words in a layout that are not sizes."""


def describe(config: Config, sizes: ParallelSizes) -> str:
    """Format a layout in words that distinguish it from all others in a search."""
    return ", ".join([describe_cut(config, sizes), *([str(config.recompute)] if config.recompute.is_any else [])])


def describe_cut(config: Config, sizes: ParallelSizes) -> str:
    """Format a layout in words, without its recomputation.

    The schedule is named unless it is the usual one: interleaved if vpp > 1, else 1f1b.
    """
    words = [f"tp={sizes.tp}", f"cp={sizes.cp}" if sizes.cp > 1 else "", f"pp={sizes.pp}"]
    words += [f"vpp={sizes.vpp}" if sizes.vpp > 1 else ""]
    words += ["balanced" if config.parallel.layers_per_stage == "auto" else "", f"dp={sizes.dp}"]
    words += [f"zero={config.parallel.zero}" if config.parallel.zero > 1 else ""]
    words += [f"{name}={size}" for name, size in (("ep", sizes.ep), ("etp", sizes.etp)) if size > 1]
    words += ["sp" if config.parallel.cuts_sequence else "", f"mb={config.train.micro_batch_size}"]
    usual = ("auto", "interleaved" if sizes.vpp > 1 else "1f1b")
    words += [config.schedule.name if config.schedule.name not in usual else ""]
    return " ".join(word for word in words if word)


def search(
    config: Config,
    cluster: Cluster,
    *,
    simulated: int = SIMULATED,
    implementation: Implementation = OURS,
    expert_load: float = 1.0,
    margin_bytes: int = 0,
    measure: Measure = as_ours,
    keeps_zero: bool = False,
) -> Plan:
    """Find a run's fastest layouts on a cluster.

    Args:
        config: the run; the search replaces `parallel`, `schedule.name`, `recompute` and `train.micro_batch_size`, and keeps the
            global batch, `parallel.dp_replicas`, and a `parallel.zero` above 1.
        cluster: cluster whose devices are all used.
        simulated: largest number of layouts to find; their schedules are then simulated.
        implementation: software whose steps are timed; memory is this engine's.
        expert_load, margin_bytes: see `Plan`.
        measure: function that measures an extension's parts in a layout; called only for layouts that are fastest in their turn.
        keeps_zero: try no other ZeRO stage than the config's, also if that is 1.

    Raises:
        ConfigError: the margin leaves no memory, no layout is legal, or none fits. In the last case the message names the layout
            that needs least memory.
    """
    estimator, load = Estimator(cluster, implementation, expert_load=expert_load), Fraction(expert_load)
    usable_bytes = floor(estimator.device.memory_gb * GB * (1 - MARGIN)) - margin_bytes
    plan = Plan(cluster, usable_bytes, expert_load, margin_bytes)
    if usable_bytes <= 0:
        most = gigabytes(usable_bytes + margin_bytes)
        raise ConfigError(
            [
                f"--margin is {gigabytes(margin_bytes)}, but only {most} may be used, so nothing would fit. Give a "
                "smaller one."
            ]
        )
    order = count()
    memo: Memo = {}
    trials = list(legal_layouts(config, cluster, plan.illegal))
    # Accurate enough to order all layouts; each of the fastest is then measured.
    costs = measure(*trials[0]) if trials else NO_COSTS
    waiting = [
        _Waiting(estimator.closed_form(trial, sizes, memo=memo), next(order), trial, sizes)
        for trial, sizes in ((with_costs(trial, costs), sizes) for trial, sizes in trials)
    ]
    plan.num_legal = len(waiting)
    if not waiting:
        broken = ", ".join(f"{key} ({number:,} layouts)" for key, number in plan.illegal.most_common(5))
        raise ConfigError(
            [
                f"no layout on {counted(cluster.num_gpus, 'device')} is legal. Fields that break rules: {broken}. "
                "Change them."
            ]
        )
    heapq.heapify(waiting)
    num_params = num_parameters(config.model)
    # Published software has the one stage that its description times.
    has_stages = config.parallel.zero == 1 and implementation is OURS and not keeps_zero
    ruled_out = _RuledOut()
    fitting, may_fit = set[int](), set[int]()  # numbers of layouts: found; and those that fit with enough recomputation
    closest: tuple[int, str] | None = None
    while waiting and len(plan.found) < simulated:
        fastest = heapq.heappop(waiting)
        if fastest.number in fitting:
            continue
        measured = with_costs(fastest.config, measure(fastest.config, fastest.sizes))
        if measured.model.own_costs != fastest.config.model.own_costs:
            time = estimator.closed_form(measured, fastest.sizes, memo=memo)
            heapq.heappush(waiting, _Waiting(time, fastest.number, measured, fastest.sizes, fastest.choices))
            continue
        is_new, higher = fastest.choices is None, None
        is_ruled_out = is_new and ruled_out.holds(fastest)
        held = 0 if is_ruled_out else fastest.least_state(num_params, plan.usable_bytes)
        memory = None if held or is_ruled_out else predict(fastest.config, fastest.sizes, memo=memo, load=load)
        if memory is not None and memory.fullest.total <= plan.usable_bytes:
            plan.found.append(Found(fastest.config, fastest.sizes, fastest.time, memory))
            fitting.add(fastest.number)
            continue
        if memory is not None and is_new:
            # Memory is least with everything recomputed: if that is too much, no choice between needs a check.
            memory = predict(fastest.most_recomputed(memo), fastest.sizes, memo=memo, load=load)
        may_rise = is_new and has_stages and (memory is None or _may_fit_in_a_stage(memory, plan.usable_bytes))
        if may_rise and (higher := fastest.next_zero(estimator, memo)) is not None:
            heapq.heappush(waiting, higher)
        fits = memory is not None and (not is_new or memory.fullest.total <= plan.usable_bytes)
        if fits and (again := fastest.next_recomputed(estimator, memo)) is not None:
            heapq.heappush(waiting, again)
            may_fit.add(fastest.number)
            continue
        ruled_out.add(fastest)
        is_last = higher is None and fastest.number not in may_fit
        plan.num_too_large += is_last
        if is_ruled_out or not is_last:
            continue
        total = held if memory is None else memory.fullest.total
        reason = _too_large(total, plan.usable_bytes, memory)
        plan.too_large[describe(fastest.config, fastest.sizes)] = reason
        if closest is None or total < closest[0]:
            closest = total, f"{describe(fastest.config, fastest.sizes)} {reason}"
    if not plan.found:
        assert closest is not None
        raise ConfigError(
            [
                f"no layout on {cluster.num_gpus} x {cluster.device} fits: the nearest of {plan.num_legal:,} legal "
                f"ones, {closest[1]}. {'Give a smaller --margin, or take' if margin_bytes else 'Take'} more devices or "
                "ones with more memory, precision.masters=split, offload.num_layers, or a smaller model."
            ]
        )
    plan.found = [
        Found(one.config, one.sizes, estimator.simulated(one.config, one.sizes, memo=memo), one.memory)
        for one in plan.found
    ]
    plan.found.sort(key=lambda one: one.time.seconds)
    return plan


class _RuledOut:
    """Layouts that do not fit, to rule out the same layouts with larger microbatches, which hold at least as much."""

    def __init__(self) -> None:
        self._smallest: dict[tuple[object, ...], int] = {}

    def add(self, one: "_Waiting") -> None:
        """Record a layout that does not fit even with everything recomputed."""
        size, key = one.config.train.micro_batch_size, self._key(one)
        self._smallest[key] = min(self._smallest.get(key, size), size)

    def holds(self, one: "_Waiting") -> bool:
        """Whether `one` cannot fit, because the same layout with the same or a smaller microbatch did not fit."""
        size = one.config.train.micro_batch_size
        return size >= self._smallest.get(self._key(one), size + 1)

    @staticmethod
    def _key(one: "_Waiting") -> tuple[object, ...]:
        parallel = one.config.parallel
        return one.sizes, parallel.zero, parallel.sequence_parallel, parallel.layers_per_stage, one.config.schedule.name


def _may_fit_in_a_stage(memory: Prediction, usable: int) -> bool:
    """Whether every rank would fit without parameters and gradients; no ZeRO stage leaves a rank with less."""
    return all(rank.total - rank.parameters - rank.gradients <= usable for rank in memory.ranks)


def _too_large(total: int, usable: int, memory: Prediction | None) -> str:
    where = "its state alone" if memory is None else f"stage {memory.pp} with everything recomputed"
    return f"does not fit: {where} needs {gigabytes(total)} of {gigabytes(usable)}"


@dataclass(slots=True)
class _Waiting:
    """A layout in the heap.

    Attributes:
        time: predicted step time, including the recomputation in `config`.
        number: order in which the layouts were found, to sort equal times; one number for all stages of a layout.
        choices: further recomputations to try; None if none was tried.
    """

    time: StepTime
    number: int
    config: Config
    sizes: ParallelSizes
    choices: Iterator[RecomputeConfig] | None = None

    def __lt__(self, other: "_Waiting") -> bool:
        return (self.time.seconds, self.number) < (other.time.seconds, other.number)

    def least_state(self, num_params: int, usable: int) -> int:
        """Compute the least bytes that a rank's parameters, gradients and optimizer state take; 0 if they are within `usable`.

        Parameters and gradients are divided by the ranks that share the model, and by all
        ranks as far as `parallel.zero` cuts them; the optimizer's state is divided by all ranks.
        """
        element = 2 if self.config.precision.dtype in ("bf16", "fp16") else 4
        gradient = 2 if self.config.precision.gradients == "bf16" else 4
        sizes = self.sizes
        # Assumes that all parameters are experts, or none, whichever is less; every rank has a part of the optimizer's state.
        numel = num_params // (max(sizes.tp, sizes.expert_ranks) * sizes.pp)
        # With ZeRO-2 and 3, all of the model may be matrices of layers.
        even, zero = num_params // sizes.world_size, self.config.parallel.zero
        least = (even if zero > 2 else numel) * element + (even if zero > 1 else numel) * gradient
        # Moments in 16 bits and split masters are the smallest possible optimizer state.
        least += even * 4
        return least if least > usable else 0

    def most_recomputed(self, memo: Memo) -> Config:
        """Return the configuration with the choice that recomputes most."""
        *_, most = candidates(self.config, self.sizes, memo)
        return self.config.model_copy(update={"recompute": most})

    def next_zero(self, estimator: Estimator, memo: Memo) -> "_Waiting | None":
        """Return the same layout without recomputation in the next ZeRO stage; None if that is illegal or dp has one rank."""
        sizes, zero = self.sizes, self.config.parallel.zero + 1
        parallel = self.config.parallel.model_copy(update={"zero": zero})
        config = self.config.model_copy(update={"parallel": parallel})
        subject = Subject(config, sizes.world_size, config.runtime.ranks_per_node)
        if zero > 3 or sizes.owners("dp") == 1 or broken_keys(subject, RULES):
            return None
        return _Waiting(estimator.closed_form(config, sizes, memo=memo), self.number, config, sizes)

    def next_recomputed(self, estimator: Estimator, memo: Memo) -> "_Waiting | None":
        """Return the same layout with the next recomputation choice and its time; None if no choice is left."""
        if self.choices is None:
            self.choices = candidates(self.config, self.sizes, memo)
            next(self.choices)
        choice = next(self.choices, None)
        if choice is None:
            return None
        config = self.config.model_copy(update={"recompute": choice})
        return _Waiting(
            estimator.closed_form(config, self.sizes, memo=memo), self.number, config, self.sizes, self.choices
        )
