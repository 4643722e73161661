"""Layouts per second of the planner's search.

    python -m benchmarks.plan                                                three models on their clusters
    python -m benchmarks.plan --runs configs/llama3_8b.yaml:64xH100

Seconds are of the processor, in one thread; a model's file and the device's are read before.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from triaxis.engine.config.load import load_config
from triaxis.launch.planning.search import search
from triaxis.models.predict.step_time.cluster import cluster_at

RUNS = ("configs/llama3_8b.yaml:64xH100", "configs/llama3_405b.yaml:1024xH100", "configs/gpt_1t.yaml:3072xA100")


def main(argv: Sequence[str] | None = None) -> None:
    """Search the layouts of each run and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=RUNS, metavar="CONFIG:NxGPU")
    args = parser.parse_args(argv)
    print("| run | legal layouts | too large | s | layouts per s | fastest |")
    print("|---|---|---|---|---|---|")
    for run in args.runs:
        path, gpus = run.split(":")
        cluster = cluster_at(gpus)
        config = load_config(Path(path), [], {}, world_size=cluster.num_gpus)
        start = time.process_time()
        plan = search(config, cluster)
        seconds = time.process_time() - start
        print(
            f"| {Path(path).stem}, {gpus} | {plan.num_legal:,} | {plan.num_too_large:,} | {seconds:.1f} "
            f"| {plan.num_legal / seconds:,.0f} | {plan.best.layout} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
