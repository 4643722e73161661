"""Time pipeline stages and count their parameters; equal stages are computed once.

Layouts that differ only in pp, vpp, dp or the cut between stages have equally fast layers. A search over such layouts uses one
`StageTimer` for all of them.
"""

from collections import Counter
from dataclasses import dataclass

from triaxis.engine.config.tree import Config
from triaxis.engine.data.document_statistics import DocumentStatistics
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.cut import Contents, layer_sorts
from triaxis.models.predict.device import Device
from triaxis.models.predict.step_time.facts import (
    Parameters,
    head_gemm,
    layer_work,
    parameters_of_ends,
    parameters_of_layer,
)
from triaxis.models.predict.step_time.implementation import Implementation
from triaxis.models.predict.step_time.layer import LayerTimer, Seconds
from triaxis.models.predict.step_time.links import Links
from triaxis.models.predict.terms import recomputed_layers


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one or several stages on a rank. Layouts share an instance, so callers must not change it.

    Attributes:
        seconds: seconds by pass and component.
        passes: seconds of forward, input gradient and weight gradient, each summed over all components.
        parameters: numbers of the stages' parameters on the rank.
    """

    seconds: Seconds
    passes: tuple[float, float, float]
    parameters: Parameters

    @property
    def total(self) -> float:
        return sum(self.passes)

    @classmethod
    def of(cls, seconds: Seconds, parameters: Parameters) -> "Timed":
        forward, input_grad, weight_grad = (sum(part.values()) for part in seconds.passes)
        return cls(seconds, (forward, input_grad, weight_grad), parameters)


def timer_key(config: Config, sizes: ParallelSizes) -> tuple[object, ...]:
    """Build a key of all settings on which stage times depend, except layers; layouts with equal keys share a timer."""
    parallel, micro = config.parallel, config.train.micro_batch_size
    defers, recompute = config.schedule.defers_weight_gradients, config.recompute.model_dump_json()
    ranks = sizes.tp, sizes.cp, sizes.ep, sizes.etp
    return "timer", *ranks, parallel.sequence_parallel, micro, defers, recompute, config.model.own_costs


class StageTimer:
    """Timer for stages that are given as `Contents`; it leaves out what depends on pp and dp, such as gradient reduction."""

    def __init__(
        self,
        config: Config,
        sizes: ParallelSizes,
        device: Device,
        links: Links,
        implementation: Implementation,
        documents: DocumentStatistics | None,
        expert_load: float,
    ) -> None:
        self.layer_timer = LayerTimer(config, sizes, device, links, implementation)
        self._config, self._sizes = config, sizes
        self._implementation, self._documents, self._expert_load = implementation, documents, expert_load
        # The order matches the sort numbers in `Contents`.
        sorts = layer_sorts(config)
        self._sorts = list(dict.fromkeys(sorts))
        self._of_sort = [sorts.index(sort) for sort in self._sorts]
        self._layers: dict[tuple[int, bool], Seconds] = {}
        self._stages: dict[Contents, Timed] = {}
        self._ranks: dict[tuple[Contents, ...], Timed] = {}
        self._in_layer: dict[int, Parameters] = {}
        self._in_ends: dict[tuple[bool, bool], Parameters] = {}

    def stage(self, contents: Contents) -> Timed:
        """Time a stage with these contents."""
        if contents not in self._stages:
            self._stages[contents] = Timed.of(self._time(contents), self._parameters_of(contents))
        return self._stages[contents]

    def rank(self, contents: tuple[Contents, ...]) -> Timed:
        """Time one pipeline rank's stages."""
        if contents not in self._ranks:
            seconds, each = Seconds(), [self.stage(one) for one in contents]
            for one in each:
                seconds.add(one.seconds)
            self._ranks[contents] = Timed.of(seconds, sum((one.parameters for one in each), Parameters()))
        return self._ranks[contents]

    def _parameters_of(self, contents: Contents) -> Parameters:
        ends = contents.has_embedding, contents.has_head
        if ends not in self._in_ends:
            self._in_ends[ends] = parameters_of_ends(self._config, self._sizes, contents.as_stage())
        total = self._in_ends[ends]
        for sort, count in Counter(contents.layers).items():
            if sort not in self._in_layer:
                self._in_layer[sort] = parameters_of_layer(self._config, self._sizes, self._of_sort[sort])
            total += self._in_layer[sort].times(count)
        return total

    def _time(self, contents: Contents) -> Seconds:
        seconds = Seconds()
        # Fully recomputed layers come first.
        again = recomputed_layers(self._config, contents.as_stage())
        counts = Counter((sort, place < again) for place, sort in enumerate(contents.layers))
        for (sort, recomputed), count in counts.items():
            if (sort, recomputed) not in self._layers:
                layer = self._of_sort[sort]
                work = layer_work(
                    self._config, self._sizes, self._implementation, layer, self._documents, self._expert_load
                )
                self._layers[sort, recomputed] = self.layer_timer.layer(work, recomputed=recomputed)
            seconds.add(self._layers[sort, recomputed], count)
        ahead = contents.num_mtp
        if contents.has_embedding or ahead:
            seconds.add(self.layer_timer.embedding(), contents.has_embedding + ahead)
        if contents.has_head:
            seconds.add(self.layer_timer.head(head_gemm(self._config, self._sizes)), 1 + ahead)
        return seconds
