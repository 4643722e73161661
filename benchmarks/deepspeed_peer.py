"""DeepSpeed on the CPU in the same layout: its pipeline engine (1F1B) and ZeRO stage 1 over dp, on the layers of `torch_peer.py`.

DeepSpeed has no tensor parallelism of its own for training such a model, and no interleaved schedule. Its CPU Adam wants a
compiler; torch's fused AdamW replaces it, as in the other peers. Not a dependency: `pip install deepspeed` (tried: 0.19.8).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.plain_gpt import adamw, rotation
from benchmarks.torch_peer import Block, Stage, load
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.layout.rank_grid import ParallelSizes


class RotatedBlock(nn.Module):
    """A block that makes its own tables of rotation: between DeepSpeed's layers goes one tensor, [b, s, h]."""

    def __init__(self, block: Block, model: ModelConfig) -> None:
        super().__init__()
        self.block = block
        self.rope = rotation(torch.arange(model.seq_length).unsqueeze(0), model, torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x, self.rope)


class DeepSpeedPeer:
    """One rank's training in the given layout, from the given weights; every rank of the world makes one.

    Args:
        config: a Llama in fp32.
        sizes: of the axes, tp = 1 and vpp = 1.
        weights: the whole model's, by the names of `models/specs.py`.

    Raises:
        ModuleNotFoundError: deepspeed is not installed.
        ValueError: the layout has tp or vpp.
    """

    def __init__(self, config: Config, sizes: ParallelSizes, weights: Mapping[str, torch.Tensor]) -> None:
        if sizes.tp > 1 or sizes.vpp > 1:
            raise ValueError(
                f"DeepSpeed's pipeline has neither tensor parallelism nor an interleaved schedule: {sizes}. Give pp and dp."
            )
        import deepspeed
        from deepspeed.pipe import PipelineModule
        from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        model, train, options = config.model, config.train, config.optimizer
        whole = Stage(model, range(model.num_layers), first=True, last=True)
        load(whole, weights)
        blocks = [RotatedBlock(block, model) for block in whole.layers.values()]  # type: ignore[arg-type]
        assert whole.word is not None and whole.final_norm is not None and whole.head is not None
        # The blocks are cut evenly, the embedding with the first of them and the head with the last.
        per_stage = model.num_layers // sizes.pp
        stages = [nn.Sequential(*blocks[start : start + per_stage]) for start in range(0, model.num_layers, per_stage)]
        stages[0].insert(0, whole.word)
        stages[-1].append(whole.final_norm).append(whole.head)
        topology = PipeDataParallelTopology(num_pp=sizes.pp, num_dp=sizes.dp)
        pipeline = PipelineModule(
            layers=stages,
            topology=topology,
            loss_fn=_mean_loss,
            partition_method="uniform",
            activation_checkpoint_interval=0,
        )
        optimizer = adamw(pipeline.parameters(), options)
        count = train.global_batch_size // train.micro_batch_size // sizes.dp
        self._engine: Any
        self._engine, *_ = deepspeed.initialize(
            model=pipeline,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": train.micro_batch_size,
                "gradient_accumulation_steps": count,
                "gradient_clipping": options.clip_grad or 0.0,
                # Its default allocates 2 GB for a model of any size; these are buckets as large as ours.
                "zero_optimization": {"stage": 1, "reduce_bucket_size": options.bucket_bytes // 4},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
            },
        )

    def step(self, microbatches: Sequence[MicroBatch]) -> float:
        """Run one optimizer step on this data-parallel rank's microbatches; return the loss per token."""
        return float(self._engine.train_batch(iter([(each.tokens, each.labels) for each in microbatches])))


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the loss per token of a microbatch: DeepSpeed takes the mean over microbatches and data-parallel ranks."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
