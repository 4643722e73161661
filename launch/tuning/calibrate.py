"""Measure the local device's rates, and write them in the format of `configs/devices/*.yaml`.

    GEMMs        the three products of linear layers, over five decades of FLOPs
    attention    the causal half of fused attention, forward and backward
    memory       bytes that elementwise kernels read and write
    host         time per kernel of a layer with tiny tensors, on CPUs only
    links        all-gathers, reduce-scatters and all-reduces between two ranks

Ranks on one CPU share its caches and memory. So a CPU is measured while other processes multiply matrices, one for each other rank.

Every number is the best of several runs.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from rich.console import Console

from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.tree import Config
from triaxis.engine.device.copy_lane import lane_of
from triaxis.engine.kernels.activations import ActivationKernel
from triaxis.engine.kernels.fusion import EAGER
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.storage.files import write_atomically
from triaxis.engine.storage.redaction import unwritable
from triaxis.engine.telemetry.record.peaks import known_peak
from triaxis.launch.footprint.real import real_steps
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.step_time.implementation import OURS

ROUNDS = 5
ROUND_SECONDS = 0.02
"""A round repeats its call for about this long."""

TOKENS = (128, 512, 2048)
WIDTHS = (128, 512, 2048)
GPU_TOKENS = (1024, 4096, 8192)
GPU_WIDTHS = (1024, 4096, 8192, 16384)
LENGTHS = (128, 512, 2048)
GPU_LENGTHS = (1024, 4096, 16384)
GPU_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.87), (64, 128, 0.62))
GPU_FILL_K = 140
GPU_COLLECTIVE_PROCESSORS = 24
"""Values of these three keys in the shipped GPU files; nothing here measures them."""

HEAD_SIZES = (32, 64, 128)
STREAM_BYTES = 2**28
GATED_TOKENS, GATED_WIDTH = 512, 384
COMPANY_SECONDS = 60.0
"""Longest wait for each other process to start multiplying, in seconds; it imports torch first."""

SMALL, LARGE = 2**10, 2**21
"""Bytes in the whole tensor for the calls that show a link's latency and its bandwidth."""

PURPOSE = "calibrate"

