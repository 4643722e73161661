"""The search for a run's fastest layout on a cluster: legal, fitting, by predicted step time.

    sizes x stages x sequence parallelism x micro batch x schedule  ->  rules  ->  closed form (models/predict/step_time)
    fastest first: what must it recompute or cut to fit?    ->  memory (models/predict/rank_memory.py), tens of milliseconds
    the fastest that fit                                    ->  their schedules are simulated and sorted by the simulated time

Few layouts are timed, and memory is predicted for fewer. A heap has groups of layouts by a bound on their least time, and layouts
by their time with the cheapest recomputation that is not ruled out yet:

    sizes of axes, micro batch    what an ideal device takes, with the recomputation without which no layout fits (needs.py)
                               -> what this device takes, with the least possible bubble  ->  its layouts

The fastest is popped. A layout that does not fit goes back into the heap twice: with the next recomputation, and with the next ZeRO
stage. Both take more time, so layouts that fit come in the same order as if every layout had been predicted. A layout is
found once, with the recomputation and ZeRO stage that are fastest of those that fit.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count
from math import floor, inf

from triaxis.engine.config.quantities.extension_costs import Measure, as_ours, with_costs
from triaxis.engine.config.rules.check import RULES, broken_keys
from triaxis.engine.config.rules.problem import Subject
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError, counted
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.telemetry.outlets.format import gigabytes
from triaxis.engine.telemetry.record.flops import model_flops_per_token
from triaxis.launch.planning.legal_layouts import Block, blocks, broken_fields, legal_layouts
from triaxis.launch.planning.pruning import LEAST_AGAIN, likely, share_recomputed
from triaxis.launch.tuning.choose_layout import MARGIN
from triaxis.models.predict.cut import Memo
from triaxis.models.predict.rank_memory import GB, Prediction, predict
from triaxis.models.predict.recompute_choice import candidates
from triaxis.models.predict.step_time.cluster import Cluster
from triaxis.models.predict.step_time.estimate import Estimator, StepTime
from triaxis.models.predict.step_time.implementation import OURS, Implementation
from triaxis.models.specs import num_parameters

Number = tuple[int, ...]
"""A layout's place in the order of all, to sort equal times: of its sizes, its micro batch and its stages."""

Choices = Sequence[RecomputeConfig]
"""Recomputations, cheapest first."""

MOST_LAYOUTS = 200_000
"""Legal layouts beyond which unlikely ones are left out of a search, which would take minutes."""

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
        too_large: reasons why layouts do not fit, by layout in words.
        num_too_large: number of layouts that came up in the search and do not fit.
        num_legal: number of legal layouts.
        num_left_out: number of those that the search left out (`LEFT_OUT`), because there were more than `MOST_LAYOUTS`.
    """

    cluster: Cluster
    usable_bytes: int
    expert_load: float = 1.0
    margin_bytes: int = 0
    found: list[Found] = field(default_factory=list)
    too_large: dict[str, str] = field(default_factory=dict)
    num_too_large: int = 0
    num_legal: int = 0
    num_left_out: int = 0

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
    advance: Callable[[], None] = lambda: None,
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
        advance: called for each layout that is found, and once more for each whose schedule is simulated.

    Raises:
        ConfigError: the margin leaves no memory, no layout is legal, or none fits. In the last case the message names the layout
            that needs least memory.
    """
    estimator = Estimator(cluster, implementation, expert_load=expert_load)
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
    first = next(legal_layouts(config, cluster), None)
    # Accurate enough to order all layouts; each of the fastest is then measured.
    config = config if first is None else with_costs(config, measure(*first))
    groups = list(blocks(config, cluster))
    plan.num_legal = sum(map(len, groups))
    if not groups:
        fields = broken_fields(config, cluster).most_common(5)
        broken = ", ".join(f"{key} ({number:,} layouts)" for key, number in fields)
        raise ConfigError(
            [
                f"no layout on {counted(cluster.num_gpus, 'device')} is legal. Fields that break rules: {broken}. "
                "Change them."
            ]
        )
    # Published software has the one stage that its description times.
    has_stages = config.parallel.zero == 1 and implementation is OURS and not keeps_zero
    few = likely(groups, usable_bytes) if plan.num_legal > MOST_LAYOUTS else []
    if few:
        plan.num_left_out = plan.num_legal - sum(map(len, few))
    tried = _Search(plan, estimator, measure, num_parameters(config.model), has_stages=has_stages)
    for one in tried.fitting(few or groups):
        plan.found.append(one)
        advance()
        if len(plan.found) == simulated:
            break
    if not plan.found:
        raise ConfigError(
            [
                f"no layout on {cluster.num_gpus} x {cluster.device} fits: the nearest of {plan.num_legal:,} legal "
                f"ones, {tried.closest[1]}. {'Give a smaller --margin, or take' if margin_bytes else 'Take'} more devices or "
                "ones with more memory, precision.masters=split, offload.num_layers, or a smaller model."
            ]
        )
    for place, one in enumerate(plan.found):
        time = estimator.simulated(one.config, one.sizes, memo=tried.memo)
        plan.found[place] = replace(one, time=time)
        advance()
    plan.found.sort(key=lambda one: one.time.seconds)
    return plan


