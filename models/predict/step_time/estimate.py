"""Predict the seconds of a whole training step, by formula or by simulating its schedule.

    closed form   m (F + I + W) of the slowest pipeline rank + bubble + exposed dp + optimizer, for m microbatches
    simulated     the schedule's span (`engine/pipeline/simulate.py`) replaces the first two summands

A rank takes F seconds for one microbatch's forward, I for its input gradients and W for its weight gradients. With p pipeline
ranks and v chunks on each, the bubble is as follows, with F, I and W as means over the ranks other than the slowest:

    1f1b, gpipe   (p - 1)(F + I + W)           2006.09503, 1811.06965
    interleaved   (p - 1)(F + I + W) / v       2104.04473, section 2.2
    zb_h1         (p - 1)(F + I - W)           2401.10241, table 1
    zbv           (p - 1) max(F, I, F + I - 2 W) / 2     2401.10241, section 6, with the wait for the first forward; more with few W
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

from triaxis.engine.config.quantities.plan import batch_plan, rank_grid
from triaxis.engine.config.quantities.state_plan import NUM_PLACES
from triaxis.engine.config.tree import Config
from triaxis.engine.data.document_statistics import DocumentStatistics
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.partition import StageLayers
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.simulate import Costs, simulate
from triaxis.models.predict.cut import Contents, Memo, StageCut
from triaxis.models.predict.device import Device
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.predict.state_memory import state_bytes
from triaxis.models.predict.step_time.cluster import Cluster
from triaxis.models.predict.step_time.facts import Parameters, activation_bytes, element_bytes
from triaxis.models.predict.step_time.implementation import OURS, Implementation
from triaxis.models.predict.step_time.layer import Seconds, total
from triaxis.models.predict.step_time.links import Link, Links
from triaxis.models.predict.step_time.stage import StageTimer, Timed, timer_key

ROUNDING = 1e-3
"""Share by which the rounding of tiles and rows to whole numbers may make a lower bound too high, on an ideal device."""

PUBLISHED_OVER_PREDICTED = (0.95, 1.13)
"""Published over predicted seconds of a step: 95 % of the runs that `python -m benchmarks.published` scores are between these."""

SIMULATED_ROUNDS = 3
"""Microbatches that are simulated, in units of pp; a longer step goes on at the pace of the last round."""


COMPONENTS = ("compute", "recompute", "tp", "cp", "experts", "host", "pipeline bubble", "transfers", "dp", "optimizer")
"""In the order in which they are shown. "host": by how much the host's calls outlast the device's work."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A predicted step.

    Attributes:
        seconds: seconds per optimizer step.
        components: seconds that the slowest pipeline rank spends on each of `COMPONENTS`; they add up to `seconds`.
        calls: kernels and collectives that this rank's host posts for a microbatch, without those of a cut context's pieces.
    """

    seconds: float
    components: Mapping[str, float]
    calls: int

    @property
    def bubble_share(self) -> float:
        """Share of the step's seconds that the slowest pipeline rank idles in the bubble, 0 to 1."""
        return max(0.0, self.components.get("pipeline bubble", 0.0)) / self.seconds


