"""The state that a rank keeps of its parameters between steps: a row for each kind.

    kind        stored as                                                       cut over the owners by ZeRO
    weight      the run's dtype; the accumulation dtype, changed by a rule      3
    main_grad   the accumulation dtype, or the run's (`precision.gradients`)    2, 3
    master      the accumulation dtype, or 16 more bits (`precision.masters`)   1, 2, 3
    moments     the accumulation dtype, or the run's (`precision.moments`)      1, 2, 3
    ema         the accumulation dtype                                          1, 2, 3

Flat buffers and the optimizer allocate these rows, and predictions count them. A parameter that is wide enough is its own master,
and so is one that no update changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from triaxis.engine.config.schema.training import PrecisionConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.optimizer_kinds import EMA, MASTER, StateKind
from triaxis.engine.layout.param_layout import BufferKey, BufferLayout, layout_parameters
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.layout.shard_spec import ParamRecord

StoredDtype = Literal["int16", "bf16", "fp16", "fp32", "float64"]

ITEMSIZE: Mapping[StoredDtype, int] = MappingProxyType({"int16": 2, "bf16": 2, "fp16": 2, "fp32": 4, "float64": 8})
"""Bytes of an element."""

WEIGHT = "weight"
MAIN_GRAD = "main_grad"

PIECE_NUMEL = 2**23
"""Most elements of a piece of the optimizer's state in host memory: 100 MB of AdamW's."""

NUM_PLACES = 3
"""Pieces of that state on the device: one arrives, one is updated, one departs."""


@dataclass(frozen=True, slots=True)
class StateRow:
    """One kind of state of a buffer's parameters.

    Attributes:
        kind: `weight`, `main_grad`, or a kind of the optimizer's state.
        is_cut: whether a rank keeps only the part that it owns.
        has_slots: whether a rank also has the buffer's slots, whole buckets in which the kind is computed.
    """

    kind: StateKind
    dtype: StoredDtype
    is_cut: bool = True
    has_slots: bool = False

    def numel(self, layout: BufferLayout, owners: int) -> int:
        """Count a rank's elements; `owners` ranks share the buffer."""
        kept = layout.numel // owners if self.is_cut else layout.numel
        return kept + (sum(layout.slot_numels()) if self.has_slots else 0)

    def nbytes(self, layout: BufferLayout, owners: int) -> int:
        """Count a rank's bytes; `owners` ranks share the buffer."""
        return self.numel(layout, owners) * ITEMSIZE[self.dtype]


def wide_dtype(dtype: StoredDtype) -> StoredDtype:
    """Return the accumulation dtype: at least fp32."""
    return dtype if ITEMSIZE[dtype] > ITEMSIZE["fp32"] else "fp32"


def main_grad_dtype(precision: PrecisionConfig) -> StoredDtype:
    """Return the dtype of gradient sums and reductions."""
    return wide_dtype(precision.dtype) if precision.gradients == "full" else precision.dtype


def layout_of(config: Config, sizes: ParallelSizes, records: Sequence[ParamRecord]) -> tuple[BufferLayout, ...]:
    """Lay out one rank's parameters, `records` in forward order, in the buffers of a run."""
    return layout_parameters(
        records,
        dp=sizes.owners("dp"),
        expert_dp=sizes.owners("expert_dp"),
        bucket_numel=config.optimizer.bucket_bytes // ITEMSIZE[main_grad_dtype(config.precision)],
        zero=config.parallel.zero,
    )


def state_rows(
    key: BufferKey, precision: PrecisionConfig, kinds: Sequence[StateKind] = ()
) -> dict[StateKind, StateRow]:
    """List what a rank keeps of a buffer, by kind.

    Args:
        key: key of the buffer.
        kinds: kinds of the optimizer's state, the master first; empty: weights and main grads alone.
    """
    run, wide = precision.dtype, wide_dtype(precision.dtype)
    has_cut_weights = key.cut == "parameters"
    # Untrained values are changed in small steps by a rule of their own. They have no wide master, so they are wide.
    weight = StateRow(WEIGHT, run if key.is_trained else wide, has_cut_weights, has_slots=has_cut_weights)
    rows = [weight]
    if key.is_trained:
        is_cut = key.cut != "state"
        rows.append(StateRow(MAIN_GRAD, main_grad_dtype(precision), is_cut, has_slots=is_cut))
    if key.is_updated:
        stored: dict[StateKind, StoredDtype] = {
            MASTER: "int16" if precision.masters == "split" and run != wide else wide,
            EMA: wide,
        }
        moment = run if precision.moments == "bf16" else wide
        each = [StateRow(kind, stored.get(kind, moment)) for kind in kinds]
        rows += [row for row in each if row.kind != MASTER or row.dtype != weight.dtype]
    return {row.kind: row for row in rows}