class _Search:
    """The heap of layouts, and of groups of layouts by the least time that any of a group takes.

    Attributes:
        memo: predictions that layouts share.
        closest: least bytes of a layout that does not fit, and the layout in words.
    """

    def __init__(
        self, plan: Plan, estimator: Estimator, measure: Measure, num_params: int, *, has_stages: bool
    ) -> None:
        self.memo: Memo = {}
        self.closest: tuple[float, str] = (inf, "")
        self._plan, self._estimator, self._measure, self._has_stages = plan, estimator, measure, has_stages
        self._num_params = num_params
        self._heap: list[tuple[float, Number, int, _Group | _Waiting]] = []
        self._pushes = count()
        # Numbers of layouts: found; and those that fit with enough recomputation.
        self._found, self._may_fit = set[Number](), set[Number]()

    def fitting(self, groups: Iterable[Block]) -> Iterator[Found]:
        """Yield the layouts that fit, fastest by the closed form first."""
        for first, block in enumerate(groups):
            largest = [block.layout(block.micro_batches[-1], stages) for stages in block.deepest]
            seconds = min(self._estimator.least_of_smaller(*one, self.memo) for one in largest)
            for place, micro in enumerate(block.micro_batches):
                again = share_recomputed(*largest[0], micro, self._plan.usable_bytes, self.memo)
                more = 1 + LEAST_AGAIN * again
                self._push(seconds * more, (first, place), _Group(block, micro, again, more))
        while self._heap:
            seconds, number, _, one = heapq.heappop(self._heap)
            if isinstance(one, _Group):
                self._open(seconds, number, one)
            elif number not in self._found and (found := self._look_at(number, one)) is not None:
                self._found.add(number)
                yield found

    def _push(self, seconds: float, number: Number, one: "_Group | _Waiting") -> None:
        heapq.heappush(self._heap, (seconds, number, next(self._pushes), one))

    def _open(self, seconds: float, number: Number, group: "_Group") -> None:
        """Put a group back with a better bound; if it has that one, put its layouts into the heap."""
        layouts = group.block.layout
        if not group.is_timed:
            least = min(self._estimator.least(*layouts(group.micro, each), self.memo) for each in group.block.deepest)
            self._push(max(seconds, least * group.more), number, replace(group, is_timed=True))
            return
        for place, stages in enumerate(group.block.stages):
            config, sizes = layouts(group.micro, stages)
            choices = list(candidates(config, sizes, self.memo))
            if group.again > 0:
                whole = [choice for choice in choices if choice.granularity == "full"]
                # No fewer whole layers are enough; a schedule with deferred weight gradients recomputes none.
                choices = whole[max(0, floor(group.again * len(whole)) - 1) :] or choices[-1:]
            config = config.model_copy(update={"recompute": choices[0]})
            self._wait((*number, place), config, sizes, choices[1:], is_new=True)

    def _wait(
        self, number: Number, config: Config, sizes: ParallelSizes, choices: Choices, *, is_new: bool = False
    ) -> None:
        time = self._estimator.closed_form(config, sizes, memo=self.memo)
        self._push(time.seconds, number, _Waiting(time, config, sizes, choices, is_new))

    def _look_at(self, number: Number, one: "_Waiting") -> Found | None:
        """Return the layout if it fits; else put its next ZeRO stage and its least recomputation that fits into the heap."""
        measured = with_costs(one.config, self._measure(one.config, one.sizes))
        if measured.model.own_costs != one.config.model.own_costs:
            self._wait(number, measured, one.sizes, one.choices, is_new=one.is_new)
            return None
        is_new, usable = one.is_new, self._plan.usable_bytes
        held = one.least_state(self._num_params, usable)
        memory = None if held else self._predict(one, one.config.recompute)
        if memory is not None and memory.fullest.total <= usable:
            return Found(one.config, one.sizes, one.time, memory)
        if memory is not None and is_new and one.choices:
            # Memory is least with everything recomputed: if that is too much, no choice between needs a check.
            memory = self._predict(one, one.choices[-1])
        may_rise = is_new and self._has_stages and (memory is None or _may_fit_in_a_stage(memory, usable))
        has_risen = may_rise and self._rise(number, one)
        if memory is not None and (not is_new or memory.fullest.total <= usable) and self._recompute(number, one):
            self._may_fit.add(number)
            return None
        if not has_risen and number not in self._may_fit:
            self._plan.num_too_large += 1
            self._explain(one, held, memory)
        return None

    def _recompute(self, number: Number, one: "_Waiting") -> bool:
        """Put the layout with the next recomputation that may fit into the heap; return whether there is one."""
        # Each further whole layer takes more time and less memory; one more part need not take less.
        place, choices = 0, one.choices
        if choices and choices[0].granularity == "full":
            usable = self._plan.usable_bytes
            place = bisect_left(choices, True, key=lambda choice: self._predict(one, choice).fullest.total <= usable)
        if place == len(choices):
            return False
        config = one.config.model_copy(update={"recompute": choices[place]})
        self._wait(number, config, one.sizes, choices[place + 1 :])
        return True

    def _predict(self, one: "_Waiting", recompute: RecomputeConfig) -> Prediction:
        config = one.config.model_copy(update={"recompute": recompute})
        return predict(config, one.sizes, memo=self.memo, load=Fraction(self._plan.expert_load))

    def _rise(self, number: Number, one: "_Waiting") -> bool:
        """Put the layout without recomputation in the next ZeRO stage into the heap; return whether there is a legal one."""
        config = one.in_next_stage()
        if config is not None:
            self._wait(number, config, one.sizes, one.choices, is_new=True)
        return config is not None

    def _explain(self, one: "_Waiting", held: int, memory: Prediction | None) -> None:
        total, words = held if memory is None else memory.fullest.total, describe(one.config, one.sizes)
        reason = _too_large(total, self._plan.usable_bytes, memory)
        self._plan.too_large[words] = reason
        self.closest = min(self.closest, (total, f"{words} {reason}"), key=lambda each: each[0])