class Estimator:
    """Predicts step times of layouts on one cluster.

    Args:
        cluster: the cluster, whose device file is read once, here.
        device: in place of the cluster's.
        implementation: training software whose step is predicted.
        expert_load: in every layer, rows that the slowest rank's experts get over the mean rank's.
    """

    def __init__(
        self,
        cluster: Cluster,
        implementation: Implementation = OURS,
        *,
        expert_load: float = 1.0,
        device: Device | None = None,
    ) -> None:
        self.cluster, self.implementation, self.expert_load = cluster, implementation, expert_load
        self.device = device or cluster.load_device()

    def closed_form(
        self,
        config: Config,
        sizes: ParallelSizes,
        documents: DocumentStatistics | None = None,
        *,
        memo: Memo | None = None,
    ) -> StepTime:
        """Predict a step's time by formula; a schedule from a file has none and is simulated.

        Args:
            config: configuration that breaks no rule.
            sizes: size of every axis.
            documents: statistics of the documents, if tokens attend only within their document; None: they attend across documents.
            memo: cache of this run's predictions with the same documents and other layouts, batch sizes and recomputation; read
                and filled.

        Raises:
            ConfigError: the device has no rate for the run's dtype, the run has FP8, or `resolve_recompute` raises it.
        """
        if config.schedule.file is not None:
            # Only a named schedule has a formula.
            return self.simulated(config, sizes, documents, memo=memo)
        step = _Step(self, config, sizes, documents, memo)
        return step.result(*step.by_formula())

    def simulated(
        self,
        config: Config,
        sizes: ParallelSizes,
        documents: DocumentStatistics | None = None,
        *,
        memo: Memo | None = None,
    ) -> StepTime:
        """Predict a step's time by simulating its schedule; arguments and errors are those of `closed_form`."""
        step = _Step(self, config, sizes, documents, memo)
        return step.result(*step.by_simulation())

    def simulated_ranks(
        self, config: Config, sizes: ParallelSizes, documents: DocumentStatistics | None = None
    ) -> list[dict[str, float]]:
        """List each pipeline rank's seconds by component in a simulated step; arguments and errors are those of `closed_form`.

        Every rank's components add up to the step's seconds: a rank that is faster than the slowest has a longer bubble.
        """
        step = _Step(self, config, sizes, documents)
        return step.of_ranks(*step.by_simulation())

    def least(self, config: Config, sizes: ParallelSizes, memo: Memo) -> float:
        """Bound `closed_form` from below, in seconds, for this layout and others whose schedule has fewer chunks or another cut."""
        return _Step(self, config, sizes, None, memo).least()

    def least_of_smaller(self, config: Config, sizes: ParallelSizes, memo: Memo) -> float:
        """Bound `closed_form` from below, in seconds, as `least`, and for all smaller micro batches."""
        device, cluster = self.device.ideal, replace(self.cluster, network_latency_us=0)
        ideal = Estimator(cluster, self.implementation, expert_load=self.expert_load, device=device)
        return (1 - ROUNDING) * _Step(ideal, config, sizes, None, memo.setdefault("ideal", {})).least_work()

    def mean_layer(self, config: Config, sizes: ParallelSizes) -> Seconds:
        """Time a microbatch in the mean layer of the first pipeline rank; errors are those of `closed_form`."""
        return _Step(self, config, sizes, None).mean_layer()

    def costs(self, config: Config, sizes: ParallelSizes, documents: DocumentStatistics | None = None) -> Costs:
        """Compute the seconds of each stage's actions and of a transfer between stages, for the schedule simulator."""
        return _Step(self, config, sizes, documents).costs()


