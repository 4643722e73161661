"""Rates that a device reaches, read from `configs/devices/*.yaml`: GEMMs by shape, fused attention, memory.

A GEMM [m, k] x [k, n] runs at this rate:

    dtype's peak x best tile's share of it x k / (k + fill) x share of this product that measured GEMMs of as many FLOPs reach

Tiles run in waves with one tile per processor, and the last wave is seldom full. The kernel library is assumed to choose the tile
that finishes the product soonest. `fill` is the inner size k at which filling the pipeline takes half of a tile's time. The
measured share covers other effects (power, clocks). It is interpolated over log2 FLOPs, and constant outside the table.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from triaxis.engine.config.yaml_text import read_yaml
from triaxis.engine.errors import ConfigError
from triaxis.engine.program import ROOT
from triaxis.engine.storage.state_files import read_regular
from triaxis.engine.telemetry.record.peaks import known_peak

DEVICES = Path("configs/devices")
"""Folder that is searched for devices given by name."""

NO_DEVICES = f"This installation has no {DEVICES}; `triaxis bench --device` writes the file of a device."

Pass = Literal["forward", "backward"]

KERNELS = ("fa1_triton", "fa2", "cudnn", "fa3")
"""Fused attention kernels, oldest first."""


class GemmRow(NamedTuple):
    """A measured product [m, k] x [k, n]."""

    m: int
    n: int
    k: int
    dtype: str
    tflops: float
    source: str


class AttentionRow(NamedTuple):
    """A measured causal attention kernel. A forward's FLOPs count only the causal half; a backward's are 2.5 times as many."""

    kernel: str
    direction: Pass
    head: int
    seq: int
    tflops: float
    source: str


class Tile(NamedTuple):
    """A block of a product that one processor computes at a time; `share` is its rate over the best block size's."""

    height: int
    width: int
    share: float


