"""The subjects: rank 0 of each program, at some depth of a model, with bf16 weights and AdamW on fp32 masters.

The rank runs alone in its groups, whose other ranks do not exist: on the stub a message without peers does nothing. Where the host
reads how many tokens chose each expert, it gets equal numbers.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from triaxis.engine.config.load import load_config
from triaxis.engine.config.tree import Config

LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Shape:
    """What a subject trains.

    Attributes:
        name: of a model in configs/.
        tp: ranks of the tensor-parallel group.
        ep: ranks that share the experts, each with a sample of its own.
        seq_length: tokens of a sample.
        num_microbatches: samples of a rank in a step, one after the other.
    """

    name: str
    tp: int
    ep: int
    seq_length: int
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        return self.tp * self.ep

    def config(self, num_layers: int, *settings: str) -> Config:
        words = (
            f"model.num_layers={num_layers} model.seq_length={self.seq_length} data.synthetic=true "
            f"train.global_batch_size={self.ep * self.num_microbatches} train.micro_batch_size=1 "
            f"parallel.pp=1 parallel.vpp=1 parallel.cp=1 parallel.dp={self.ep} parallel.ep={self.ep} parallel.tp={self.tp} "
            f"parallel.sequence_parallel={str(self.tp > 1).lower()}"
        )
        return load_config(f"configs/{self.name}.yaml", [*words.split(), *settings], {}, world_size=self.num_ranks)


Side = tuple[Callable[[], object], Callable[[], object]]
"""Forward and backward of a step, and its update."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A program.

    Attributes:
        recipe: where it is published.
        build: (shape, number of layers) -> its two halves of a step.
        differs: what is not as published, since the stub or a missing package does not allow it.
    """

    recipe: str
    build: Callable[[Shape, int], Side]
    differs: str = ""


@cache
def process_group(size: int) -> None:
    """Open NCCL's default group, with this rank alone in it: its object stands for those of the others."""
    dist.all_gather_object = lambda found, mine, group=None: found.__setitem__(slice(None), [mine] * len(found))
    dist.init_process_group("nccl", rank=0, world_size=size, store=dist.HashStore())


def _ids(shape: Shape) -> torch.Tensor:
    return torch.zeros(1, shape.seq_length, dtype=torch.int64, device="cuda")


def dense(shape: Shape, num_layers: int) -> Config:
    """Return the config for a subject without experts.

    Raises:
        ValueError: the model has them.
    """
    config = shape.config(num_layers)
    if config.model.has_experts:
        raise ValueError(f"{shape.name} has experts, and nothing here builds them in this program")
    return config


def triaxis(shape: Shape, num_layers: int, *, settings: Sequence[str] = ()) -> Side:
    from benchmarks.host.lone_rank import lone_engine
    from triaxis.engine.data.loader import count_labels
    from triaxis.launch.footprint.run import microbatches

    engine = lone_engine(shape.config(num_layers, "precision.masters=split", *settings))
    batches = microbatches(engine)
    # As in training: labels are posted a step ahead, and the numbers of a step are read after the next one is posted.
    labels, losses, unread = [engine.post_labels(count_labels(batches))], [None], [None]

    def forward_backward() -> None:
        given, labels[0] = labels[0], engine.post_labels(count_labels(batches))
        losses[0] = engine.forward_backward(batches, labels=given)

    def update() -> None:
        before, unread[0] = unread[0], engine.update(losses[0], LEARNING_RATE)
        if before is not None:
            before.read()

    return forward_backward, update


def megatron(shape: Shape, num_layers: int, *, attention_by_torch: bool) -> Side:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from benchmarks.gpu_contenders.megatron import gpt_model, transformer_config, with_optimizer
    from benchmarks.megatron_peer import MegatronSteps, causal_mask

    config, device = dense(shape, num_layers), torch.device("cuda")
    if not parallel_state.model_parallel_is_initialized():
        process_group(shape.tp)
        parallel_state.initialize_model_parallel(shape.tp, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1)
    theirs = transformer_config(config, device, transformer_engine=False, selective=False, fp8=False)
    core = _AttentionByTorch if attention_by_torch else None
    gpt = gpt_model(theirs, config, device, transformer_engine=False, attention=core)
    mask = None if attention_by_torch else causal_mask(shape.seq_length, device)
    steps = MegatronSteps(config, *with_optimizer(gpt, config), mask)
    ids, places = _ids(shape), torch.arange(shape.seq_length, device=device)[None]
    batch = _MegatronBatch(ids, ids, places)
    return lambda: steps.forward_backward([batch] * shape.num_microbatches), steps.update


@dataclass(frozen=True, slots=True)
class _MegatronBatch:
    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor


