"""Run one rank for `triaxis footprint --measured`.

Two training steps run on random tokens. The second step's calls and bytes are compared with the traffic formulas.
"""

from collections.abc import Sequence
from contextlib import closing

import torch
from rich.console import Console

from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.step import Engine
from triaxis.engine.train import build
from triaxis.launch.footprint.own_costs import OwnCostsMeter
from triaxis.launch.pictures.tables import terminal_table
from triaxis.launch.rank.batches import open_batches
from triaxis.launch.rank.join import Rank, join_run
from triaxis.launch.start.wide_console import wide_console
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.experts.traffic import Choices
from triaxis.models.predict.traffic import Flow, Volume, expected_traffic, measured_traffic

Traffic = dict[Flow, Volume]


def main(argv: Sequence[str]) -> int:
    """Run one rank, and return the exit code.

    The exit code is 1 on every rank if any rank's ledger differs from the prediction.
    """
    with join_run(argv, measure=OwnCostsMeter()) as rank:
        measured, expected = one_step(rank)
        world = rank.topology.axis("world")
        (num_differing,) = world.sum_values([float(measured != expected)], rank.topology.device, "traffic")
        if rank.number == 0:
            show(wide_console(), rank, measured, expected, int(num_differing))
    return 1 if num_differing else 0


def one_step(rank: Rank) -> tuple[Traffic, Traffic]:
    """Run two training steps, and return this rank's (measured, expected) traffic in the second."""
    config, topology = rank.resolved, rank.topology
    engine = build(config, topology, build_chunks)
    dataset = SyntheticDataset(config.train.seed, config.model.vocab_size, config.model.seq_length)
    with closing(open_batches(config, topology, dataset)) as batches:
        engine.train_step(batches.next_step(), config.optimizer.lr)
        losses = engine.forward_backward(batches.next_step())
        # The update sums the load over all ranks, so this rank's own counts are copied first.
        chosen = None if engine.load is None else engine.load.counts.clone()
        engine.update(losses, config.optimizer.lr).wait()
    measured = measured_traffic(topology.ledger.posted)
    choices = None if chosen is None else choices_of_group(engine, chosen)
    return measured, expected_traffic(config, topology.sizes, topology.coordinates, engine.stages, choices)


def choices_of_group(engine: Engine, chosen: torch.Tensor) -> Choices:
    """Gather how often tokens chose each expert in a step.

    `chosen` has this rank's own counts, int64 [layers, E]. The result covers all ranks that share this rank's experts.
    """
    assert engine.load is not None, "a model with experts counts their load"
    of_ranks = engine.topology.axis("experts").all_gather(chosen.unsqueeze(0), "traffic").wait().tolist()
    return {layer: [rank[row] for rank in of_ranks] for row, layer in enumerate(engine.load.layers)}


def show(console: Console, rank: Rank, measured: Traffic, expected: Traffic, num_differing: int) -> None:
    """Print rank 0's table of calls and bytes, and how many ranks differ from the formulas."""
    title = f"One training step, rank {rank.number} ({rank.topology.coordinates}), {rank.topology.sizes}"
    names = ("axis", "purpose", "operation")
    table = terminal_table(*names, "calls", "wire bytes", "formula", names=names, title=title)
    nothing = Volume(0, 0)
    axis = ""
    for flow in sorted(measured.keys() | expected.keys()):
        seen, wanted = measured.get(flow, nothing), expected.get(flow, nothing)
        table.add_row(
            flow.axis if flow.axis != axis else "",
            flow.purpose,
            flow.op.replace("_", "-"),
            f"{seen.calls:,}",
            f"{seen.wire_bytes:,}",
            "equal" if seen == wanted else f"{wanted.calls:,} calls, {wanted.wire_bytes:,} bytes",
            style="" if seen == wanted else "bold red",
        )
        axis = flow.axis
    console.print(table)
    world_size = rank.topology.grid.world_size
    if not measured and not expected:
        console.print("One rank: nothing is communicated.")
    elif num_differing:
        console.print(
            f"[bold red]{num_differing} of {world_size} ranks posted other calls or bytes than their formulas predict.[/]"
        )
    else:
        console.print(f"All {world_size} ranks posted exactly the calls and bytes that their formulas predict.")
        console.print("Wire bytes are ring theory; a receive is counted by its sender.")
        if any(flow.op == "all_to_all_rows" for flow in measured):
            console.print(
                "Bytes of all-to-all-rows follow from the choices of experts, which were counted in this step."
            )
