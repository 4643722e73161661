"""Measure the costs that an extension's parts add to a layer.

    cost per layer = (extended, 2 layers - extended, 1 layer) - (plain, 2 layers - plain, 1 layer)

Each of these four costs comes from one microbatch, run on fake tensors on one rank of the tp x cp layout. Subtracting a one-layer
run removes the costs of embedding and head. Subtracting the plain runs removes the costs without the extension. A model with
several kinds of layers runs all its layers instead of two.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.comm.ledger import REPLICA_GRADIENTS
from triaxis.engine.config.activations import OffloadConfig, RecomputeConfig
from triaxis.engine.config.extension import NO_COSTS, OwnCosts
from triaxis.engine.config.layout import ScheduleConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import brief
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.storage.user_module import place_in_user_module
from triaxis.models.predict.terms import tokens_of_microbatch
from triaxis.models.predict.traffic import measured_traffic


class OwnCostsMeter:
    """Measures the extra memory, FLOPs and messages of an extension's layers.

    Each combination of sizes and settings that can change them is measured once.
    """

    def __init__(self) -> None:
        self._known: dict[object, OwnCosts] = {}

    def __call__(self, config: Config, sizes: ParallelSizes) -> OwnCosts:
        """Return a layer's extra costs in this layout, from the extension's own `costs` function or measured.

        `NO_COSTS`: the extension replaces no attention, MLP, norm or block. If a measurement fails, `unknown` in the result says
        why.
        """
        own = config.model.own
        if not own.with_parameters():
            return NO_COSTS
        key = repr(
            [
                *(sizes.tp, sizes.cp, config.parallel.sequence_parallel, config.train.micro_batch_size, config.model),
                *(config.kernels, config.precision, config.data, config.recompute.gathered_inputs),
                config.recompute.gathered_kv,
            ]
        )
        if key not in self._known:
            self._known[key] = (own.costs or _measured)(config, sizes)
        return self._known[key]


def _measured(config: Config, sizes: ParallelSizes) -> OwnCosts:
    most = 2 if len(set(config.model.kinds)) == 1 else config.model.num_layers
    try:
        own, ours = (
            _step(config, sizes, most, is_own=is_own) - _step(config, sizes, 1, is_own=is_own)
            for is_own in (True, False)
        )
    except Exception as error:  # code that needs data may fail on fake tensors: it is reported and stops no run
        place = place_in_user_module(error) or type(error).__name__
        return OwnCosts(unknown=f"{place}: {brief(' '.join(str(error).split()))}")
    kept, flops, sent, calls = (own - ours).tolist()
    tokens, others = tokens_of_microbatch(config), most - 1
    return OwnCosts(
        kept=Fraction(kept, tokens * others),
        weights=round(flops * sizes.tp / (6 * tokens * others)),
        sent=Fraction(sent, tokens * others),
        calls=round(calls / others),
    )


def _step(config: Config, sizes: ParallelSizes, num_layers: int, *, is_own: bool) -> NDArray[np.int64]:
    """Run forward and backward of one microbatch on the first rank, and count their costs.

    Args:
        is_own: whether to use the extension's parts, not built-in ones.

    Returns:
        int64 [4]: bytes kept for the backward, FLOPs, bytes sent over tp, and calls over tp. Gradient sums for parameters that
            several tp ranks hold are left out.
    """
    # Imported here: few runs have parts to measure.
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from triaxis.launch.footprint.run import Footprints, looking_at, microbatches
    from triaxis.models.gpt.chunk import build_chunks

    # The head cancels in the difference, and its loss takes many operators.
    model = config.model.model_copy(update={"num_layers": num_layers, "mtp": None, "vocab_size": 8 * sizes.tp})
    parallel = config.parallel.model_copy(
        update={"pp": 1, "vpp": 1, "dp": 1, "dp_replicas": 1, "ep": 1, "etp": 1, "layers_per_stage": None}
    )
    recompute = RecomputeConfig(
        gathered_inputs=config.recompute.gathered_inputs, gathered_kv=config.recompute.gathered_kv
    )
    small = config.model_copy(
        update={
            "model": model if is_own else model.model_copy(update={"extension": None}),
            "parallel": parallel,
            "train": config.train.model_copy(update={"global_batch_size": config.train.micro_batch_size}),
            "schedule": ScheduleConfig(),
            "recompute": recompute,
            "offload": OffloadConfig(),
            "optimizer": config.optimizer.model_copy(update={"name": "adamw", "groups": []}),
        }
    )
    footprints = Footprints(small, build_chunks)
    with (
        footprints.watched_engine(footprints.config, 0) as (engine, watch),
        FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _product_flops}) as counter,
        looking_at(engine, watch),
    ):
        engine.forward_backward(microbatches(engine))
    flows = measured_traffic(event for event in engine.topology.ledger.events if event.phase == "post")
    sent = [volume for flow, volume in flows.items() if flow.axis == "tp" and flow.purpose != REPLICA_GRADIENTS]
    kept = sum(saved.num_bytes for saved in watch.saved)
    messages = sum(volume.wire_bytes for volume in sent), sum(volume.calls for volume in sent)
    return np.array([kept, counter.get_total_flops(), *messages])


def _product_flops(total: Sequence[int], left: Sequence[int], right: Sequence[int], **_: object) -> int:
    """Count the FLOPs of total += left @ right from the shapes."""
    return 2 * left[0] * left[1] * right[1]