@dataclass(frozen=True, slots=True)
class _Group:
    """The layouts in the heap of a block with one micro batch.

    Attributes:
        again: share of layers that must be recomputed to fit.
        more: factor on seconds without that.
        is_timed: the least time is that of this micro batch, not of any.
    """

    block: Block
    micro: int
    again: float
    more: float
    is_timed: bool = False


def _may_fit_in_a_stage(memory: Prediction, usable: int) -> bool:
    """Whether every rank would fit without parameters and gradients; no ZeRO stage leaves a rank with less."""
    return all(rank.total - rank.parameters - rank.gradients <= usable for rank in memory.ranks)


def _too_large(total: int, usable: int, memory: Prediction | None) -> str:
    where = "its state alone" if memory is None else f"stage {memory.pp} with everything recomputed"
    return f"does not fit: {where} needs {gigabytes(total)} of {gigabytes(usable)}"


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A layout in the heap.

    Attributes:
        time: predicted step time, including the recomputation in `config`.
        choices: further recomputations to try.
        is_new: whether no other one was tried.
    """

    time: StepTime
    config: Config
    sizes: ParallelSizes
    choices: Choices = ()
    is_new: bool = False

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

    def in_next_stage(self) -> Config | None:
        """Return the same layout in the next ZeRO stage; None if that is illegal or dp has one rank."""
        sizes, zero = self.sizes, self.config.parallel.zero + 1
        config = with_value(self.config, "parallel.zero", zero)
        subject = Subject(config, sizes.world_size, config.runtime.ranks_per_node)
        if zero > 3 or sizes.owners("dp") == 1 or broken_keys(subject, RULES):
            return None
        return config