@dataclass(frozen=True)
class Device:
    """One GPU (or CPU), and the rates that it reaches.

    Attributes:
        memory_gb: memory size in 10^9 bytes.
        memory_gb_per_s: data-sheet bandwidth, 10^9 bytes per second.
        peak_tflops: dense peak rate in TFLOP/s, by dtype. In its place, a file may name a `gpu` of
            `engine/telemetry/record/peaks.py`.
        streaming_share: share of `memory_gb_per_s` that elementwise kernels reach.
        processors: number of processors, each of which computes one tile at a time.
        launch_us: microseconds between a kernel's end and the next kernel's start.
        host_us: microseconds that the host takes per call, ahead of the device; 0 for a CPU, where `launch_us` has them.
        host_gb_per_s: rate of copies to pinned host memory, and of those from it, in 10^9 bytes per second.
        copies_beside: whether these copies run beside kernels, in both directions at once.
        collective_share: share of a link's bandwidth that collectives reach.
        collective_us: microseconds that a collective with few bytes takes inside a node.
        collective_processors: processors that a collective takes from the kernels beside it.
        sustained_share: share of measured rates that a device under constant load keeps at its power limit.
        fill_k: inner size at which filling the pipeline takes half of a bf16 tile's time.
        rates_as: device whose shares of peak, in GEMMs and attention, this one is assumed to reach; "": its rates are measured.
        digest: first digits of the file's SHA-256.
    """

    name: str
    memory_gb: float
    memory_gb_per_s: float
    streaming_share: float
    peak_tflops: dict[str, float]
    processors: int
    launch_us: float
    host_us: float
    host_gb_per_s: float
    copies_beside: bool
    collective_share: float
    collective_us: float
    collective_processors: int
    sustained_share: float
    fill_k: float
    tiles: tuple[Tile, ...]
    gemm: tuple[GemmRow, ...]
    attention: tuple[AttentionRow, ...]
    rates_as: str = ""
    digest: str = ""

    @cached_property
    def ideal(self) -> "Device":
        """The device without losses in small products and calls: its seconds per sample fall as microbatches grow."""
        dtype = "bf16" if "bf16" in self.peak_tflops else next(iter(self.peak_tflops))
        share = max(tile.share for tile in self.tiles)
        reached = max(value for points in self._reached_points.values() for _, value in points)
        row = GemmRow(2**12, 2**12, 2**12, dtype, self.peak_tflops[dtype] * share * reached, self.digest)
        large = replace(self, tiles=(Tile(1, 1, share),), gemm=(row,), fill_k=0)
        return replace(large, launch_us=0, host_us=0, collective_us=0)

    @property
    def stream_bytes_per_s(self) -> float:
        """Bytes per second that an elementwise kernel reads and writes in large tensors."""
        return self.memory_gb_per_s * 1e9 * self.streaming_share

    @property
    def taken_share(self) -> float:
        """Share of its rate that a kernel loses while a collective runs, because the collective occupies processors."""
        return min(1.0, self.collective_processors / self.processors)

    def beyond(self, seconds: float, beside: float) -> float:
        """Seconds that a collective adds to kernels that run beside it.

        The time by which the collective outlasts the kernels counts whole. While both run, the kernels have fewer processors.

        Args:
            seconds: the collective's own seconds.
            beside: the kernels' seconds.
        """
        return max(0.0, seconds - beside) + min(seconds, beside) * self.taken_share

    def streamed_seconds(self, seconds: float, num_bytes: float, piece_bytes: float) -> float:
        """Seconds of kernels whose data comes from host memory piece by piece and goes back there.

        The first piece's way in and the last one's way out are exposed; the others run beside the kernels, if copies do.

        Args:
            seconds: the kernels' own seconds.
            num_bytes: bytes that come, and that go.
            piece_bytes: bytes of a piece.
        """
        rate = self.host_gb_per_s * 1e9
        if not self.copies_beside:
            return seconds + 2 * num_bytes / rate
        return max(seconds, num_bytes / rate) + 2 * min(piece_bytes, num_bytes) / rate

    def gemm_seconds(self, m: float, n: float, k: float, dtype: str = "bf16", count: int = 1) -> float:
        """Seconds for `count` products [m, k] x [k, n] in one kernel, without its launch.

        The result is at least the time of the memory traffic: 2 bytes per element, 1 for fp8 operands.

        Raises:
            ConfigError: the device has no rate for the dtype.
        """
        flops = 2.0 * m * n * k * count
        wide = 1 if dtype == "fp8" else 2
        traffic = count * (wide * (m * k + k * n) + 2 * m * n)
        kind = self._rates_of(dtype)
        rate = self._quantised_peak(m, n, k, kind, count) * self._reached(flops, kind) * self.sustained_share
        return max(flops / rate, traffic / self.stream_bytes_per_s)

    @cached_property
    def flops_per_byte(self) -> int:
        """GEMM FLOPs in the time in which an elementwise kernel moves one byte, for a large bf16 product; rounded."""
        size = 2**13
        return round(self.gemm_tflops(size, size, size) * 1e12 / self.stream_bytes_per_s)

    def gemm_tflops(self, m: float, n: float, k: float, dtype: str = "bf16") -> float:
        """Compute a product's rate in TFLOP/s."""
        return 2e-12 * m * n * k / self.gemm_seconds(m, n, k, dtype)

    def attention_tflops(self, kernel: str, direction: Pass, head: int, seq: float) -> float:
        """Look up causal attention's rate over `seq` tokens, in TFLOP/s.

        A kernel that was not measured gets the rates of the newest older one. The nearest measured head size is used, and the
        rate is interpolated over log2 of the length. If no attention was measured, a GEMM's rate is returned.
        """
        rows = [row for row in self.attention if row.direction == direction]
        if not rows:
            return self.gemm_tflops(seq, seq, head)
        chosen = _nearest_kernel(rows, kernel)
        rows = [row for row in rows if row.kernel == chosen]
        nearest = min({row.head for row in rows}, key=lambda size: abs(math.log2(size / head)))
        points = sorted((math.log2(row.seq), row.tflops) for row in rows if row.head == nearest)
        return _interpolated(points, math.log2(seq)) * self.sustained_share

    def _rates_of(self, dtype: str) -> str:
        return {"fp16": "bf16"}.get(dtype, dtype)

    def _quantised_peak(self, m: float, n: float, k: float, dtype: str, count: int = 1) -> float:
        if dtype not in self.peak_tflops:
            raise ConfigError(
                [f"device {self.name} has no rate for {dtype}: its file has {', '.join(sorted(self.peak_tflops))}."]
            )
        best = max(
            tile.share
            * count
            * m
            * n
            / (_waves(tile, m, n, count, self.processors) * self.processors * tile.height * tile.width)
            for tile in self.tiles
        )
        # Filling takes the same time in every dtype; an fp8 tile gets through twice the inner size meanwhile.
        fill = self.fill_k * self.peak_tflops[dtype] / self.peak_tflops.get("bf16", self.peak_tflops[dtype])
        return self.peak_tflops[dtype] * 1e12 * best * k / (k + fill)

    def _reached(self, flops: float, dtype: str) -> float:
        points = self._reached_points.get(dtype)
        if points is None:
            points = self._reached_points.get("bf16", next(iter(self._reached_points.values())))
        return _interpolated(points, math.log2(flops))

    @cached_property
    def _reached_points(self) -> dict[str, list[tuple[float, float]]]:
        """Points (log2 FLOPs, share of the predicted peak that measured GEMMs reach) by dtype; equal FLOPs are averaged.

        The predicted peak includes the losses to partial waves and to filling (module docstring).
        """
        found: dict[str, dict[float, list[float]]] = {}
        for row in self.gemm:
            ratio = row.tflops * 1e12 / self._quantised_peak(row.m, row.n, row.k, row.dtype)
            place = round(math.log2(2.0 * row.m * row.n * row.k))
            found.setdefault(row.dtype, {}).setdefault(place, []).append(ratio)
        return {
            dtype: sorted((place, sum(values) / len(values)) for place, values in places.items())
            for dtype, places in found.items()
        }


