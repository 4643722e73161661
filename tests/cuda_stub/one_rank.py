"""A rank of a run, alone or in a layout, on the card or on the CPU.

python -m tests.cuda_stub.one_rank NAME [section.field=value ..]     the numbers of one that is alone on the card, as JSON
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from tests.parity.cases import dataset
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes, rank_grid
from triaxis.engine.data.loader import Batches
from triaxis.engine.kernels.registry import open_kernels
from triaxis.engine.step import Engine
from triaxis.engine.train import build
from triaxis.launch.footprint.run import fake_world
from triaxis.launch.rank.batches import open_batches
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute

ALONE = ("parallel.tp=1", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=1", "parallel.sequence_parallel=false")

SMALL = (
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    # Wide enough for every part of a layer to weigh in the loss.
    "model.init_std=0.1",
    "data.synthetic=true",
    "optimizer.bucket_bytes=65536",
)

Numbers = tuple[list[float], dict[str, str]]


@contextmanager
def built(rank: int, name: str, settings: Sequence[str], device: str) -> Iterator[tuple[Engine, Batches]]:
    """Build a rank of the process group, or one that is alone, with the kernels that its device gets.

    Args:
        rank: its number.
        name: of a configuration in configs/.
        settings: `section.field=value`, beside SMALL.
        device: cpu, or cuda for the card of the rank's number.
    """
    is_alone = not dist.is_initialized()
    size = 1 if is_alone else dist.get_world_size()
    words = [*(ALONE if is_alone else ()), *SMALL, *settings]
    config = load_config(f"configs/{name}.yaml", words, {}, world_size=size)
    config, sizes, model = resolve_recompute(config, parallel_sizes(config)), parallel_sizes(config), config.model
    place = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    grid, groups = rank_grid(config, sizes), {"kv_heads": model.kv_heads, "has_experts": model.has_experts}
    with fake_world(0, 1) if is_alone else nullcontext():
        topology = Topology(grid, rank, place, **groups)
        engine = build(config, topology, build_chunks, kernels=open_kernels(config, topology, is_alone=is_alone))
        batches = open_batches(config, topology, dataset(config))
        yield engine, batches
        batches.close()
        topology.close()


def numbers_of_steps(rank: int, name: str, settings: Sequence[str], device: str, num_steps: int = 3) -> Numbers:
    """Train some steps. Returns each step's loss and norm of the gradient, and the kernels' choices."""
    with built(rank, name, settings, device) as (engine, batches):
        steps = [engine.train_step(batches.next_step(), 1e-3) for _ in range(num_steps)]
        return [each for step in steps for each in (step.loss, step.grad_norm)], engine.kernels.choices.named()


if __name__ == "__main__":
    print(json.dumps(numbers_of_steps(0, sys.argv[1], sys.argv[2:], "cuda")))