class _Step:
    """The prediction of one layout's step: its links, stage times and schedule."""

    def __init__(
        self,
        estimator: Estimator,
        config: Config,
        sizes: ParallelSizes,
        documents: DocumentStatistics | None,
        memo: Memo | None = None,
    ) -> None:
        if config.precision.fp8 is not None:
            raise ConfigError(
                [
                    "precision.fp8: no rates of FP8 GEMMs are known, and times of bf16 would be taken for theirs. Give "
                    "precision.fp8=null for those of a run without it."
                ]
            )
        self.config, self.sizes = resolve_recompute(config, sizes), sizes
        self.implementation, self.device = estimator.implementation, estimator.device
        memo = {} if memo is None else memo
        self.links = Links(
            estimator.cluster, self.device, rank_grid(self.config, sizes, estimator.cluster.gpus_per_node), memo
        )
        key = timer_key(self.config, sizes)
        if key not in memo:
            memo[key] = StageTimer(
                self.config, sizes, self.device, self.links, self.implementation, documents, estimator.expert_load
            )
        timer: StageTimer = memo[key]
        self.timer = timer.layer_timer
        self.cut = StageCut.of(self.config, memo)
        self.num_microbatches = batch_plan(self.config, sizes.dp).num_microbatches
        self.schedule = schedules.resolve(self.config.schedule.name, sizes.vpp)
        self.ranks = [timer.rank(contents) for _, contents in self.cut.ranks]
        self.parameters = [rank.parameters for rank in self.ranks]
        self._timer, self._waits = timer, self._gathers_in_passes or self.implementation.exposed_transfers
        if self._waits:
            self.ranks = [self._rank(rank) for rank in range(sizes.pp)]
        self.slowest = max(range(sizes.pp), key=lambda rank: self.ranks[rank].total)

    def _stage(self, stage: int) -> Timed:
        """Time a stage, including the time that its passes wait for traffic over dp and pp."""
        timed = self._timer.stage(self.cut.contents[stage])
        if not self._waits:
            return timed
        seconds = Seconds()
        seconds.add(timed.seconds)
        self._sharded_parameters(seconds, self.cut.stages[stage], timed.parameters.all)
        if self.implementation.exposed_transfers and self.sizes.pp > 1:
            seconds.add(Seconds({"transfers": self._transfer()}, {"transfers": self._transfer()}, {}))
        return Timed.of(seconds, timed.parameters)

    def _sharded_parameters(self, seconds: Seconds, stage: StageLayers, numel: int) -> None:
        """Add to `seconds` the exposed time of per-pass collectives: gathers of `numel` parameters, and reductions of gradients."""
        if not self._gathers_in_passes:
            return
        link, n = self.links.of_owners("dp"), self.sizes.owners("dp")
        calls = len(stage.layers) + 1
        gathered = link.seconds(numel * element_bytes(self.config) * (n - 1) / n, calls)
        reduced = link.seconds(numel * self.implementation.gradient_bytes * (n - 1) / n, calls)
        forward, backward = (
            sum(seconds.forward.values()),
            sum(seconds.input_grad.values()) + sum(seconds.weight_grad.values()),
        )
        copied = (
            self.timer.stream(2 * element_bytes(self.config) * numel) if self.implementation.copies_parameters else 0.0
        )
        seconds.forward["dp"] = copied + gathered / calls + self.device.beyond(gathered * (1 - 1 / calls), forward)
        copied *= 1 + self.implementation.gradient_bytes / element_bytes(self.config)
        seconds.input_grad["dp"] = (
            copied + reduced / calls + self.device.beyond((gathered + reduced) * (1 - 1 / calls), backward)
        )

    @property
    def _gathers_in_passes(self) -> bool:
        """Whether parameters are gathered anew for each pass; FSDP2 with several pipeline ranks gathers them once a step."""
        is_fsdp = self.implementation.shards == "parameters" and self.sizes.pp == 1
        return (is_fsdp or (self.implementation is OURS and self.config.parallel.zero > 2)) and self.sizes.owners(
            "dp"
        ) > 1

    def _rank(self, rank: int) -> Timed:
        seconds = Seconds()
        for stage in self.cut.ranks[rank][0]:
            seconds.add(self._stage(stage).seconds)
        return Timed.of(seconds, self.parameters[rank])

    def _transfer(self) -> float:
        """Compute the seconds to send an activation or its gradient between stages."""
        if self.sizes.pp == 1:
            return 0.0
        link, whole, t = self.links.hand_over(), activation_bytes(self.config), self.sizes.tp
        if self.config.parallel.cuts_sequence:
            return link.seconds(whole / t)
        if self.implementation.scatter_gather and t > 1:
            return link.seconds(whole / t) + self.links.of_axes("tp").seconds(whole * (t - 1) / t)
        return link.seconds(whole)

    def mean_layer(self) -> Seconds:
        layers = tuple(chain.from_iterable(one.layers for one in self.cut.ranks[0][1]))
        mean, whole = Seconds(), self._timer.stage(Contents(layers, has_embedding=False, has_head=False, num_mtp=0))
        mean.add(whole.seconds, 1 / len(layers))
        return mean

    def costs(self) -> Costs:
        """Compute the seconds of each stage's actions and of a transfer; 0 for a transfer that the actions already include."""
        forward, input_grad, weight_grad = zip(
            *(self._stage(stage).passes for stage in range(len(self.cut.stages))), strict=True
        )
        transfer = 0.0 if self.implementation.exposed_transfers else self._transfer()
        return Costs(forward, input_grad, weight_grad, transfer)

    def by_formula(self) -> tuple[float, float]:
        """Compute, by formula, (seconds of the bubble without transfers, seconds by which transfers lengthen it)."""
        p = self.sizes.pp
        if p == 1:
            return 0.0, 0.0
        others = [self.ranks[rank].passes for rank in range(p) if rank != self.slowest]
        forward, input_grad, weight_grad = (sum(passes) for passes in zip(*others, strict=True))
        transfers = 0.0 if self.implementation.exposed_transfers else 2 * (p - 1) * self._transfer()
        return self._bubble(forward, input_grad, weight_grad), transfers

    def _bubble(self, forward: float, input_grad: float, weight_grad: float) -> float:
        """Compute the seconds of the bubble by formula, given the passes' seconds summed over the ranks other than the slowest."""
        if self.schedule == "zb_h1":
            bubble = forward + input_grad - weight_grad
        elif self.schedule == "zbv":
            bubble = max(forward, input_grad, forward + input_grad - 2 * weight_grad) / 2
        else:
            bubble = (forward + input_grad + weight_grad) / (self.sizes.vpp if self.schedule == "interleaved" else 1)
        return max(0.0, bubble)

    def least_work(self) -> float:
        """Compute the seconds of all microbatches' passes on a rank that has an equal share of the model."""
        return self.num_microbatches * self._whole.total / self.sizes.pp

    def least(self) -> float:
        """Compute the seconds that the step takes at least, however the layers are cut into chunks."""
        if self.sizes.pp == 1:
            return self.least_work()
        # The slowest rank's passes count in the bubble of the whole, and are at most those of one of its microbatches.
        mean = self._whole.total / self.sizes.pp
        return self.least_work() - mean + self._bubble(*self._whole.passes)

    @property
    def _whole(self) -> Timed:
        """The whole model's seconds, as if one rank had all stages."""
        layers = tuple(chain.from_iterable(one.layers for one in self.cut.contents))
        ahead = sum(one.num_mtp for one in self.cut.contents)
        return self._timer.stage(Contents(layers, has_embedding=True, has_head=True, num_mtp=ahead))

    def by_simulation(self) -> tuple[float, float]:
        """Compute the same pair as `by_formula` by simulating the schedule.

        As in `TimeSplit`, the bubble is the time that the slowest rank idles if transfers take no time.
        """
        costs = self.costs()
        instant = self._whole_span(replace(costs, transfer=0.0))
        return instant - self.num_microbatches * self.ranks[self.slowest].total, self._whole_span(costs) - instant

    def _whole_span(self, costs: Costs) -> float:
        m, p = self.num_microbatches, self.sizes.pp
        most = SIMULATED_ROUNDS * p
        if m <= most:
            return self._span(m, costs)
        span = self._span(most, costs)
        return span + (m - most) * (span - self._span(most - p, costs)) / p

    def _span(self, num_microbatches: int, costs: Costs) -> float:
        return simulate(schedules.of_config(self.config, self.sizes.pp, self.sizes.vpp, num_microbatches), costs).span

    def result(self, bubble: float, transfers: float) -> StepTime:
        """Build the step's time from the slowest rank's components, given the seconds of bubble and transfers."""
        components = self._components(self.slowest, bubble, transfers)
        return StepTime(sum(components.values()), components, round(self.ranks[self.slowest].seconds.calls))

    def of_ranks(self, bubble: float, transfers: float) -> list[dict[str, float]]:
        """List each pipeline rank's components; a rank's bubble is what remains of the slowest rank's step."""
        seconds = self.result(bubble, transfers).seconds
        ranks = [self._components(rank, 0.0, transfers) for rank in range(self.sizes.pp)]
        for components in ranks:
            components["pipeline bubble"] = seconds - sum(components.values())
        return ranks

    def _components(self, rank: int, bubble: float, transfers: float) -> dict[str, float]:
        """Compute a pipeline rank's seconds per step for each of `COMPONENTS`."""
        components = {
            name: self.num_microbatches * seconds for name, seconds in total(self.ranks[rank].seconds.passes).items()
        }
        components["host"] = self._host_bound(rank)
        components["pipeline bubble"] = bubble
        components["transfers"] = components.get("transfers", 0.0) + transfers
        components["dp"] = components.get("dp", 0.0) + self._data_parallel(rank)
        # An update ends with the meeting of all ranks.
        components["optimizer"] = self._optimizer()
        return components

    def _host_bound(self, rank: int) -> float:
        """Compute the seconds per step by which a rank's host is behind: it posts calls ahead, through a whole microbatch."""
        if self.implementation.host_ahead:
            return 0.0
        timed, posted = self.ranks[rank], self.num_microbatches
        if self.config.kernels.graphs == "on":
            # A graph is one call. Where weights are gathered, a step's first microbatch has none.
            posted = int(self.sizes.owners("dp") > 1)
        return posted * max(0.0, timed.seconds.calls * self.device.host_us * 1e-6 - timed.total)

    def _data_parallel(self, rank: int) -> float:
        """Compute a rank's exposed seconds per step for gradient reductions and parameter gathers; 0 if passes include them."""
        how, numels = self.implementation, self.parameters[rank]
        summed = self._replica_sums(rank)
        if self._gathers_in_passes:
            return summed
        bytes_each = max(how.gradient_bytes, self._main_grad_bytes() if how is OURS else 0)
        reduced = gathered = 0.0
        buckets = 0
        for numel, n, link in self._replicated(numels):
            calls = max(1, -(-numel * bytes_each // self.config.optimizer.bucket_bytes))
            if self._sums_each_microbatch:
                calls = max(1, sum(len(self.cut.stages[stage].layers) for stage in self.cut.ranks[rank][0]))
            wire = numel * (n - 1) / n
            reduced += link.seconds(wire * bytes_each * (2 if how.shards == "none" else 1), calls)
            gathered += link.seconds(wire * element_bytes(self.config), calls)
            buckets += calls
        if not buckets:
            return summed
        forward, *backwards = self.ranks[rank].passes
        exposed = summed + self._beyond(reduced, sum(backwards), buckets, hidden=how.dp_overlap)
        if self._sums_each_microbatch:
            # The sums of all microbatches but the last also run under the next forward.
            exposed += (self.num_microbatches - 1) * self.device.beyond(reduced, forward + sum(backwards))
        if how.shards == "none":
            return exposed
        return exposed + self._beyond(gathered, forward, buckets, hidden=how.gather_overlap)

    def _replica_sums(self, rank: int) -> float:
        """Compute a rank's exposed seconds per step for all-reduces of owned gradients over replicas of the state (HSDP)."""
        sizes, numels = self.sizes, self.parameters[rank]
        own = (numels.all - numels.experts) / sizes.owners("dp") + numels.experts / sizes.owners("expert_dp")
        wire = 2 * own * self._main_grad_bytes() * (sizes.dp_replicas - 1) / sizes.dp_replicas
        if not wire:
            return 0.0
        buckets = max(1, sum(len(self.cut.stages[stage].layers) for stage in self.cut.ranks[rank][0]))
        _, *backwards = self.ranks[rank].passes
        seconds = self.links.of_state_replicas().seconds(wire, buckets)
        return self._beyond(seconds, sum(backwards), buckets, hidden=True)

    @property
    def _sums_each_microbatch(self) -> bool:
        """Whether gradients are sharded (from ZeRO-2 on), and so reduced after each microbatch."""
        return self.implementation is OURS and self.config.parallel.zero > 1

    def _replicated(self, numels: Parameters) -> list[tuple[int, int, Link]]:
        """List (number of parameters, number of owners, link between them): dense, then experts; single owners left out."""
        dense = numels.all - numels.experts, self.sizes.owners("dp"), self.links.of_owners("dp")
        experts = numels.experts, self.sizes.owners("expert_dp"), self.links.of_owners("expert_dp")
        return [each for each in (dense, experts) if each[0] and each[1] > 1]

    def _main_grad_bytes(self) -> int:
        return max(4, element_bytes(self.config))

    def _beyond(self, seconds: float, beside: float, buckets: int, *, hidden: bool) -> float:
        """Compute how many of the collectives' `seconds` are exposed: all, unless `hidden`.

        If `hidden`, all buckets but the first run beside kernels that take `beside` seconds.
        """
        if not hidden:
            return seconds
        first = seconds / buckets
        return first + self.device.beyond(seconds - first, beside)

    def _optimizer(self) -> float:
        """Compute the seconds of the optimizer's update, which memory traffic limits, or the bus if its state is in host memory."""
        rank = max(range(len(self.parameters)), key=lambda rank: self.parameters[rank].all)
        most, sizes = self.parameters[rank], self.sizes
        numel = most.all
        own = float(numel)
        if self.implementation.shards != "none":
            own = (numel - most.experts) / sizes.owners("dp") + most.experts / sizes.owners("expert_dp")
        whole = own if self.implementation.shards == "parameters" else numel
        seconds = self.timer.stream(
            own * self.implementation.optimizer_bytes + whole * self.implementation.every_step_bytes
        )
        if self.config.optimizer.offload == "none":
            return seconds
        state = state_bytes(self.config, sizes, [self.cut.stages[stage] for stage in self.cut.ranks[rank][0]])
        return self.device.streamed_seconds(seconds, state.host, state.optimizer / NUM_PLACES)
