"""Predicted step times beside measured ones, on this machine: the tiny config in twelve layouts of one and two ranks.

    triaxis bench --device  ->  a device's file  ->  Estimator.simulated    beside    a few training steps of each layout

Nothing of the measured steps enters a prediction. `order` counts the pairs of layouts whose measured times differ by more than
10 %, and those that the prediction orders alike.

    OMP_NUM_THREADS=1 python -m benchmarks.predicted_steps [--steps 12]
"""

import argparse
import json
import os
import tempfile
from itertools import combinations
from pathlib import Path

import torch
import yaml

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.launch.tuning.calibrate import measure_device
from triaxis.launch.tuning.layouts import LayoutResult, try_layout, write_config
from triaxis.models.predict.step_time.cluster import Cluster
from triaxis.models.predict.step_time.estimate import Estimator

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "gpt_tiny.yaml"
ONE = {"tp": "1", "pp": "1", "vpp": "1", "dp": "1", "sequence_parallel": "false"}


def of(*words: str) -> tuple[str, ...]:
    """Return overrides of one process, with these in place of its own."""
    own = (f"parallel.{name}={value}" for name, value in ONE.items())
    return (*(word for word in own if word.partition("=")[0] not in {one.partition("=")[0] for one in words}), *words)


LAYOUTS = {
    "one rank": of(),
    "one rank, micro batch 1": of("train.micro_batch_size=1"),
    "one rank, micro batch 16": of("train.micro_batch_size=16"),
    "one rank, recompute": of("recompute.granularity=full"),
    "dp 2": of("parallel.dp=2"),
    "dp 2, micro batch 1": of("parallel.dp=2", "train.micro_batch_size=1"),
    "tp 2": of("parallel.tp=2"),
    "tp 2, sequence parallel": of("parallel.tp=2", "parallel.sequence_parallel=true"),
    "pp 2": of("parallel.pp=2"),
    "pp 2, micro batch 16": of("parallel.pp=2", "train.micro_batch_size=16"),
    "pp 2, vpp 2": of("parallel.pp=2", "parallel.vpp=2"),
    "pp 2, zbv": of("parallel.pp=2", "parallel.vpp=2", "schedule.name=zbv"),
}
FAR_APART = 1.1


def _calibrated(folder: Path, num_ranks: int) -> tuple[Path, float, float]:
    """Measure the CPU of so many ranks; return its file, a link's GB/s and a call's microseconds."""
    values = measure_device(f"{num_ranks} ranks", torch.device("cpu"), lambda what: None, num_ranks=num_ranks)
    link = values.pop("collective_gb_per_s")
    path = folder / f"{num_ranks}_ranks.yaml"
    path.write_text(yaml.safe_dump(values))
    shown = ("memory_gb_per_s", "peak_tflops", "launch_us", "collective_us")
    print(f"{num_ranks} rank(s): " + ", ".join(f"{name} {values[name]}" for name in shown) + f", link {link} GB/s")
    return path, link, values["collective_us"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="training steps of each layout")
    parser.add_argument("--json", type=Path, help="write the table there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="triaxis-") as name:
        folder = Path(name)
        devices = {num_ranks: _calibrated(folder, num_ranks) for num_ranks in (1, 2)}
        rows = []
        for label, words in LAYOUTS.items():
            config = load_config(CONFIG, words, {})
            sizes = parallel_sizes(config)
            device, link, call_us = devices[sizes.world_size]
            cluster = Cluster(str(device), 1, sizes.world_size, link, link, call_us, 1.0, 0.0)
            predicted = Estimator(cluster).simulated(config, sizes)
            written = write_config(CONFIG, words, args.steps, folder, f"layout{len(rows)}", {})
            found = try_layout(written, label, folder / "log")
            measured = found.step_seconds if isinstance(found, LayoutResult) else float("nan")
            rows.append((label, predicted.seconds, measured))
            error = predicted.seconds / measured - 1
            print(f"{label:26s} predicted {predicted.seconds:7.4f} s   measured {measured:7.4f} s   {error:+6.1%}")
            parts = (f"{name} {seconds:.4f}" for name, seconds in predicted.components.items() if seconds)
            print(f"    {'  '.join(parts)}")
    errors = [abs(predicted / measured - 1) for _, predicted, measured in rows]
    far = [
        pair for pair in combinations(rows, 2) if max(pair[0][2], pair[1][2]) > FAR_APART * min(pair[0][2], pair[1][2])
    ]
    alike = [pair for pair in far if (pair[0][1] < pair[1][1]) == (pair[0][2] < pair[1][2])]
    print(f"mean {sum(errors) / len(errors):.1%} worst {max(errors):.1%}; order: {len(alike)} of {len(far)} pairs")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "alike": len(alike), "far": len(far), "cpus": os.cpu_count()}))


if __name__ == "__main__":
    main()