def _waves(tile: Tile, m: float, n: float, count: int, processors: int) -> int:
    return math.ceil(count * math.ceil(m / tile.height) * math.ceil(n / tile.width) / processors)


def _nearest_kernel(rows: Sequence[AttentionRow], kernel: str) -> str:
    """Choose a kernel with measured rows: `kernel` itself, else the newest older one, else the slowest."""
    largest: dict[str, float] = {}
    for row in rows:
        largest[row.kernel] = max(row.tflops, largest.get(row.kernel, 0.0))
    usable = KERNELS[: KERNELS.index(kernel) + 1] if kernel in KERNELS else (kernel,)
    return next((name for name in reversed(usable) if name in largest), min(largest, key=lambda name: largest[name]))


def _interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate between sorted points; outside them, take the nearest point's value."""
    if at <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return points[-1][1]


def device_names() -> list[str]:
    """List the devices that ship with the project."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def load_device(name_or_path: str | Path) -> Device:
    """Read a device, given the name of a shipped device file without its ending, or a path that ends in .yaml.

    Raises:
        ConfigError: there is no such file, the file lacks a key, or its `gpu` has no known peak rates.
    """
    path = Path(name_or_path)
    if path.suffix != ".yaml":
        path = _folder() / f"{name_or_path}.yaml"
    if not path.exists():
        known = device_names()
        there = (
            f"There are {', '.join(known)}; or give the path of a file from `triaxis bench --device`."
            if known
            else NO_DEVICES
        )
        raise ConfigError([f"device {name_or_path} has no file: rates of an unknown device cannot be guessed. {there}"])
    return _read(path.resolve(), path.stat().st_mtime_ns)


@cache
def _read(path: Path, changed: int) -> Device:
    text = read_regular(path).decode()
    values = read_yaml(text) or {}
    if "gpu" in values:
        values["peak_tflops"] = _peaks_of(values.pop("gpu"), path)
    optional = {"digest", "rates_as"} | ({"gemm", "attention"} if values.get("rates_as") else set())
    missing = [name for name in Device.__dataclass_fields__ if name not in optional and name not in values]
    if missing:
        raise ConfigError(
            [f"{path}: {', '.join(missing)} missing: a device needs every rate. Compare a file of {DEVICES}."]
        )
    values["tiles"] = tuple(Tile(*tile) for tile in values["tiles"])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    if values.get("rates_as"):
        like = load_device(values["rates_as"])
        faster = {dtype: peak / like.peak_tflops[dtype] for dtype, peak in values["peak_tflops"].items()}
        gemm = tuple(row._replace(tflops=row.tflops * faster[row.dtype]) for row in like.gemm)
        attention = tuple(row._replace(tflops=row.tflops * faster["bf16"]) for row in like.attention)
        return Device(**values, gemm=gemm, attention=attention, digest=digest)
    values["gemm"] = tuple(GemmRow(**row) for row in values["gemm"])
    values["attention"] = tuple(
        AttentionRow(row["kernel"], row["pass"], row["head"], row["seq"], row["tflops"], row["source"])
        for row in values["attention"]
    )
    return Device(**values, digest=digest)


def _peaks_of(gpu: str, path: Path) -> dict[str, float]:
    """Look up a GPU's peak rates in TFLOP/s, by dtype."""
    peak, in_fp8 = known_peak(gpu, "bf16"), known_peak(gpu, "bf16", in_fp8=True)
    if peak is None:
        raise ConfigError([f"{path}: gpu = {gpu} has no known peak rates. Give `peak_tflops`, a rate for each dtype."])
    return {"bf16": peak.tflops, "fp16": peak.tflops} | ({} if in_fp8 is None else {"fp8": in_fp8.tflops})


def _folder() -> Path:
    return ROOT / DEVICES
