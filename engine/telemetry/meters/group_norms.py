"""Measures gradient, weight and update norms per parameter group, every K steps.

    before the update   sums squares over the owned gradients and master weights, by group, and copies the master weights
    after the update    sums squares over the master weights' changes; one all-reduce [3 x groups] over the world
    read                the sums reach the host together with the step's other numbers

Each element counts once over the world, because only a parameter's first replica counts. A group's gradient norm is the global
norm times the square root of the group's share in the sum of squares. So the group's norm depends neither on the loss scale nor on
the token count. In a measured step, the copy needs as many bytes as the master weights.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.config.quantities.update_settings import group_of
from triaxis.engine.config.schema.groups import GroupFields
from triaxis.engine.config.values.optimizer_kinds import MASTER
from triaxis.engine.device.host_copy import HostCopy
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE
from triaxis.engine.optimizer.distributed import DistributedOptimizer, OwnedBucket, square_sum
from triaxis.engine.step import Engine
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.meters.step_meter import StepMeter
from triaxis.engine.telemetry.record.metrics import Measured

PURPOSE = "norms"

OTHERS = "others"
"""Name for the trained parameters that are in no group."""


class GroupNorms(StepMeter):
    """Meter for the record's `norms` field, which holds each group's gradient, weight and update norms.

    Gradients are measured before clipping, weights before the update. In charts under learning/norms/, `relative_update` is the
    update's norm over the weights' norm. If gradients are not finite, gradient norms are nan and the update is 0.

    Args:
        optimizer: optimizer that owns the gradients and master weights.
        world: axis over all ranks.
        groups: configured parameter groups; frozen ones have no norms.
        interval: K, the distance in steps between two measured steps.
    """

    def __init__(
        self, optimizer: DistributedOptimizer, world: Axis, groups: Sequence[GroupFields], interval: int
    ) -> None:
        trained = [number for number, group in enumerate(groups) if not group.get("freeze")]
        self._names = (*(groups[number]["match"] for number in trained), OTHERS)
        places = {number: place for place, number in enumerate(trained)}
        self._world, self._interval = world, interval
        self._counted = [owned for owned in optimizer.trained if owned.buffer.is_first]
        self._parts = [list(_parts(owned, groups, places)) for owned in self._counted]
        self._device = optimizer.buffers.device
        self._step = 0
        self._before: tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]] | None = None
        self._posted: dict[int, HostCopy] = {}

    @classmethod
    def of(cls, engine: Engine) -> "GroupNorms | None":
        """Build the meter. None if `telemetry.norms_interval` is not set."""
        interval = engine.config.telemetry.norms_interval
        if interval is None:
            return None
        return cls(engine.optimizer, engine.topology.axis("world"), engine.config.optimizer.groups, interval)

    def begin(self, steps_made: int) -> None:
        """Start measuring with `steps_made` steps complete. Sums not read yet are dropped."""
        self._step, self._before = steps_made, None
        self._posted.clear()

    def before_update(self) -> None:
        """Sum squares of gradients and master weights, and copy the master weights, in every `interval`-th step."""
        if (self._step + 1) % self._interval:
            return
        masters = [owned.state.read(MASTER).clone() for owned in self._counted]
        grads = [owned.grads.to(owned.state.wide) for owned in self._counted]
        self._before = self._sums(grads), self._sums(masters), masters

    def after_update(self) -> None:
        """Sum squares of the master weights' changes over all ranks, in a measured step."""
        if self._before is not None:
            grads, weights, masters = self._before
            changes = [owned.state.read(MASTER) - was for owned, was in zip(self._counted, masters, strict=True)]
            vector = torch.cat((grads, weights, self._sums(changes)))
            self._posted[self._step] = HostCopy(self._world.all_reduce(vector, PURPOSE).wait())
            self._before = None
        self._step += 1

    def read(self, step: int, result: StepResult) -> Measured | None:
        """Read the norms in step `step`, counted from 0, by group. None if the step was not measured."""
        if step not in self._posted:
            return None
        sums = self._posted.pop(step).wait()
        count = len(self._names)
        grads, weights, updates = sums[:count], sums[count : 2 * count], sums[2 * count :]
        total = sum(grads)
        shares = [grad / total if math.isfinite(total) else math.nan for grad in grads] if total else grads
        fields: dict[str, dict[str, float]] = {}
        charts: dict[str, float] = {}
        for name, share, *squares in zip(self._names, shares, weights, updates, strict=True):
            weight, update = map(math.sqrt, squares)
            fields[name] = {"grad": result.grad_norm * math.sqrt(share), "weight": weight, "update": update}
            relative = {"relative_update": update / weight if weight else math.nan}
            charts |= {f"learning/norms/{name}/{kind}": norm for kind, norm in (fields[name] | relative).items()}
        return Measured({"norms": fields}, charts)

    def _sums(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute each group's sum of squares, [groups]. `tensors`: one per trained bucket whose first replica is on this rank."""
        sums = torch.zeros(len(self._names), dtype=AGREEMENT_DTYPE, device=self._device)
        for tensor, parts in zip(tensors, self._parts, strict=True):
            for where, place in parts:
                sums[place] += square_sum([tensor[where]])
        return sums


def _parts(owned: OwnedBucket, groups: Sequence[GroupFields], places: Mapping[int, int]) -> Sequence[tuple[slice, int]]:
    """Split a bucket's owned elements by group into (slice, index). Adjacent segments of one group are merged.

    `places` maps configured groups' numbers to indices; other elements get `len(places)`.
    """
    parts: list[tuple[slice, int]] = []
    for segment in owned.segments:
        number = group_of(segment.record.spec.name, groups)
        place = len(places) if number is None else places[number]
        start = segment.offset - owned.bucket.owned[0]
        stop = start + segment.stop - segment.start
        if parts and (parts[-1][0].stop, parts[-1][1]) == (start, place):
            start = parts.pop()[0].start
        parts.append((slice(start, stop), place))
    return parts
