"""The published bubbles of arXiv 2401.10241, with the times that they were computed from."""

import csv
from dataclasses import dataclass
from pathlib import Path

import pytest

from triaxis.engine.pipeline.simulate import Costs

FILE = Path(__file__).with_name("zero_bubble_table5.csv")


@dataclass(frozen=True)
class Published:
    """A row of the file: a model on p pipeline ranks with m microbatches, times in ms of a rank's whole share of layers."""

    model: str
    p: int
    m: int
    chunks: int
    forward: float
    input_grad: float
    weight_grad: float
    transfer: float
    bubbles: dict[str, float]

    def costs(self, vpp: int = 1) -> Costs:
        """Costs of each of p x vpp stages."""
        times = (self.forward / vpp, self.input_grad / vpp, self.weight_grad / vpp)
        return Costs.uniform(self.p * vpp, *times, self.transfer)


def published_bubbles() -> list:
    """A pytest parameter for each row."""
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows = []
    for row in csv.DictReader(lines):
        times = (float(row[key]) for key in ("t_f_ms", "t_b_ms", "t_w_ms", "t_comm_ms"))
        bubbles = {
            "1f1b": float(row["bubble_1f1b"]),
            "interleaved": float(row["bubble_1f1b_interleaved"]),
            "zb_h1": float(row["bubble_zb_h1"]),
        }
        sizes = int(row["p"]), int(row["m"]), int(row["v_interleaved"])
        published = Published(row["model"], *sizes, *times, bubbles)
        rows.append(pytest.param(published, id=f"{published.model}-m{published.m}"))
    assert len(rows) == 12
    return rows
