"""The optimizer with its state sharded over data-parallel ranks (ZeRO-1, 1910.02054 section 5.1).

Each data-parallel rank owns an equal part of every bucket (`param_layout.py`), with its master weights and moments. Their stored
forms are in `state.py`, the optimizers in `engine/config/values/optimizer_kinds.py` and `updates.py`.

A step scales the owned gradients (loss scale and clipping), then updates the masters in the accumulation dtype and their moving
average. Afterwards it rounds the masters into the parameters and all-gathers the buckets. There are three kernels
(`kernels.optimizer`):

    torch      torch's fused operator; scaling the gradients and converting narrow state take separate passes.
    compiled   `_update`, which does everything in one pass over a range of a bucket, even with several update rules
               (`stretches.py`). An extension's rule always uses `_update`; with `torch`, `_update` is not compiled.
    apex       FusedAdam's kernel, in one launch for all elements with the same `UpdateRule` (`apex_update.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch

from triaxis.engine.config.quantities.state_plan import state_rows
from triaxis.engine.config.quantities.update_settings import update_rule
from triaxis.engine.config.schema.extension_parts import UpdatePart
from triaxis.engine.config.schema.training import OptimizerConfig, PrecisionConfig
from triaxis.engine.config.values.optimizer_kinds import MASTER, state_kinds
from triaxis.engine.device.host_copy import to_device
from triaxis.engine.kernels.apex import Apex
from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.layout.param_layout import Segment
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE, STEP_DTYPE, accumulation_dtype
from triaxis.engine.optimizer.apex_update import update_by_apex
from triaxis.engine.optimizer.bucket import Bucket
from triaxis.engine.optimizer.grad_buffer import FlatBuffer, GradBuffers
from triaxis.engine.optimizer.host_state import InHostMemory
from triaxis.engine.optimizer.pieces import Launch, OnDevice, Piece
from triaxis.engine.optimizer.state import OptimizerState, read_master, write_master
from triaxis.engine.optimizer.stretches import Run, stretches
from triaxis.engine.optimizer.updates import UPDATES, Update

DOT_NUMEL: Mapping[str, int] = MappingProxyType({"cpu": 2**16, "cuda": 2**30})
"""Largest number of elements in one `torch.dot`, by device. A CPU's BLAS adds up each lane sequentially: in fp32, four times as
many would be 2e-6 off. cuBLAS takes a 32-bit count; a bucket may be longer, since it holds at least one whole parameter."""


@dataclass
class OwnedBucket:
    """One bucket's optimizer state on its owner; all tensors are flat, [owned elements]."""

    buffer: FlatBuffer
    bucket: Bucket
    state: OptimizerState
    segments: tuple[Segment, ...]

    @property
    def grads(self) -> torch.Tensor:
        return self.bucket.owned_grads

    @property
    def parameters(self) -> torch.Tensor:
        return self.bucket.owned_weights

    def runs(self, config: OptimizerConfig) -> Sequence[Run]:
        """List the owned parameter elements as (slice, update rule), in as few runs as possible."""
        runs: list[Run] = []
        for segment in self.segments:
            start, spec = segment.offset - self.bucket.owned[0], segment.record.spec
            stop, rule = start + segment.stop - segment.start, update_rule(spec.name, config, decays=spec.decay)
            # A segment that continues the last run under the same rule extends it.
            if runs and (runs[-1][0].stop, runs[-1][1]) == (start, rule):
                start = runs.pop()[0].start
            runs.append((slice(start, stop), rule))
        return runs


