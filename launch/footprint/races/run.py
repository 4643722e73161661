"""Check a configuration for races, and print a report."""

from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console

from triaxis.engine.config.quantities.expert_rows import dispatch_of
from triaxis.engine.config.quantities.plan import parallel_sizes, rank_grid
from triaxis.engine.config.quantities.run_phases import as_a_run
from triaxis.engine.config.schema.training import CONSTANT_RATE
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import counted
from triaxis.engine.layout.axis_groups import axis_groups
from triaxis.launch.footprint.races.check import check_rank, representative_ranks
from triaxis.launch.footprint.races.clocks import Operator
from triaxis.launch.footprint.races.report import Race
from triaxis.launch.verify.run import checked
from triaxis.launch.verify.shrink import shrink
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute

MOST_SHOWN = 8
"""Races per rank to print; one missing wait is often found at many lines."""


def config_to_check(config: Config, *, small: bool) -> Config:
    """Return the configuration that runs on the CPU in place of this one.

    It trains two steps on random tokens at a constant learning rate. Checkpoints, telemetry and GPU kernels are left out.

    Args:
        config: configuration with `parallel.dp` set.
        small: shrink the model and the number of microbatches as `triaxis verify` does.

    Raises:
        ConfigError: the small configuration breaks a rule.
    """
    # Choices that depend on memory are made for the requested sizes.
    config = resolve_recompute(config, parallel_sizes(config))
    tree = config.model_dump(mode="json")
    for section, values in (shrink(config) if small else {}).items():
        tree[section] |= values
    tree["data"] = {"synthetic": True}
    # Step and sample counts planned for the run's own data are replaced.
    as_a_run(tree, 2)
    tree["optimizer"] |= CONSTANT_RATE
    tree["checkpoint"], tree["telemetry"] = {"interval": "never"}, {}
    # GPU kernels do not run here. The CPU's have the same inputs and outputs on the same stream.
    tree["kernels"] = {"attention": "explicit" if config.kernels.attention == "explicit" else "auto"}
    if config.model.has_experts:
        tree["kernels"]["dispatch"] = dispatch_of(config)
    if tree["precision"]["fp8"] is not None:
        # These products take matrices of any size, and a small model's have no whole tiles.
        tree["precision"]["fp8"]["backend"] = "emulated"
    return checked(tree)


def not_exercised(config: Config) -> Iterator[str]:
    """List what the check of a configuration from `config_to_check` leaves out; a race there is not found."""
    yield "a GPU's kernels, compiled or of Transformer Engine and apex: the CPU's ran in their place"
    if config.precision.fp8 is not None:
        yield "FP8 GEMMs: plain operators on rounded numbers ran in their place"
    sizes = parallel_sizes(config)
    groups = axis_groups(rank_grid(config, sizes), config.model.kv_heads, has_experts=config.model.has_experts)
    alone = [name for name, ranks, channel in groups if not channel and all(len(each) == 1 for each in ranks)]
    if alone:
        yield f"calls over {', '.join(alone)}: one rank each in this layout"
    if config.model.has_experts and sizes.expert_ranks > 1:
        other = "all_gather" if dispatch_of(config) == "all_to_all" else "all_to_all"
        yield f"dispatch of experts by {other}: give kernels.dispatch={other}"
    yield "torch's allocators, reading data, and writing files and telemetry"


def check_races(console: Console, config: Config, ranks: list[int] | None) -> list[dict[str, object]]:
    """Find the races of ranks, one by one, and print a line for each with its first `MOST_SHOWN` races.

    Args:
        console: console to print on.
        config: configuration from `config_to_check`.
        ranks: ranks to run; None: `representative_ranks`.

    Returns:
        Each rank's findings, for JSON.
    """
    sizes = parallel_sizes(config)
    grid = rank_grid(config, sizes)
    trees: list[dict[str, object]] = []
    for rank in ranks or representative_ranks(grid):
        found = check_rank(config, rank, build_chunks)
        console.print(
            f"rank {rank} ({found.coordinates}): {counted(len(found.races), 'race')} in {found.num_operators:,} operators on "
            f"{counted(len(found.streams), 'stream')}",
            style="bold red" if found.races else None,
        )
        for race in found.races[:MOST_SHOWN]:
            console.print(f"\n{race}", markup=False)
        if len(found.races) > MOST_SHOWN:
            console.print(f"\nand {len(found.races) - MOST_SHOWN} more; --json has all")
        trees.append(
            {
                "rank": rank,
                "coordinates": asdict(found.coordinates),
                "streams": found.streams,
                "operators": found.num_operators,
                "races": [_as_json(race) for race in found.races],
            }
        )
    return trees


def _as_json(race: Race) -> dict[str, object]:
    def of(operator: Operator) -> dict[str, object]:
        return {
            "name": operator.name,
            "stream": operator.stream.name,
            "place": operator.place,
            "during": operator.during,
        }

    return {
        "kind": race.kind,
        "first": of(race.first),
        "second": of(race.second),
        "tensor": race.tensor,
        "times": race.times,
    }
