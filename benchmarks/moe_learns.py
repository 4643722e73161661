"""A mixture of experts next to the dense model with the same active parameters, on the same tokens, in one process.

    experts        configs/moe_tiny.yaml
    dense          configs/gpt_tiny.yaml: each MLP as wide as the experts that a token passes
    no balance     the experts without a bias that follows the load, and without the sequence loss

A layout is only a matter of speed, so each is trained on one rank. The table gives the validation loss, and for each layer with
experts the fullest expert's load over the mean: the largest of the last steps, each step by itself.

    OMP_NUM_THREADS=1 nice -n 10 python -m benchmarks.moe_learns
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.records import append_record
from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.config.load import load_config
from triaxis.engine.config.tree import Config
from triaxis.engine.data.datasets import open_datasets
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.data.samples import SampleSource
from triaxis.engine.optimizer.lr import learning_rate
from triaxis.engine.telemetry.record.expert_load import max_over_mean
from triaxis.engine.train import build
from triaxis.launch.rank.batches import open_batches
from triaxis.launch.rank.join import Rank, join
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.specs import model_specs

ONE_RANK = (
    *(f"parallel.{axis}=1" for axis in ("tp", "pp", "vpp", "dp")),
    "parallel.sequence_parallel=false",
    "train.micro_batch_size=32",
)
RUNS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "experts": ("moe_tiny", ("parallel.ep=1",)),
    "dense": ("gpt_tiny", ()),
    "no balance": (
        "moe_tiny",
        ("parallel.ep=1", "model.moe.balance.bias_rate=0", "model.moe.balance.sequence_loss=0"),
    ),
}
"""Name: (config, overrides)."""

VALIDATED = 16
"""Global batches of the validation set that are read."""

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


@dataclass(frozen=True, slots=True)
class Learnt:
    """The end of one training.

    Attributes:
        name: of `RUNS`.
        val_loss: nats per token of the validation set.
        worst_loads: of each layer with experts, the largest max over mean of the last steps.
        parameters: of the model.
        active_parameters: that a token passes.
    """

    name: str
    val_loss: float
    worst_loads: tuple[float, ...]
    parameters: int
    active_parameters: int


def count_parameters(config: Config) -> tuple[int, int]:
    """Return a model's parameters, and those that one token passes: of the routed experts top_k of num_experts."""
    specs = [spec for spec in model_specs(config.model) if spec.is_trained]
    total, moe = sum(spec.numel for spec in specs), config.model.moe
    routed = sum(spec.numel for spec in specs if ".experts." in spec.name)
    return total, total if moe is None else total - routed + routed * moe.top_k // moe.num_experts


def learn(config: Config, rank: Rank, name: str, last_steps: int, console: Console) -> Learnt:
    """Train a model to its last step, and validate it."""
    datasets = open_datasets(
        config.data, config.model.seq_length, config.train.seed, vocab_size=config.model.vocab_size
    )
    assert datasets.valid is not None, "the tiny configs hold back documents"
    engine = build(resolve_recompute(config, rank.topology.sizes), rank.topology, build_chunks)
    batches, steps, loads = open_batches(config, rank.topology, datasets.train), config.train.steps, []
    for step in range(steps):
        result = engine.train_step(batches.next_step(), learning_rate(step, 1, config.optimizer, steps))
        loads.append([max_over_mean(layer) for layer in result.load])
        if (step + 1) % 20 == 0:
            console.print(f"{name}: step {step + 1} of {steps}, loss {result.loss:.4f}", style="dim")
    batches.close()
    val_loss = engine.evaluate(held_back(config, rank, datasets.valid))
    worst = tuple(max(layer) for layer in zip(*loads[-last_steps:], strict=True))
    return Learnt(name, val_loss, worst, *count_parameters(config))


def held_back(config: Config, rank: Rank, dataset: SampleSource) -> Iterator[Sequence[MicroBatch]]:
    """Yield the first `VALIDATED` global batches of the validation set."""
    batches = open_batches(config, rank.topology, dataset)
    for _ in range(VALIDATED):
        yield batches.next_step()
    batches.close()


def show(rows: Sequence[Learnt], last_steps: int, console: Console) -> None:
    table = Table(title=f"load: the largest max over mean of any of the last {last_steps} steps, by layer")
    for heading in ("model", "parameters", "active", "validation loss", "load"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows:
        loads = " ".join(f"{load:.2f}" for load in row.worst_loads) or "-"
        table.add_row(row.name, f"{row.parameters:,}", f"{row.active_parameters:,}", f"{row.val_loss:.4f}", loads)
    console.print(table)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.moe_learns",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--only", choices=list(RUNS), action="append", help="one of the models; all, if not given")
    parser.add_argument("--last-steps", type=int, default=50, help="steps whose load counts")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/moe_learns.jsonl"), help="appended to")
    parser.add_argument("overrides", nargs="*", help="section.key=value of all models")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Train each model, print the table, append a line."""
    options, console, rows = parse(argv), Console(), []
    for name in options.only or RUNS:
        file, overrides = RUNS[name]
        config = load_config(CONFIGS / f"{file}.yaml", [*ONE_RANK, *overrides, *options.overrides])
        with join(config, RankEnvironment.from_variables({})) as rank:
            rows.append(learn(config, rank, name, options.last_steps, console))
    show(rows, options.last_steps, console)
    append_record(options.json, "moe_learns", argv, {"rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
