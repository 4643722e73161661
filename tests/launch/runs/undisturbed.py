"""A small run, and what it comes to when nobody disturbs it: what interrupted ones are held against."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.harness import run_ranks
from triaxis.engine.checkpoint.directory import CheckpointDirectory
from triaxis.engine.checkpoint.format.fingerprint import to_text
from triaxis.engine.checkpoint.format.manifest import read_manifest
from triaxis.engine.checkpoint.shards import fingerprint
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.data.datasets import open_datasets
from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.optimizer.lr import learning_rate
from triaxis.engine.train import build
from triaxis.launch.rank.batches import open_batches
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute

NUM_STEPS = 36

CONFIG = f"""\
model: {{num_layers: 4, hidden_size: 32, num_attention_heads: 2, seq_length: 16, vocab_size: 64}}
data: {{synthetic: true}}
train: {{steps: {NUM_STEPS}, global_batch_size: 4, micro_batch_size: 1, seed: 7}}
parallel: {{tp: 2, pp: 2, dp: null}}
precision: {{dtype: fp32}}
checkpoint: {{interval: 12, keep_last: 2}}
telemetry: {{sample_tokens: 0}}
"""


def undisturbed_fingerprint(
    config_path: Path, world_size: int, ranks_per_node: int, overrides: Sequence[str] = ()
) -> dict[str, str]:
    """Of the state after the last step, made by one group of ranks without a launcher and without a file."""
    return run_ranks(_train, world_size, str(config_path), world_size, ranks_per_node, tuple(overrides))[0]


def saved_fingerprint(run: Path, num_steps: int = NUM_STEPS) -> dict[str, str]:
    """Of the newest checkpoint in a run directory, which must be that of the last step."""
    folder = CheckpointDirectory(run / "checkpoints").latest()
    assert folder is not None and folder.name == f"step_{num_steps:08d}", folder
    return dict(read_manifest(folder).fingerprint)


def _train(rank: int, path: str, world_size: int, ranks_per_node: int, overrides: tuple[str, ...]) -> dict[str, str]:
    config = load_config(Path(path), overrides, {}, world_size=world_size, ranks_per_node=ranks_per_node)
    grid = RankGrid(parallel_sizes(config, world_size), ranks_per_node)
    topology = Topology(
        grid, rank, torch.device("cpu"), kv_heads=config.model.kv_heads, has_experts=config.model.has_experts
    )
    engine = build(resolve_recompute(config, topology.sizes), topology, build_chunks)
    datasets = open_datasets(
        config.data, config.model.seq_length, config.train.seed, vocab_size=config.model.vocab_size
    )
    batches = open_batches(config, topology, datasets.train)
    num_steps = engine.plan.num_steps
    for step in range(num_steps):
        engine.train_step(batches.next_step(), learning_rate(step, 1, config.optimizer, num_steps))
    values = {kind: to_text(value) for kind, value in fingerprint(engine).items()}
    batches.close()
    topology.close()
    return values