MODEL = {"hidden_size": 16, "num_attention_heads": 2, "seq_length": 4, "vocab_size": 16, "position": "rope"}
FEW_LAYERS, MANY_LAYERS = 2, 10
MICROBATCHES = 8
GRAPH_KERNELS = 1000


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The link between two ranks on this machine.

    Attributes:
        gb_per_s: rate at which a rank sends in a large call, in 10^9 bytes per second.
        call_us: time of a call with few bytes, in microseconds.
    """

    gb_per_s: float
    call_us: float


@contextmanager
def company(num_others: int) -> Iterator[None]:
    """Keep `num_others` other processes multiplying matrices during the block.

    Each other process has as many threads as this process.
    """
    context = torch.multiprocessing.get_context("spawn")
    started = context.Semaphore(0)
    others = [
        context.Process(target=_multiply, args=(torch.get_num_threads(), started), daemon=True)
        for _ in range(num_others)
    ]
    for other in others:
        other.start()
    try:
        for _ in others:
            started.acquire(timeout=COMPANY_SECONDS)
        yield
    finally:
        for other in others:
            other.terminate()
            other.join()


def _multiply(num_threads: int, started: Semaphore) -> None:
    torch.set_num_threads(num_threads)
    x = torch.randn(512, 512)
    started.release()
    while True:
        torch.mm(x, x)


def write_device(out: Path, name: str, kind: str, num_ranks: int) -> None:
    """Measure a device, write its file, and print the rates.

    Args:
        out: file to write.
        name: device name in plans.
        kind: `cpu` or `cuda`. For `cpu`, torch's number of threads is set to OMP_NUM_THREADS, or else to 1.
        num_ranks: see `measure_device`.

    Raises:
        OutputError: the file cannot be written.
    """
    if kind == "cpu":
        # As many threads as a rank has; torch would take all cores.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    console = Console(highlight=False, soft_wrap=True)
    values = measure_device(name, torch.device(kind), lambda what: console.print(f"  {what} ..."), num_ranks=num_ranks)
    link = values.pop("collective_gb_per_s")
    text = f"# Measured by triaxis bench --device on {kind}; rates of ranks with {torch.get_num_threads()} CPU thread(s).\n"
    text += yaml.safe_dump(values, sort_keys=False, width=200)
    try:
        write_atomically(out, [text.encode()])
    except OSError as error:
        raise unwritable(f"{out}", error) from error
    peaks = ", ".join(f"{dtype} {tflops:g} TFLOP/s" for dtype, tflops in values["peak_tflops"].items())
    console.print(
        f"wrote {out}: {peaks}; memory {values['memory_gb_per_s']:g} GB/s; "
        f"{values['launch_us']:g} us between kernels, {values['host_us']:g} us of the host per call; "
        f"a call of two ranks {values['collective_us']:g} us"
    )
    if math.isfinite(link):
        console.print(
            "cluster of two ranks:  "
            f"{{device: {out}, nodes: 1, gpus_per_node: 2, nvlink_gb_per_s: {link:g}, network_gb_per_s: {link:g}, "
            f"network_latency_us: {values['collective_us']:g}, oversubscription: 1.0, price_per_gpu_hour: 0.0}}"
        )


def measure_device(
    name: str, device: torch.device, report: Callable[[str], None], *, num_ranks: int = 1
) -> dict[str, Any]:
    """Measure a device and the link between two ranks on it.

    Args:
        name: device name in plans and reports.
        device: "cpu", with torch's current number of threads, or a CUDA device.
        report: function (name of a measurement) -> None, called before each measurement.
        num_ranks: number of ranks that will share the CPU; ignored for a GPU.

    Returns:
        The content of a device file, as `load_device` reads it, plus the link's bandwidth as `collective_gb_per_s`. On a machine
            with one GPU the bandwidth is infinite.
    """
    is_cuda = device.type == "cuda"
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    with company(0 if is_cuda else num_ranks - 1):
        report("GEMMs")
        gemm = [row for short, dtype in dtypes.items() for row in _gemms(device, short, dtype)]
        report("attention")
        attention = list(_attention(device, dtypes["bf16" if is_cuda else "fp32"]))
        report("memory")
        stream = _stream_gb_per_s(device)
        report("host memory")
        host = _host_gb_per_s(device)
        report("host")
        call_us = _call_us(device)
        host_us, launch_us = (call_us, _launch_us(device)) if is_cuda else (0.0, call_us)
    report("links")
    link = measure_link(device)
    peaks = {dtype: max(row["tflops"] for row in gemm if row["dtype"] == dtype) for dtype in dtypes}
    if is_cuda and (known := known_peak(torch.cuda.get_device_name(device), "bf16")) is not None:
        peaks["bf16"] = known.tflops
    return {
        "name": name,
        "memory_gb": round(_memory_bytes(device) / 1e9, 1),
        "memory_gb_per_s": round(stream, 2),
        "streaming_share": 1.0,
        "sustained_share": 1.0,
        "peak_tflops": peaks,
        # For a GPU's kernels; on a CPU the rows alone show the rates that shapes reach.
        "processors": torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1,
        "launch_us": round(launch_us, 2),
        "host_us": round(host_us, 2),
        "host_gb_per_s": round(host, 2),
        "copies_beside": is_cuda,
        "collective_gb_per_s": round(link.gb_per_s, 3),
        "collective_share": 1.0,
        "collective_us": round(link.call_us, 1),
        "collective_processors": GPU_COLLECTIVE_PROCESSORS if is_cuda else 0,
        "fill_k": GPU_FILL_K if is_cuda else 0,
        "tiles": [list(tile) for tile in (GPU_TILES if is_cuda else ((1, 1, 1.0),))],
        "gemm": gemm,
        "attention": attention,
    }


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time one call of `run`, in seconds. The result is the best mean over `ROUNDS` rounds, each of about `ROUND_SECONDS`."""

    def of(calls: int) -> float:
        _finish(device)
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        _finish(device)
        return (time.perf_counter() - begin) / calls

    of(1)
    calls = max(1, math.ceil(ROUND_SECONDS / of(1)))
    return min(of(calls) for _ in range(ROUNDS))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _source(device: torch.device) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    return f"triaxis bench --device, {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {where}"