class DistributedOptimizer:
    """The configured optimizer, applied to the owned parts of the flat buffers.

    Buckets are cut into equal parts at any element, because whole parameters would give owners unequal work and memory. Updates are
    element-wise (`Update`), so a cut through a matrix changes no bit. Only the owner rounds a master; the other data-parallel ranks
    receive its bits, so they cannot drift apart. A bool on the device decides whether a step is skipped. The host posts the same
    kernels and gathers in every step, and waits for none.

    Args:
        buffers: parameters and main grads. The parameters must hold their initial values: masters start from them.
        config: hyperparameters.
        precision: stored forms for masters and moments.
        is_compiled, apex: choice of the kernel `compiled` or `apex` (see the module); `torch` if neither is given.
        own: an extension's rule, which runs only through `_update`, compiled or not.

    Attributes:
        owned, trained: all owned buckets, and the ones that updates change.
        resident: all trained buckets, cut into pieces. A piece's state is on the device while its update runs.
        state_kinds: the master, this optimizer's moments, and the average if there is one.
        wide: the parameters' accumulation dtype, in which an update is computed.
    """

    def __init__(
        self,
        buffers: GradBuffers,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        is_compiled: bool = False,
        apex: Apex | None = None,
        own: type[UpdatePart] | None = None,
    ) -> None:
        self.buffers = buffers
        self.config = config
        is_offloaded = config.offload == "cpu"
        self.state_kinds = state_kinds(config.name, () if own is None else own.moments, has_ema=config.ema is not None)
        self._arithmetic: type[Update] | type[UpdatePart] = UPDATES[config.name] if own is None else own
        self.fusion = Fusion("compiled" if is_compiled else "eager")
        self._apex = apex
        # Taken from the buffers: a pipeline stage without layers owns no bucket to take it from.
        self.wide = accumulation_dtype(buffers.dtype)
        self._num_updates = torch.zeros((), dtype=STEP_DTYPE, device=buffers.device)
        self.owned: list[OwnedBucket] = []
        for buffer in buffers.buffers:
            segments = list(buffer.layout.segments(buffer.reduce_axis.size, buffer.reduce_axis.index))
            for bucket in buffer.buckets:
                start, stop = bucket.owned
                self.owned.append(
                    OwnedBucket(
                        buffer=buffer,
                        bucket=bucket,
                        # A master for every parameter, even if nothing is updated: checkpoints are written from masters.
                        state=OptimizerState.initial(
                            bucket.owned_weights,
                            self.state_kinds if buffer.is_updated else (MASTER,),
                            state_rows(buffer.layout.key, precision, self.state_kinds),
                            partial(InHostMemory.allocate, device=buffers.device) if is_offloaded else None,
                        ),
                        segments=tuple(segment for segment in segments if start <= segment.offset < stop),
                    )
                )
        self.trained = [owned for owned in self.owned if owned.buffer.is_updated]
        runs_of = [owned.runs(config) for owned in self.trained]
        rules = list(dict.fromkeys(rule for runs in runs_of for _, rule in runs))
        self._numbers = {rule: number for number, rule in enumerate(rules)}
        # Copied to the device once: a copy in each step would make the host wait for the backward.
        self._lr_factors = to_device([rule.lr_factor for rule in rules], AGREEMENT_DTYPE, buffers.device)
        self._decays = to_device([rule.weight_decay for rule in rules], AGREEMENT_DTYPE, buffers.device)
        self._table = torch.empty(len(rules), self._num_columns(), dtype=self.wide, device=buffers.device)
        self._is_elementwise = is_compiled or own is not None
        self.resident: OnDevice | InHostMemory
        if is_offloaded:
            self.resident = InHostMemory(self.trained, runs_of, self._launches, buffers.device)
        else:
            self.resident = OnDevice(self.trained, runs_of, self._launches)

    def grad_square_sum(self) -> torch.Tensor:
        """Sum the squares of the owned gradients into a scalar; each model element counts once over the world.

        Only the first replica counts; padding has gradient zero.
        """
        # Replicas hold equal gradients after `GradBuffers.finish`; if each copy counted, they would outweigh cut parameters.
        counted = [owned.grads.to(self.wide) for owned in self.trained if owned.buffer.is_first]
        return square_sum(counted) if counted else torch.zeros((), dtype=self.wide, device=self.buffers.device)

    @property
    def num_updates(self) -> int:
        """Number of updates so far, without skipped steps; on a GPU the host waits to read it."""
        return int(self._num_updates)

    def step(self, lr: float, grad_scale: torch.Tensor, skip: torch.Tensor) -> None:
        """Update with gradients x `grad_scale`, then post the all-gathers for the new parameters.

        Args:
            lr: learning rate, before each rule's factor.
            grad_scale: a scalar on the device.
            skip: a bool on the device; True leaves masters, moments, average and parameters unchanged.
        """
        # A factor that is not finite would turn padding's zero gradient into nan, and nothing rewrites padding.
        grad_scale = grad_scale.to(self.wide).masked_fill(skip, 1.0)
        # A stage without layers has no rules.
        if self._is_elementwise and self._numbers:
            self._write_table(lr, grad_scale, skip)
        for pieces in self.resident:
            if self._is_elementwise:
                for piece in pieces:
                    for launch in piece.launches:
                        launch()
            elif self._apex is not None:
                update_by_apex(self._apex, pieces, self.config, lr, grad_scale, self._num_updates, skip)
            else:
                self._update_by_torch(pieces, lr, grad_scale, skip)
        # After the kernels, whose bias correction counts this update already. A skipped step is not an update.
        self._num_updates += skip.logical_not()
        # Posted in a skipped step too: the host does not see the skip, and all ranks must post the same calls.
        self.buffers.gather()

    def restored(self, num_updates: int) -> None:
        """Finish loading a state: all-gather the owned parameters, already rounded from the loaded masters.

        Args:
            num_updates: number of updates in the loaded moments (Adam's bias correction).
        """
        self._num_updates.fill_(num_updates)
        self.buffers.gather(untrained=True)
        self.buffers.wait_all()

    def _update_by_torch(
        self, pieces: Sequence[Piece], lr: float, grad_scale: torch.Tensor, skip: torch.Tensor
    ) -> None:
        skipped = skip.to(STEP_DTYPE)
        for piece in pieces:
            # Wide gradients are scaled in place, so after a step the main grads are what the update used.
            grads = piece.grads.to(piece.state.wide)
            grads.mul_(grad_scale)
            # A wide kind is the stored tensor itself, updated in place; a narrow one is a wide copy that `write` stores.
            state = {kind: piece.state.read(kind) for kind in self.state_kinds}
            # The operator takes one learning rate and one decay for all its tensors, so each rule needs its own call.
            for rule in dict.fromkeys(rule for _, rule in piece.runs):
                own = [where for where, others in piece.runs if others == rule]
                UPDATES[self.config.name].by_torch(
                    {kind: [values[where] for where in own] for kind, values in state.items()},
                    [grads[where] for where in own],
                    self.config,
                    lr * rule.lr_factor,
                    rule.weight_decay,
                    self._num_updates,
                    skipped,
                )
            if self.config.ema is not None:
                piece.state.update_average(state[MASTER], self.config.ema.decay, skip)
            piece.state.write(state)

    def _num_columns(self) -> int:
        """Count the numbers in a row of the table."""
        one = torch.ones((), dtype=AGREEMENT_DTYPE)
        return len(self._arithmetic.factors(self.config, one, one)) + len(("decay", "grad_scale", "skip"))

    def _write_table(self, lr: float, grad_scale: torch.Tensor, skip: torch.Tensor) -> None:
        """Write the step's numbers where the launches read them."""
        # A scalar on the device: a Python number would be compiled into the kernel.
        rates = torch.full((), lr, dtype=AGREEMENT_DTYPE, device=self.buffers.device)
        self.fusion(_write_table)(
            self._table,
            rates,
            self._lr_factors,
            self._decays,
            self._num_updates,
            grad_scale,
            skip,
            self._arithmetic,
            self.config,
        )

    def _launches(self, state: OptimizerState, grads: torch.Tensor, runs: Sequence[Run]) -> list[Launch]:
        """Bind one `_update` for each stretch of a piece, since its tensors keep their memory."""
        if not self._is_elementwise:
            return []
        launches = []
        for stretch in stretches(runs, self._numbers, self.buffers.device):
            parameters, kept, moments, average = state.part(stretch.where)
            launches.append(
                self.fusion.bind(
                    _update,
                    stretch.blocks(parameters),
                    None if kept is None else stretch.blocks(kept),
                    [stretch.blocks(moment) for moment in moments],
                    None if average is None else stretch.blocks(average),
                    stretch.blocks(grads[stretch.where]),
                    self._table,
                    stretch.rules,
                    self._arithmetic,
                    self.config,
                    lengths="all",
                )
            )
        return launches


