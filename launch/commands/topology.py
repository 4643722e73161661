"""`triaxis topology` shows each rank's node, groups and links, and starts no process.

sizes, or a config and a world size  ->  RankGrid  ->  nodes and groups as text (launch/pictures/topology_text.py)
                                                   ->  with --output a picture  (launch/pictures/topology_picture.py)
"""

import argparse
import os
from dataclasses import asdict

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.rules.check import require_legal
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import TopologyError
from triaxis.engine.layout.rank_grid import AXES, ParallelSizes, RankGrid
from triaxis.launch.pictures.drawing import check_path
from triaxis.launch.pictures.topology_picture import draw_topology
from triaxis.launch.pictures.topology_text import describe_layout
from triaxis.launch.start.command_line import (
    CONFIG,
    CommandParser,
    add_json,
    add_open,
    add_output,
    add_world_size,
    check_counts,
    open_page,
    print_json,
    refuse,
)

EXAMPLES = """examples:
  triaxis topology --tp 2 --pp 2 --dp 4 --ranks-per-node 8
  triaxis topology --tp 8 --pp 8 --dp 16 --ranks-per-node 8 --output layout.svg
  triaxis topology configs/llama3_8b.yaml --gpus 64 --ranks-per-node 8
"""


def add_arguments(parser: CommandParser) -> None:
    parser.usage = (
        "triaxis topology (CONFIG [--gpus N] [section.key=value ...] | --tp N --cp N --pp N --dp N) [options]"
    )
    parser.epilog = EXAMPLES
    parser.takes(CONFIG, "sizes and model of this run, in place of --tp --cp --pp --dp", required=False)
    for name, meaning in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline"), ("dp", "data")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning}-parallel size (default: 1)")
    add_world_size(parser, "with a config: ranks; needed where it leaves parallel.dp open")
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="ranks that share a node (default: all of them)"
    )
    parser.add_argument(
        "--allow-tp-across-nodes", action="store_true", help="show a layout whose tensor-parallel groups span nodes"
    )
    add_output(parser, "draw it too, into this .svg")
    add_open(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the layout, and draw it with --output. Raises TopologyError or ConfigError if there is no such layout."""
    check_counts(world_size=args.world_size, ranks_per_node=args.ranks_per_node)
    if args.output is not None:
        check_path(args.output)
    elif args.open:
        refuse(["--open without a picture: add --output layout.svg."])
    config, sizes = _sizes(args)
    allow, per_node = args.allow_tp_across_nodes, args.ranks_per_node
    if config is not None:
        allow, per_node = allow or config.parallel.allow_tp_across_nodes, per_node or config.runtime.ranks_per_node
    grid = RankGrid(sizes, per_node, allow_tp_across_nodes=allow)
    print(describe_layout(grid, config.model if config is not None else None), end="")
    if args.output is not None:
        draw_topology(grid, args.output)
        print(f"\npicture: {args.output}")
        open_page(args, args.output)
    if args.json:
        ranks = [
            {"rank": rank, "node": grid.node(rank), **asdict(grid.coordinates(rank))} for rank in range(grid.world_size)
        ]
        print_json(args, {"layout": str(sizes), "ranks": ranks, "groups": {axis: grid.groups(axis) for axis in AXES}})
    return 0


def _sizes(args: argparse.Namespace) -> tuple[Config | None, ParallelSizes]:
    given = {name: getattr(args, name) for name in ("tp", "cp", "pp", "dp") if getattr(args, name) is not None}
    if args.config is None:
        if args.overrides:
            unnamed = "no config is named, so there is nothing to override. Name one first."
            refuse(f"{word}: {unnamed}" for word in args.overrides)
        if args.world_size is not None:
            raise TopologyError(
                f"--gpus {args.world_size} needs a config; without one, the number of ranks is tp x cp x pp x dp. "
                "Leave it out, or change --dp."
            )
        return None, ParallelSizes(**given)
    if given:
        flags = " ".join(f"--{name} {size}" for name, size in given.items())
        raise TopologyError(
            f"{flags} and {args.config}: both set the layout. Leave one out; to change a size of the config, write an "
            "override, such as parallel.tp=2."
        )
    allowed = ["parallel.allow_tp_across_nodes=true"] if args.allow_tp_across_nodes else []
    config = load_config(args.config, [*args.overrides, *allowed], os.environ)
    require_legal(config, str(args.config), args.world_size, args.ranks_per_node)
    return config, parallel_sizes(config, args.world_size)
