"""Trainings with FP8 linear layers next to the same in the run's dtype, on the same tokens and weights, in one process.

    plain     configs/gpt_tiny.yaml, with each seed
    FP8       the same with each recipe of `precision.fp8`

The seeds' spread is the noise: another seed has other weights and another order of the data. A recipe's difference is its
validation loss less that of the plain training with the same seed.

    OMP_NUM_THREADS=1 nice -n 19 python -m benchmarks.fp8_learns train.steps=500
    python -m benchmarks.fp8_learns runtime.device=cuda precision.dtype=bf16 train.steps=500
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.moe_learns import CONFIGS, ONE_RANK, learn
from benchmarks.records import append_record
from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.config.load import load_config
from triaxis.launch.rank.join import join

PLAIN = "plain"
RECIPES: Mapping[str, tuple[str, ...]] = {
    PLAIN: (),
    "tensorwise": ("precision.fp8.recipe=tensorwise",),
    "tensorwise, e4m3": ("precision.fp8.recipe=tensorwise", "precision.fp8.format=e4m3"),
    "blockwise": ("precision.fp8.recipe=blockwise",),
    "mxfp8": ("precision.fp8.recipe=mxfp8",),
}
"""Name: settings."""


@dataclass(frozen=True, slots=True)
class Row:
    """The trainings of one recipe.

    Attributes:
        name: of `RECIPES`.
        val_losses: nats per token of the validation set, by seed.
    """

    name: str
    val_losses: Mapping[int, float]

    def over(self, plain: "Row") -> list[float]:
        """Return the differences from the plain training of each seed."""
        return [loss - plain.val_losses[seed] for seed, loss in self.val_losses.items()]


def show(rows: Sequence[Row], console: Console) -> None:
    plain = next(row for row in rows if row.name == PLAIN)
    table = Table()
    for heading in ("recipe", "validation loss", "over plain", "spread of seeds"):
        table.add_column(heading, justify="left" if heading == "recipe" else "right")
    for row in rows:
        losses = list(row.val_losses.values())
        over = "" if row is plain else " ".join(f"{difference:+.4f}" for difference in row.over(plain))
        spread = f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        table.add_row(row.name, " ".join(f"{loss:.4f}" for loss in losses), over, spread)
    console.print(table)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fp8_learns",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--only", choices=list(RECIPES), action="append", help="a recipe beside plain; all, if not given"
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many; each has weights and an order of the data")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/fp8_learns.jsonl"), help="appended to")
    parser.add_argument("overrides", nargs="*", help="section.key=value of all trainings")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Train each recipe with each seed, print the table, append a line."""
    options, console, rows = parse(argv), Console(), []
    for name in dict.fromkeys([PLAIN, *(options.only or RECIPES)]):
        losses = {}
        for seed in range(1, options.seeds + 1):
            words = [*ONE_RANK, *options.overrides, *RECIPES[name], f"train.seed={seed}"]
            config = load_config(CONFIGS / "gpt_tiny.yaml", words)
            with join(config, RankEnvironment.from_variables({})) as rank:
                losses[seed] = learn(config, rank, f"{name}, seed {seed}", 1, console).val_loss
        rows.append(Row(name, losses))
    show(rows, console)
    append_record(options.json, "fp8_learns", argv, {"rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