class _AttentionByTorch(torch.nn.Module):
    """torch's attention, where Megatron-Core's local layers have operators over whole matrices of scores."""

    def __init__(self, config: Any, **given: Any) -> None:
        super().__init__()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **given: Any) -> torch.Tensor:
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def fsdp(shape: Shape, num_layers: int, *, is_compiled: bool) -> Side:
    """A Llama by torch's own means: FSDP2 with bf16 weights and fp32 masters, DTensor for tp, fused AdamW."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import loss_parallel

    from benchmarks.torch_peer import Stage, apply_tensor_parallel

    process_group(shape.tp)
    config = dense(shape, num_layers)
    mesh = init_device_mesh("cuda", (1, shape.tp), mesh_dim_names=("dp", "tp"))
    with torch.device("cuda"):
        model = Stage(config.model, range(num_layers), first=True, last=True)
    if shape.tp > 1:
        apply_tensor_parallel(model, mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers.values():
        if is_compiled:
            block.compile()
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    ids = _ids(shape)

    def forward_backward() -> None:
        optimizer.zero_grad()
        for _ in range(shape.num_microbatches):
            with torch.device("cuda"), loss_parallel():
                F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return forward_backward, update


def _read_equal_counts(dispatcher: Any, shape: Shape, top_k: int) -> None:
    """Let torchtitan's dispatcher go on with equal numbers of rows, after it has read those of the stub."""
    read, rows = dispatcher._sync_token_count_exchange, [shape.seq_length * top_k // shape.ep] * shape.ep

    def equal(*given: Any) -> tuple[torch.Tensor, list[int], list[int]]:
        counts, *found = read(*given)
        # A number that is not used would not be read in compiled layers.
        for count in (*found[0], *found[1]):
            torch._check(count < sys.maxsize)
        return counts, rows, rows

    dispatcher._sync_token_count_exchange = equal


def torchtitan(shape: Shape, num_layers: int, *, is_compiled: bool) -> Side:
    """torchtitan's model: FSDP2, FlexAttention, the loss in 8 pieces, without recomputation."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    config = shape.config(num_layers)
    # Its own default, which torch 2.13's fully_shard refuses for more than one rank.
    backend: Any = "spmd_types" if shape.num_ranks == 1 else "partial_dtensor"
    if not dist.is_initialized():
        process_group(shape.num_ranks)
        utils.set_spmd_backend(backend)
        if config.model.moe is not None:
            _read_equal_counts(AllToAllTokenDispatcher, shape, config.model.moe.top_k)
    family, _, size = shape.name.partition("_")
    named = size.upper().replace("_", "-")
    spec = importlib.import_module(f"torchtitan.models.{family}").model_registry(named, attn_backend="flex")
    spec.model.layers = spec.model.layers[:num_layers]
    parallelism = ParallelismConfig(
        tensor_parallel_degree=shape.tp, expert_parallel_degree=shape.ep, spmd_backend=backend
    )
    dims = ParallelDims.from_config(parallelism, shape.num_ranks)
    dims.build_mesh()
    spec.model.update_from_config(config=type("Run", (), {"parallelism": parallelism})())
    with torch.device("meta"):
        model = spec.model.build()
    compiled = CompileConfig(enable=is_compiled)
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(seq_len=shape.seq_length),
        parallelism=parallelism,
        compile_config=compiled,
        ac_config=None,
        dump_folder=os.devnull,
    )
    # Not `init_weights`: it draws until all numbers are in range, and without values it never ends.
    model.to_empty(device="cuda")
    model.train()
    model._skip_lm_head = True
    loss = CrossEntropyLoss.Config(global_vocab_size=config.model.vocab_size)
    loss_of = ChunkedLossWrapper.Config(loss_fn=loss).build(compile_config=compiled)
    loss_of.set_lm_head(model.lm_head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    context = utils.get_spmd_context(parallel_dims=dims)
    ids, places = _ids(shape), torch.arange(shape.seq_length, device="cuda")[None]
    num_tokens = torch.ones((), dtype=torch.int64, device="cuda")

    def forward_backward() -> None:
        optimizer.zero_grad()
        for _ in range(shape.num_microbatches):
            given = {"positions": places, "attention_masks": model.get_attention_masks(positions=places)}
            inputs = ids, ids, given
            tokens, labels, more = annotate_input_spmd_types(dims, *inputs) if backend == "spmd_types" else inputs
            with context():
                loss, _ = loss_of(model(tokens, **more), labels, num_tokens, positions=places)
                loss.backward()

    def update() -> None:
        utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True, ep_enabled=dims.ep_enabled)
        optimizer.step()

    return forward_backward, update


_MEGATRON = "megatron-core, gpt_layer_specs.get_gpt_layer_local_spec, its distributed optimizer"
_NO_PARALLEL_NORM = "no Transformer Engine, and with tp no sequence parallelism, which its norm of torch refuses"
_FSDP = "torch's fully_shard and parallelize_module, as in the tutorials for a Llama; fused AdamW, fp32 masters"
_TITAN = "torchtitan, its models and their parallelize_fn; with more than one rank its partial_dtensor; fused AdamW"
_NO_GRAPH = "without its CUDA graph of the whole forward and backward"

SUBJECTS: Mapping[str, Subject] = {
    "triaxis": Subject(
        "this checkout, with the kernels that `auto` chooses, split masters and the head in pieces", triaxis
    ),
    "triaxis-eager": Subject(
        "the same, elementwise functions not compiled", partial(triaxis, settings=("kernels.elementwise=eager",))
    ),
    "triaxis-graphs": Subject(
        "the same, replaying CUDA graphs; on the stub a launch is free, on a card it is not",
        partial(triaxis, settings=("kernels.graphs=on",)),
    ),
    "megatron": Subject(_MEGATRON, partial(megatron, attention_by_torch=False), _NO_PARALLEL_NORM),
    "megatron-sdpa": Subject(
        _MEGATRON,
        partial(megatron, attention_by_torch=True),
        f"torch's attention instead of its own; {_NO_PARALLEL_NORM}",
    ),
    "fsdp": Subject(_FSDP, partial(fsdp, is_compiled=False)),
    "fsdp-compiled": Subject(f"{_FSDP}; torch.compile over each layer", partial(fsdp, is_compiled=True)),
    "torchtitan": Subject(_TITAN, partial(torchtitan, is_compiled=False), _NO_GRAPH),
    "torchtitan-compiled": Subject(
        f"{_TITAN}; torch.compile over each layer and the loss", partial(torchtitan, is_compiled=True), _NO_GRAPH
    ),
}