def clip_factor(norm: torch.Tensor, max_norm: float | None) -> torch.Tensor | None:
    """Compute the factor that limits the global gradient norm to `max_norm`; None if there is no limit.

    `norm` and the factor are scalars on the device. The 1e-6 in the denominator is the field's convention
    (torch.nn.utils.clip_grad_norm_, Megatron-LM).
    """
    return None if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)


def square_sum(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the squares of vectors [n], however long, into a scalar with their dtype and device. At least one vector."""
    # A dot product stores no squares. (On a CPU, vector_norm adds elements sequentially and is 1e-3 off at 1.5e7 elements.)
    most = DOT_NUMEL[vectors[0].device.type]
    pieces = [piece for vector in vectors for piece in (vector.split(most) if len(vector) > most else [vector])]
    return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum()


def _write_table(
    table: torch.Tensor,
    lr: torch.Tensor,
    lr_factors: torch.Tensor,
    decays: torch.Tensor,
    num_updates: torch.Tensor,
    grad_scale: torch.Tensor,
    skip: torch.Tensor,
    arithmetic: type[Update] | type[UpdatePart],
    config: OptimizerConfig,
) -> None:
    """Write a row for each rule: the values of `Update.factors`, weight decay, gradients' scale, and 1 for a skipped step."""
    factors = arithmetic.factors(config, lr * lr_factors, num_updates.to(AGREEMENT_DTYPE) + 1)
    columns = [*factors, decays, grad_scale, skip]
    table.copy_(torch.stack([column.to(AGREEMENT_DTYPE).expand_as(decays) for column in columns], dim=1))


def _update(
    parameters: torch.Tensor,
    kept: torch.Tensor | None,
    kept_moments: Sequence[torch.Tensor],
    average: torch.Tensor | None,
    grads: torch.Tensor,
    table: torch.Tensor,
    rules: torch.Tensor,
    arithmetic: type[Update] | type[UpdatePart],
    config: OptimizerConfig,
) -> None:
    """Update tensors [blocks, n] in place, in their stored forms; nothing changes in a skipped step.

    `kept` are the masters, or a split master's remainders; None: the parameters are the masters. Each block takes its rule's row of
    the table (`_write_table`); `rules` are the blocks' rule numbers, int32 [blocks].
    """
    wide = table.dtype
    kept = parameters if kept is None else kept
    *factors, weight_decay, grad_scale, skipped = table.index_select(0, rules).split(1, dim=1)
    skip = skipped != 0
    master, moments = read_master(parameters, kept), [moment.to(wide) for moment in kept_moments]
    grad = grads.to(wide) * grad_scale
    new, new_moments = arithmetic.elementwise(master, moments, grad, factors, config, weight_decay)
    # `where`, not a zero factor: gradients that are not finite make new values nan, and nan x 0 is nan.
    for kept_moment, moment, new_moment in zip(kept_moments, moments, new_moments, strict=True):
        kept_moment.copy_(torch.where(skip, moment, new_moment))
    if average is not None and config.ema is not None:
        average.copy_(torch.where(skip, average, average + (new - average) * (1 - config.ema.decay)))
    write_master(parameters, kept, torch.where(skip, master, new))
