"""Describe a run, for its banner and the report at its end."""

from dataclasses import dataclass

import torch

from triaxis.engine.config.quantities.fp8_layers import fp8_line
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.own import open_corpus
from triaxis.engine.data.corpus.stdlib import entropies
from triaxis.engine.errors import counted
from triaxis.engine.kernels import registry
from triaxis.engine.layout.shard_spec import REDUCE_AXES
from triaxis.engine.pipeline import schedules
from triaxis.engine.step import Engine
from triaxis.engine.telemetry.observer import peak_memory_bytes
from triaxis.engine.telemetry.outlets.format import gigabytes
from triaxis.engine.telemetry.record.parameters import local_counts, round_counts
from triaxis.models.predict.fit import memory_line
from triaxis.models.predict.rank_memory import predict


def count_parameters(engine: Engine) -> dict[str, int]:
    """Count the model's parameters by module, each once, however many ranks hold it. Every rank calls it."""
    topology = engine.topology
    axes = {name: topology.optional_axis(name) for name in ("tp", "kv_replicas", "ends")}
    shares = local_counts(
        [parameter.record for parameter in engine.parameters.values()],
        {axis: topology.sizes.reduce_size(axis) for axis in REDUCE_AXES},
        {name: axis.size for name, axis in axes.items() if axis is not None},
    )
    sums = topology.axis("world").sum_values(list(shares.values()), topology.device, "parameter count")
    return round_counts(dict(zip(shares, sums, strict=True)))


@dataclass(frozen=True, slots=True)
class RunDescription:
    """The run in words, for the banner.

    Attributes:
        layout: parallel sizes and pipeline schedule.
        device: number of ranks and nodes, device and backend.
        kernels: chosen kernels, and fp8 if it is used.
        layers_per_chunk: number of layers in each of this rank's chunks.
    """

    layout: str
    schedule: str
    device: str
    device_name: str
    kernels: str
    layers_per_chunk: tuple[int, ...]


def describe(engine: Engine) -> RunDescription:
    """Describe a built engine's layout, schedule and device."""
    topology, config = engine.topology, engine.config
    grid, schedule = topology.grid, schedules.title(config)
    ranks = f"{counted(grid.world_size, 'rank')} on {counted(grid.num_nodes, 'node')}"
    sequence = ", sequence parallel" if config.parallel.sequence_parallel else ""
    layers = tuple(stage.num_own for stage in engine.stages)
    chosen = f", layers {' '.join(map(str, layers))} (auto)" if config.parallel.layers_per_stage == "auto" else ""
    if topology.device.type == "cuda":
        device_name = torch.cuda.get_device_name(topology.device)
        device = f"{device_name}, {'gloo through the host' if topology.staged else 'nccl'}"
    else:
        device_name = "cpu"
        device = f"cpu, gloo, {counted(torch.get_num_threads(), 'thread')} per rank"
    kernels, fp8 = (
        registry.describe(engine.kernels, registry.attention_shape(config, topology)),
        engine.kernels.fp8,
    )
    return RunDescription(
        layout=f"{topology.sizes}, {schedule}{sequence}{chosen}",
        schedule=schedule,
        device=f"{ranks}, {device}",
        device_name=device_name,
        kernels="; ".join([kernels, *([] if fp8 is None else [f"fp8: {fp8_line(config, fp8.label)}"])]),
        layers_per_chunk=tuple(len(stage.layers) for stage in engine.stages),
    )


def predicted_memory_line(engine: Engine, held_before: int) -> str:
    """Format the predicted memory of the rank that needs most.

    On a GPU the line also has the GPU's memory. On a CPU the line also has each process's memory without the model.

    Args:
        held_before: this process's peak memory before the model was built, in bytes (`peak_memory_bytes`).
    """
    topology = engine.topology
    on_gpu = topology.device.type == "cuda"
    prediction = predict(engine.config, topology.sizes, nccl=on_gpu and not topology.staged)
    if on_gpu:
        return memory_line(prediction, torch.cuda.mem_get_info(topology.device)[1], by_kind=False)
    return f"{memory_line(prediction, by_kind=False)}; each process has {gigabytes(held_before)} without it"


def measured_memory(engine: Engine, held_before: int) -> str:
    """Format this rank's peak memory next to its prediction. Arguments are as in `predicted_memory_line`.

    A GPU's allocator counts tensors, as the prediction does. On a CPU the system counts all resident memory of a process. The
    prediction then includes the memory held before the model was built.
    """
    topology = engine.topology
    measured = gigabytes(peak_memory_bytes(topology.device))
    tensors = predict(engine.config, topology.sizes, nccl=False).ranks[topology.coordinates.pp].tensors
    who = f"rank {topology.rank} has held"
    if topology.device.type == "cuda":
        return f"{who} {measured} of GPU memory in tensors at most, {gigabytes(tensors)} predicted"
    return (
        f"{who} {measured} of resident memory at most, {gigabytes(held_before + tensors)} predicted "
        f"({gigabytes(held_before)} before its model, {gigabytes(tensors)} of tensors)"
    )


def corpus_entropies(config: Config) -> dict[str, float]:
    """Return the loss of uniform, unigram and bigram models on the training corpus; {} for random tokens.

    Losses are in nats per token. Only the first corpus in a blend is measured.
    """
    if config.data.synthetic:
        return {}
    return entropies(open_corpus(config.data.train[0].path, config.model.own), config.model.vocab_size)