def _gemms(device: torch.device, short: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Measure linear layers, and yield a row of the device file for each shape.

    A row's rate is the mean over three products: the forward, the input's gradient and the weight's gradient.
    """
    tokens, widths = (GPU_TOKENS, GPU_WIDTHS) if device.type == "cuda" else (TOKENS, WIDTHS)
    for m in tokens:
        for k in widths:
            for n in sorted({k, min(4 * k, widths[-1])}):
                shapes = ((m, k), (n, k), (m, n))
                x, weight, grad = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)

                def products(
                    x: torch.Tensor = x, weight: torch.Tensor = weight, grad: torch.Tensor = grad
                ) -> tuple[torch.Tensor, ...]:
                    return F.linear(x, weight), grad @ weight, grad.t() @ x

                tflops = 3 * 2e-12 * m * n * k / _seconds(products, device)
                yield {"m": m, "n": n, "k": k, "dtype": short, "tflops": _digits(tflops), "source": _source(device)}


def _attention(device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    for length in GPU_LENGTHS if device.type == "cuda" else LENGTHS:
        for head in HEAD_SIZES:
            count = 16 if device.type == "cuda" else 4
            q, k, v = (
                torch.randn(1, count, length, head, dtype=dtype, device=device, requires_grad=True) for _ in range(3)
            )
            grad = torch.randn(1, count, length, head, dtype=dtype, device=device)

            def forward(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            def both(
                q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, grad: torch.Tensor = grad
            ) -> tuple[torch.Tensor, ...]:
                return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

            once = _seconds(forward, device)
            back = max(_seconds(both, device) - once, once)
            # Two products over the causal half; five in the backward (2205.14135, algorithm 4).
            flops = 2 * 2 * count * length * length / 2 * head
            for direction, seconds, times in (("forward", once, 1.0), ("backward", back, 2.5)):
                yield {
                    "kernel": "sdpa",
                    "pass": direction,
                    "head": head,
                    "seq": length,
                    "tflops": _digits(1e-12 * times * flops / seconds),
                    "source": _source(device),
                }


def _stream_gb_per_s(device: torch.device) -> float:
    """Measure the rate of elementwise work, in 10^9 bytes per second.

    On a GPU this is the rate of a copy, since memory alone limits fused kernels. On a CPU it is the rate of the engine's SwiGLU,
    forward and backward, since exponentials take longer than memory access. As in the cost model, SwiGLU's bytes are 3 tensors
    [tokens, f] forward and 5 backward.
    """
    if device.type == "cuda":
        source = torch.zeros(STREAM_BYTES // 4, device=device)
        target = torch.empty_like(source)
        return 2 * STREAM_BYTES / _seconds(lambda: target.copy_(source), device) / 1e9
    x = torch.randn(GATED_TOKENS, 2 * GATED_WIDTH, device=device, requires_grad=True)
    grad = torch.randn(GATED_TOKENS, GATED_WIDTH, device=device)
    seconds = _seconds(lambda: torch.autograd.grad(ActivationKernel("swiglu", EAGER)(x), x, grad), device)
    return 8 * 4 * GATED_TOKENS * GATED_WIDTH / seconds / 1e9


def _host_gb_per_s(device: torch.device) -> float:
    """Measure copies between the device and pinned host memory, in 10^9 bytes per second per direction.

    On a GPU, both directions run at once. On a CPU, one direction runs after the other.
    """
    is_cuda = device.type == "cuda"
    places = [torch.zeros(STREAM_BYTES // 4, device=device) for _ in range(2)]
    kept = [torch.zeros(STREAM_BYTES // 4, pin_memory=is_cuda) for _ in range(2)]
    to_device, to_host = lane_of(device), lane_of(device)

    def both() -> None:
        arrived, departed = to_device.post([(places[0], kept[0])]), to_host.post([(kept[1], places[1])])
        to_device.wait(arrived)
        to_host.wait(departed)

    return (1 if is_cuda else 2) * STREAM_BYTES / _seconds(both, device) / 1e9


def _launch_us(device: torch.device) -> float:
    """Measure a tiny kernel's time on the GPU, in microseconds, in a CUDA graph, so that the host's time does not count."""
    one = torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_KERNELS):
            one.add_(1.0)
    return _seconds(graph.replay, device) / GRAPH_KERNELS * 1e6


def _call_us(device: torch.device) -> float:
    """Measure the host's time per call, in microseconds.

    The time of a layer with tiny tensors is divided by the cost model's number of kernels per layer.
    """
    seconds = {num_layers: _tiny_step(num_layers, device) for num_layers in (FEW_LAYERS, MANY_LAYERS)}
    of_a_layer = (seconds[MANY_LAYERS] - seconds[FEW_LAYERS]) / (MANY_LAYERS - FEW_LAYERS) / MICROBATCHES
    # A forward has kernels_per_layer kernels, and each half of a backward as many.
    return max(0.0, of_a_layer) / (3 * OURS.kernels_per_layer) * 1e6


def _tiny_step(num_layers: int, device: torch.device) -> float:
    config = Config.model_validate(
        {
            "model": {"num_layers": num_layers, **MODEL},
            "data": {"synthetic": True},
            "train": {"steps": 1, "global_batch_size": MICROBATCHES, "micro_batch_size": 1},
            "parallel": {"dp": 1},
            "precision": {"dtype": "bf16" if device.type == "cuda" else "fp32"},
        }
    )
    return min(real_steps(config, 0, build_chunks, device, num_steps=ROUNDS).seconds)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    import psutil

    return int(psutil.virtual_memory().total)


def measure_link(device: torch.device) -> MeasuredLink:
    """Measure collectives between two ranks on this machine.

    On a machine with a single GPU, the result has infinite bandwidth and no latency.
    """
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return MeasuredLink(math.inf, 0.0)
    with TemporaryDirectory(prefix="triaxis-") as folder:
        torch.multiprocessing.spawn(_time_gathers, (folder, device.type, torch.get_num_threads()), nprocs=2)
        small, large = json.loads((Path(folder) / "seconds.json").read_text())
    # A rank sends half of the whole tensor in a gather and in a scatter, and all of it in an all-reduce.
    return MeasuredLink(2 * LARGE / max(large - small, 1e-9) / 1e9, small / 3 * 1e6)


def _time_gathers(rank: int, folder: str, device_type: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=2, store=store)
    topology = Topology(RankGrid(ParallelSizes(tp=2)), rank, device)
    axis = topology.axis("tp")
    found = []
    for num_bytes in (SMALL, LARGE):
        whole = torch.zeros(num_bytes // 4, device=device)
        calls = (
            lambda whole=whole: axis.all_gather(whole[: len(whole) // 2], PURPOSE).wait(),
            lambda whole=whole: axis.reduce_scatter(whole, PURPOSE).wait(),
            lambda whole=whole: axis.all_reduce(whole.clone(), PURPOSE).wait(),
        )
        total = 0.0
        for call in calls:
            seconds = []
            for _ in range(4 * ROUNDS):
                axis.barrier(device, PURPOSE)
                _finish(device)
                begin = time.perf_counter()
                call()
                _finish(device)
                seconds.append(time.perf_counter() - begin)
            # The median, since both ranks wait for the slower one.
            total += median(seconds)
        found.append(total)
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(found))
    topology.close()
    dist.destroy_process_group()


def _digits(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")
