"""State and pipeline buffers, counted here from shapes and from the program: the footprint has the same bytes."""

import pytest

from tests.harness import run_ranks
from tests.launch.footprint.test_added_up import thin
from tests.parity.cases import Case
from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import Coordinates
from triaxis.engine.layout.shard_spec import ParamRecord, localize
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Kind
from triaxis.engine.pipeline.lowering import Post, Program, feeding_transfer, lower
from triaxis.launch.footprint.run import Footprint, Footprints
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.specs import stage_specs

CASES = (
    Case("gpt", tp=2, pp=4, dp=2, sequence_parallel=True, global_batch_size=12, dtype="bf16"),
    Case("llama", tp=4, pp=2, vpp=2, dp=3, global_batch_size=18, dtype="bf16"),
    Case("qwen", tp=2, pp=2, schedule="gpipe", global_batch_size=3, dtype="fp32"),
    Case("llama", tp=2, cp=2, pp=2, dp=2, global_batch_size=4, dtype="bf16"),
)


def all_stages(rank: int, config: Config) -> list[Footprint]:
    """In a process without a group of its own."""
    return Footprints(config, build_chunks).of_stages()


def state_bytes(config: Config, at: Coordinates) -> dict[str, int]:
    """Parameters w, main grads and each optimizer state max(4, w) bytes per element, the latter on 1/(dp cp) of each bucket."""
    sizes = parallel_sizes(config)
    stages = stages_of(config)
    w = {"bf16": 2, "fp32": 4}[config.precision.dtype]
    # A parameter of the first and the last stage is held once where both are on one rank.
    held: dict[str, ParamRecord] = {}
    for stage in range(at.pp, len(stages), sizes.pp):
        for spec in stage_specs(config.model, stages[stage]):
            sp = config.parallel.sequence_parallel
            held[spec.name] = localize(spec, tp=sizes.tp, tp_index=at.tp, sequence_parallel=sp)
    buffers: dict[object, list[ParamRecord]] = {}
    for record in held.values():
        buffers.setdefault((record.replicas, record.sum_over), []).append(record)
    padded, shards = 0, sizes.dp * sizes.cp
    for records in buffers.values():
        bucket = 0
        for index in range(len(records) - 1, -1, -1):
            bucket += records[index].numel
            shares_gemm = records[index].spec.fused_with_previous and records[index].replicas is None
            is_full = bucket * max(4, w) >= config.optimizer.bucket_bytes and not shares_gemm
            if index == 0 or is_full:
                padded += -(-bucket // (64 * shards)) * 64 * shards
                bucket = 0
    # Two moments, and a master where the parameter is not one itself.
    states = 3 if w < 4 else 2
    return {"parameters": w * padded, "gradients": 4 * padded, "optimizer": states * 4 * padded // shards}


def most_pipeline_buffers(program: Program, rank: int) -> int:
    """Most tensors at a time that a send or a receive was called with and autograd does not keep.

    A receive buffer counts from its post to the forward that saves it (an activation from then on) or the end of the backward
    that takes it. What is sent counts from its post to the next post of the rank, which lets go of it.
    """
    received = sending = most = 0
    for each in program.instructions[rank]:
        if isinstance(each, Post):
            arriving = sum(transfer.destination == rank for transfer in each.transfers)
            received += arriving
            sending = len(each.transfers) - arriving
            most = max(most, received + sending)
            continue
        assert each.kind in (Kind.F, Kind.B)
        received -= feeding_transfer(program.schedule, rank, each) is not None
    return most


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=pytest.mark.slow if number else ()) for number, case in enumerate(CASES)],
)
def test_state_and_pipeline_buffers(case: Case) -> None:
    config = thin(case)
    (found,) = run_ranks(all_stages, 1, config, timeout_seconds=600)
    sizes, model = parallel_sizes(config), config.model
    name = schedules.resolve(config.schedule.name, sizes.vpp)
    program = lower(schedules.build(name, sizes.pp, sizes.vpp, found[0].num_microbatches))
    w = {"bf16": 2, "fp32": 4}[case.dtype]
    buffer = w * model.seq_length // sizes.cp * model.hidden_size // (sizes.tp if case.sequence_parallel else 1)
    for pp, footprint in enumerate(found):
        assert footprint.state == state_bytes(config, footprint.coordinates), f"stage {pp}"
        assert footprint.most["p2p"] == buffer * most_pipeline_buffers(program, pp), f"stage {pp}"
