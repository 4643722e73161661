"""Builds the routing rule, dispatch form and load counts that a rank's MoE layers share."""

from dataclasses import dataclass, replace

from triaxis.engine.activations.saved_tensors import TensorObserver, unobserved
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.expert_rows import dispatch_of
from triaxis.engine.config.tree import Config
from triaxis.engine.expert_parallel.balance import ExpertLoad
from triaxis.engine.expert_parallel.dispatch import Dispatch, ExpertGroup
from triaxis.engine.expert_parallel.exchange_dispatch import ExchangeDispatch
from triaxis.engine.expert_parallel.gather_dispatch import GatherDispatch, ReplicatedDispatch
from triaxis.engine.expert_parallel.routing import Router
from triaxis.engine.kernels.fusion import EAGER
from triaxis.engine.kernels.registry import Kernels


@dataclass(frozen=True, slots=True)
class ExpertRegion:
    """Routing, dispatch and load for a rank's MoE layers.

    Attributes:
        cuts_tokens: whether tensor-parallel ranks route different tokens; false in decoding.
    """

    router: Router
    group: ExpertGroup
    dispatch: Dispatch
    load: ExpertLoad
    cuts_tokens: bool

    @classmethod
    def of(
        cls,
        config: Config,
        topology: Topology,
        kernels: Kernels,
        on_kept: TensorObserver = unobserved,
    ) -> "ExpertRegion | None":
        """Build routing, dispatch and load counts for a rank's MoE layers; None without experts.

        `on_kept` receives each index tensor that dispatch keeps for a backward.
        """
        moe = config.model.moe
        if moe is None:
            return None
        load = ExpertLoad(config.model.expert_layers, moe.num_experts, moe.balance.bias_rate, topology.device)
        place = topology.sizes.expert_place(topology.rank)
        group = ExpertGroup(topology.axis("experts"), place, moe, kernels.fusion, load.add_overflow, on_kept)
        dispatch: Dispatch = ExchangeDispatch(group)
        if dispatch_of(config) == "all_gather":
            dispatch = GatherDispatch(group)
        nominal_tokens = config.train.global_batch_size * config.model.seq_length
        router = Router(
            moe,
            config.model.seq_length,
            topology.axis("sample"),
            1.0 / nominal_tokens,
            load.loss_scale,
            kernels.fusion,
            # It was tried with main grads in the accumulation dtype, which the logits have too.
            kernels.choices.weight_grad if config.precision.gradients == "full" else "separate",
        )
        return cls(router, group, dispatch, load, topology.sizes.tp > 1)

    def for_decoding(self) -> "ExpertRegion":
        """Return this region with `ReplicatedDispatch`, uncompiled, for decoding: all ranks have the same tokens."""
        router, group = replace(self.router, fusion=EAGER), replace(self.group, fusion=EAGER)
        return replace(self, router=router, dispatch=ReplicatedDispatch(group), cuts_tokens=False)
