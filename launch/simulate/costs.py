"""Costs of the actions of a run, from its config (no torch here).

    F   GEMMs + attention of the stage's layers, and the head on the last stage
    I   the same GEMMs, attention twice, what is recomputed; the head twice, since its weight gradient does not wait
    W   the GEMMs of the layers

A cost model is a function of (config, sizes): `flops_costs` counts in forwards of a mean layer, and another may count in seconds.
Documents make microbatches unequal: their FLOPs over those across documents scale whatever the cost model gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

from triaxis.engine.config.plan import stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.data.document_statistics import DocumentStatistics, measure_documents
from triaxis.engine.data.samples import SampleSource
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.pipeline.simulate import Costs
from triaxis.engine.telemetry.record.flops import head_flops, layer_flops
from triaxis.models.predict.frozen_flops import trained_layers
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.trained_part import head_is_frozen

CostModel = Callable[[Config, ParallelSizes], Costs]
"""Costs of each stage for one microbatch."""

UNIT = "forwards of a mean layer (by FLOPs)"
"""Of `flops_costs`."""


def flops_costs(config: Config, sizes: ParallelSizes, documents: DocumentStatistics | None = None) -> Costs:
    """Count the FLOPs of each stage's actions, in forwards of a mean layer without documents; transfers take nothing.

    Args:
        config: with any recomputation.
        sizes: all axes; tp and cp divide all stages alike.
        documents: within which tokens attend; None: across them.

    Raises:
        ConfigError: as `resolve_recompute`.
    """
    model, recompute, stages = config.model, resolve_recompute(config, sizes).recompute, stages_of(config)
    layers_per_chunk = [len(stage.layers) for stage in stages]
    layers = trained_layers(config, recompute, documents)
    usual = layer_flops(model, recompute, layers_per_chunk)
    unit = sum(layer.gemms + layer.attention for layer in usual) / len(usual)
    forward, input_grad, weight_grad = [], [], []
    for stage in stages:
        own, goes_back = [layers[number] for number in stage.layers], 1 - head_is_frozen(config)
        head = head_flops(model) * (stage.has_head + stage.num_mtp)
        head_again = head if recompute.head_tokens is not None else 0
        forward.append((sum(layer.forward for layer in own) + head) / unit)
        # The head's weight gradient is computed at once, with that of its input.
        input_grad.append((sum(layer.input_grad for layer in own) + (1 + goes_back) * head + head_again) / unit)
        weight_grad.append(sum(layer.weight_grad for layer in own) / unit)
    return Costs(forward, input_grad, weight_grad)


def document_statistics(config: Config, sizes: ParallelSizes, source: SampleSource) -> DocumentStatistics:
    """Look at the documents of the first steps of a run.

    Raises:
        DataError: the index of the corpus cannot be read.
    """
    return measure_documents(
        source,
        seq_length=config.model.seq_length,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        dp=sizes.dp,
    )


@dataclass(frozen=True)
class DocumentDraws:
    """A maker of steps whose microbatches have the documents of samples that are drawn at random, with replacement.

    Attributes:
        config, sizes: of the run.
        documents: of its first steps.
        costs: of a microbatch whose tokens attend across documents, from any cost model.
        seed: of the draws.
    """

    config: Config
    sizes: ParallelSizes
    documents: DocumentStatistics
    costs: Costs
    seed: int

    @cached_property
    def _resolved(self) -> Config:
        # A choice by memory takes a while, and there is a microbatch for each of many samples.
        return resolve_recompute(self.config, self.sizes)

    @cached_property
    def _whole(self) -> Costs:
        return flops_costs(self._resolved, self.sizes)

    @property
    def mean(self) -> Costs:
        """Return the costs of a microbatch with the mean of all documents."""
        return self._of(self.documents)

    def draw(self, num_steps: int, num_microbatches: int) -> list[list[Costs]]:
        """Return the costs of each microbatch of each step."""
        rows, random = self.documents.rows(), Random(self.seed)
        size = self.config.train.micro_batch_size
        # Consecutive samples: those of a microbatch are neighbours in the order of training.
        costs = [self._of_rows(rows[first : first + size]) for first in range(0, len(rows) - size + 1, size)]
        return [random.choices(costs, k=num_microbatches) for _ in range(num_steps)]

    def _of_rows(self, rows: Sequence[tuple[int, ...]]) -> Costs:
        lengths = tuple(length for row in rows for length in row)
        return self._of(DocumentStatistics(self.documents.seq_length, ((lengths,),)))

    def _of(self, documents: DocumentStatistics) -> Costs:
        own, whole = flops_costs(self._resolved, self.sizes, documents), self._whole
        return replace(
            self.costs,
            forward=_scaled(self.costs.forward, own.forward, whole.forward),
            input_grad=_scaled(self.costs.input_grad, own.input_grad, whole.input_grad),
            weight_grad=_scaled(self.costs.weight_grad, own.weight_grad, whole.weight_grad),
        )


def _scaled(costs: Sequence[float], own: Sequence[float], whole: Sequence[float]) -> list[float]:
    return [cost * mine / all_ if all_ else cost for cost, mine, all_ in zip(costs, own, whole, strict=True)]
