"""A GPT cut into chunks, each the layers of one pipeline stage.

    first stage    tokens -> embedding ->  layers ...                      -> hidden
    middle         hidden              ->  layers ...                      -> hidden
    last stage     hidden              ->  layers ... -> norm -> head      -> sum of token losses
                                                         norm -> layers of multi-token prediction -> head -> their sums

Hidden states between stages are [s, b, h], or [s/t, b, h] with sequence parallelism: s tokens in each of b rows, hidden size h, t
tensor-parallel ranks. Every stage reads positions and labels from its own copy of the microbatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, zip_longest
from typing import cast

import torch
from torch import nn

from triaxis.engine.activations.offload import HostMemory
from triaxis.engine.activations.saved_tensors import SavedTensors, TensorObserver, unobserved
from triaxis.engine.activations.saving_hooks import SavingHooks
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.fp8_layers import fp8_layers
from triaxis.engine.config.quantities.head_pieces import head_tokens
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.method import mixing_of
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.expert_parallel.balance import ExpertLoad
from triaxis.engine.expert_parallel.region import ExpertRegion
from triaxis.engine.kernels.fusion import EAGER
from triaxis.engine.kernels.registry import Kernels
from triaxis.engine.kernels.rotary import tables_by_rotary
from triaxis.engine.linear.fp8_gemms import Fp8Form
from triaxis.engine.linear.layers import ColumnParallelLinear
from triaxis.engine.linear.products import IN_RUN_DTYPE
from triaxis.engine.linear.te_gemms import TeForm
from triaxis.engine.linear.weight_grads import WeightGradQueue
from triaxis.engine.numerics.precision import DTYPES
from triaxis.engine.tensor_parallel.dropout import DropoutKeys, DropoutSites
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.models.gpt.block import Block, FirstNorm
from triaxis.models.gpt.context import BuildContext, LayerInputs, Positions
from triaxis.models.gpt.embedding import Embedding
from triaxis.models.gpt.losses import TokenLosses, logit_options, token_grads
from triaxis.models.gpt.mtp import TokensAhead
from triaxis.models.gpt.stage_parameters import stage_parameters
from triaxis.models.gpt.strays import refuse_strays
from triaxis.models.specs import StageContents


class GPTChunk(nn.Module):
    """One stage's layers, with the embedding or the head on an end stage.

    Args:
        context: build context with this stage's parameters.
        stage: the stage's layers, and whether it has the embedding and the head.
    """

    def __init__(self, context: BuildContext, stage: StageContents) -> None:
        super().__init__()
        self.context = context
        self.stage = stage
        self.embedding = Embedding(context) if stage.has_embedding else None
        self.rotaries = [context.model.layer_kind(layer).rotary for layer in stage.layers]
        num_own = stage.num_own
        self.blocks = nn.ModuleList(
            [(context.model.own.block or Block)(context, layer) for layer in stage.layers[:num_own]]
        )
        self.run_blocks = _run if context.model.own.block is None else _run_own
        self.ahead = TokensAhead(context, stage.layers[num_own:], num_own) if stage.num_mtp else None
        self.final_norm = context.norm("final_norm") if stage.has_head else None
        self.head: ColumnParallelLinear | None = None
        self.losses = (context.model.own.loss or TokenLosses)(context) if stage.has_head else None
        if stage.has_head:
            name = "embedding.word.weight" if context.model.tie_embeddings else "head.weight"
            weight = context.parameter(name)
            # The logits' gradient is as wide as the vocabulary: it is never kept for a deferred weight gradient.
            at_once = WeightGradQueue(context.queue.kernel)
            self.head = ColumnParallelLinear([weight], [], context.region, at_once, "head")

    @property
    def queue(self) -> WeightGradQueue:
        """Weight-gradient GEMMs of this chunk, which some pipeline schedules run after the backward."""
        return self.context.queue

    @property
    def saved(self) -> SavedTensors:
        """Policy for saved tensors, which are kept, recomputed or moved to the host."""
        return self.context.saved

    @property
    def load(self) -> ExpertLoad | None:
        """Count of this rank's tokens sent to each expert, or None without experts."""
        return None if self.context.experts is None else self.context.experts.load

    @property
    def output_grad(self) -> torch.Tensor | None:
        """Gradient of each of the last stage's outputs, written before a step's first forward. None: no forward reads it."""
        return self.context.output_grad

    def forward(self, x: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        """Compute hidden states for the next stage, or on the last stage the summed loss.

        The loss is a scalar, summed over unmasked tokens. In training with D multi-token prediction layers, the last stage returns
        [1 + D]: this sum, then each layer's weighted sum.
        """
        inputs = self._layer_inputs(batch)
        hidden = self._hidden(x, batch, inputs)
        if self.losses is None:
            return self.saved.end_chunk(hidden)
        assert self.final_norm is not None
        hidden = self.final_norm(hidden)
        mask = batch.loss_mask.t()
        total = (self.losses(hidden, self.head, batch.labels, *token_grads(self.context, mask)) * mask).sum()
        if self.training and self.ahead is not None:
            total = torch.stack((total, *self.ahead(hidden, self.head, batch, inputs)))
        return self.saved.end_chunk(total)

    def logits(self, x: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        """Compute hidden states, or on the last stage this rank's logit columns [s, b, V_padded/t]."""
        hidden = self._hidden(x, batch, self._layer_inputs(batch))
        return hidden if self.head is None else self._logits(hidden)

    def _layer_inputs(self, batch: MicroBatch) -> LayerInputs:
        part = batch.part
        keys = DropoutKeys(
            self.context.sites, batch.sample_ids, batch.samples, None if part is None else part.positions
        )
        tables = tables_by_rotary(self.rotaries, batch.position_ids, self.context.dtype)
        return LayerInputs(Positions(tables, batch.documents, part), keys)

    def _hidden(self, x: torch.Tensor | None, batch: MicroBatch, inputs: LayerInputs) -> torch.Tensor:
        positions, keys = inputs
        if self.embedding is not None:
            x = self.embedding(batch.tokens, batch.position_ids, keys)
        assert x is not None, "only the first stage starts from tokens"
        shared = positions.tables.values()
        for group in self._groups():
            run = partial(self.run_blocks, group.blocks, positions=positions, keys=keys)
            x = self.saved.run_layer(run, x, moves=group.is_moved, whole=group.is_recomputed, shared=shared)
        return x

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.final_norm is not None and self.head is not None
        logits: torch.Tensor = self.head(self.final_norm(hidden))
        logit_options(self.context.model).shape_(logits, EAGER)
        return logits

    def _layers(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks]

    def _groups(self) -> list["_Group"]:
        """Split the blocks, in order, into groups whose saved tensors are treated alike.

        With offloading, each block that is not recomputed as a whole is a group of its own, since moved tensors are freed group by
        group.
        """
        blocks, choice = self._layers(), self.context.recompute
        num_again = 0
        if choice.granularity == "full":
            num_again = len(blocks) if choice.method == "uniform" else min(choice.num_layers, len(blocks))
        size = choice.num_layers if choice.method == "uniform" else 1
        kept = range(num_again, len(blocks), 1 if self.context.num_offloaded else max(1, len(blocks)))
        starts = [*range(0, num_again, size), *kept]
        return [
            _Group(blocks[start:stop], start < num_again, start < self.context.num_offloaded)
            for start, stop in pairwise([*starts, len(blocks)])
        ]


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive blocks whose saved tensors are treated alike.

    Attributes:
        is_recomputed: whether the backward recomputes all of them from the first block's input.
        is_moved: whether their saved tensors are moved to the host.
    """

    blocks: Sequence[Block]
    is_recomputed: bool
    is_moved: bool


def _run(blocks: Sequence[Block], x: torch.Tensor, *, positions: Positions, keys: DropoutKeys) -> torch.Tensor:
    first = FirstNorm()
    # Each block computes the next one's first norm with its own last addition. The group's last block has no next one.
    for block, follows in zip_longest(blocks, blocks[1:]):
        first.norm = None if follows is None else follows.attention_norm
        x = block(x, positions, keys, first)
    return x


def _run_own(blocks: Sequence[nn.Module], x: torch.Tensor, *, positions: Positions, keys: DropoutKeys) -> torch.Tensor:
    """Run an extension's blocks.

    Each block computes its own first norm, because the block may change its input before the norm.
    """
    for block in blocks:
        x = block(x, positions, keys)
    return x


def build_chunks(
    config: Config,
    topology: Topology,
    kernels: Kernels,
    stages: Sequence[StageContents],
    on_saved: TensorObserver = unobserved,
) -> tuple[list[GPTChunk], dict[str, ShardedParameter]]:
    """Build this rank's chunks on the meta device.

    Returns the chunks, and the rank's parameters by name in forward order.

    Args:
        stages: contents of this rank's chunks, in chunk order.
        on_saved: observer of the tensors that are saved for the backward.

    Raises:
        ModelError: a chunk holds tensors that `models/specs.py` does not list (`models/gpt/strays.py`), or lacks listed ones.
    """
    tp = topology.axis("tp")
    choice = config.recompute
    assert choice.is_resolved, "triaxis.models.predict.rank_memory.resolve_recompute comes first"
    region = TensorParallelRegion(tp, config.parallel.sequence_parallel, choice.gathered_inputs == "keep")
    cp = topology.axis("cp")
    mixing = mixing_of(config, kernels.choices.attention, cp)
    dtype = DTYPES[config.precision.dtype]
    held: dict[str, ShardedParameter] = {}
    saved = SavedTensors()
    if choice.granularity != "none" or config.offload.num_layers:
        saved = SavingHooks(
            choice.parts_made_again,
            HostMemory(topology.device) if config.offload.num_layers else None,
            config.offload.min_bytes,
            weights=lambda: [parameter.value for parameter in held.values()],
            on_saved=on_saved,
        )
    form = Fp8Form.of(kernels, config, topology, saved)
    forms = {} if form is None else dict.fromkeys(fp8_layers(config), form)
    experts = ExpertRegion.of(config, topology, kernels, on_saved)
    place = topology.sizes.expert_place(topology.rank)
    sites = DropoutSites(config.train.seed)
    output_grad, at_a_time = None, head_tokens(config)
    if at_a_time is not None:
        output_grad = torch.zeros(1 + config.model.num_mtp_layers, dtype=torch.float64, device=topology.device)
    chunks = []
    for stage in stages:
        parameters = stage_parameters(config, region, place, dtype, stage, held)
        context = BuildContext(
            model=config.model,
            recompute=choice,
            num_offloaded=config.offload.num_layers,
            kernels=kernels,
            region=region,
            cp=cp,
            mixing=mixing,
            experts=experts,
            dtype=dtype,
            sites=sites,
            parameters=parameters,
            queue=WeightGradQueue(kernels.choices.weight_grad, on_saved),
            saved=saved,
            forms=forms,
            form=IN_RUN_DTYPE if kernels.te is None else TeForm(kernels.te),
            head_tokens=at_a_time,
            output_grad=output_grad,
        )
        chunks.append(GPTChunk(context, stage))
        context.require_all_taken()
        refuse_strays(chunks[-1], config.model, stage.layers, held)
    return chunks, held
