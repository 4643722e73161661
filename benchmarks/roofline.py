"""Roofline of a training step: the least time that each model needs on each card, by what it does, and the share of the peak.

    python -m benchmarks.roofline

    products, attention       FLOPs of the shapes / rates of configs/devices        as `triaxis plan` times them
    elementwise, loss,        bytes of `benchmarks/gpu_code/golden.json` / rate of a stream, and a launch for each kernel:
    optimizer                 what inductor's kernels and torch's operators of one step move
    main grads                what the epilogue of a weight gradient's product moves beyond a 16-bit result

    FP8: linear layers but the head have its rates (`tensorwise`, torch's GEMM). What rounds is among the elementwise functions, and
    so are the sums of weight gradients, which this GEMM does not make itself.

Nothing is measured here, and no GPU or triton is needed.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.gpu_code.cards import CARDS
from benchmarks.gpu_code.cases import IN_FP8, MODELS, run_of
from benchmarks.gpu_code.golden import Golden, Work, committed, step_key
from benchmarks.gpu_contenders.shapes import SHAPES
from triaxis.engine.config.plan import batch_plan, parallel_sizes, rank_grid
from triaxis.engine.config.tree import Config
from triaxis.engine.telemetry.record.flops import model_flops_per_token
from triaxis.launch.tuning.choose_layout import MARGIN
from triaxis.models.predict.rank_memory import predict
from triaxis.models.predict.step_time.cluster import cluster_of
from triaxis.models.predict.step_time.device import Device
from triaxis.models.predict.step_time.facts import Gemm, head_gemm, layer_gemms, layer_work
from triaxis.models.predict.step_time.implementation import OURS
from triaxis.models.predict.step_time.layer import LayerTimer
from triaxis.models.predict.step_time.links import Links

DEVICES: Mapping[str, str] = {"H100-SXM-80GB": "sm_90", "H200-SXM-141GB": "sm_90", "A100-SXM-80GB": "sm_80"}
"""Cards, and the code that runs on each."""

CEILING = 8192
"""Sizes of the product whose rate is the peak of r, as in `benchmarks.gpu`."""

PARTS = ("products", "attention", "elementwise", "cross-entropy", "main grads", "optimizer")


@dataclass(frozen=True, slots=True)
class Roofline:
    """A step of one model on one card.

    Attributes:
        seconds: of a step, by part.
        tokens: of a step.
        flops: of the model in a step.
        ceiling, peak: FLOP/s of a large product, and of the data sheet.
    """

    model: str
    device: str
    micro_batch_size: int
    seconds: Mapping[str, float]
    tokens: int
    flops: float
    ceiling: float
    peak: float

    @property
    def us_per_token(self) -> float:
        return sum(self.seconds.values()) / self.tokens * 1e6

    @property
    def rate(self) -> float:
        """Return the FLOP/s of the model."""
        return self.flops / sum(self.seconds.values())


def rooflines(golden: Golden) -> list[Roofline]:
    """Return a row for each model and card, with the largest micro batch of the model that is predicted to fit."""
    found = (largest_that_fits(golden, model, device) for model in MODELS for device in DEVICES)
    return [row for row in found if row is not None]


def pairs(golden: Golden) -> list[tuple[Roofline, Roofline]]:
    """Return the rows without FP8 and with it, of the models and cards that have both."""
    found = []
    for model in MODELS:
        for device in (each for each, code in DEVICES.items() if CARDS[code].has_fp8):
            plain, in_fp8 = (largest_that_fits(golden, model, device, in_fp8=each) for each in (False, True))
            if plain is not None and in_fp8 is not None:
                found.append((plain, in_fp8))
    return found


def largest_that_fits(golden: Golden, model: str, device_name: str, *, in_fp8: bool = False) -> Roofline | None:
    """Return the row of a model on a card; None where none of its micro batches is predicted to fit."""
    device, shape = cluster_of(f"1x{device_name}").load_device(), SHAPES[model]
    for size in MODELS[model]:
        layers, microbatches = shape.model["num_layers"], shape.samples_per_step // size
        words = IN_FP8 if in_fp8 else ()
        config = run_of(model, size, words, num_layers=layers, num_microbatches=microbatches)
        needed = predict(config, parallel_sizes(config)).fullest.total
        if needed <= device.memory_gb * 1e9 * (1 - MARGIN):
            seconds = step_seconds(golden, golden.steps[step_key(model, size, in_fp8=in_fp8)], config, device_name)
            flops = model_flops_per_token(config.model) * shape.tokens_per_step
            ceiling = device.gemm_tflops(CEILING, CEILING, CEILING) * 1e12
            peak = device.peak_tflops["bf16"] * 1e12
            return Roofline(model, device_name, size, seconds, shape.tokens_per_step, flops, ceiling, peak)
    return None


def step_seconds(golden: Golden, work: Work, config: Config, device_name: str) -> dict[str, float]:
    """Return the seconds of a step by part.

    Args:
        golden: bytes and launches of the functions.
        work: of this step.
        config: of the run, on one GPU.
        device_name: of configs/devices.
    """
    cluster, sizes = cluster_of(f"1x{device_name}"), parallel_sizes(config)
    device, grid = cluster.load_device(), rank_grid(config, sizes)
    timer = LayerTimer(config, sizes, device, Links(cluster, device, grid), OURS)
    count, layers = batch_plan(config, sizes.dp).num_microbatches, range(config.model.num_layers)
    linears, head = layers_gemms(config), [head_gemm(config, sizes)]
    products, added = _products(timer, head)
    if config.precision.fp8 is None:
        of_linears, of_sums = _products(timer, linears)
    else:
        narrow = LayerTimer(config, sizes, device, Links(cluster, device, grid), replace(OURS, fp8=True, cast_bytes=0))
        of_linears, _ = _products(narrow, linears)
        # A result in fp32, 2 bytes more; its sum is an operator.
        of_sums = sum(timer.stream(2 * gemm.n * gemm.k) for gemm in linears)
    products, added = products + of_linears, added + of_sums
    cores = sum(sum(timer.core(layer_work(config, sizes, OURS, layer))) for layer in layers)
    moved = _moved(golden, work, DEVICES[device_name])
    return {
        "products": count * products + timer.launches(work.products),
        "attention": count * cores + timer.launches(work.attentions),
        "main grads": count * added,
    } | {part: timer.stream(moved[part][0]) + timer.launches(moved[part][1]) for part in moved}


def _products(timer: LayerTimer, gemms: Sequence[Gemm]) -> tuple[float, float]:
    """Return the seconds of products, forward and backward, without the sums of weight gradients; and of those."""
    added = sum(timer.added(gemm.n * gemm.k) for gemm in gemms)
    return sum(timer.products(gemms)) - added, added


def step_gemms(config: Config) -> list[Gemm]:
    """Return the products of a microbatch's forward: those of all layers, and the head's."""
    return [*layers_gemms(config), head_gemm(config, parallel_sizes(config))]


def layers_gemms(config: Config) -> list[Gemm]:
    """Return the products of a microbatch's forward in all layers."""
    sizes = parallel_sizes(config)
    return [gemm for layer in range(config.model.num_layers) for gemm in layer_gemms(config, sizes, layer).values()]


def _moved(golden: Golden, work: Work, card: str) -> dict[str, tuple[float, int]]:
    """Return (bytes, launches) of compiled functions and of torch's operators, by part."""
    found: dict[str, tuple[float, int]] = dict(work.eager)
    for key, calls in work.calls.items():
        function = golden.functions[key]
        num_bytes, launches = found[function.part]
        own = work.elements[key] * function.bytes_per_element(card)
        found[function.part] = num_bytes + own, launches + calls * function.code[card].launches
    return found


def table(rows: Sequence[Roofline]) -> str:
    """Return the rows as a Markdown table: microseconds per token, and shares of the peak."""
    lines = [f"| model, micro batch | card | {' | '.join(PARTS)} | us per token | r | of the data sheet |"]
    lines += ["|" + "---|" * (len(PARTS) + 5)]
    for row in rows:
        parts = [row.seconds[part] / row.tokens * 1e6 for part in PARTS]
        numbers = [*(f"{part:.2f}" for part in parts), f"{row.us_per_token:.1f}"]
        shares = [f"{row.rate / row.ceiling:.2f}", f"{row.rate / row.peak:.2f}"]
        cells = [f"{row.model}, {row.micro_batch_size}", row.device, *numbers, *shares]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fp8_table(found: Sequence[tuple[Roofline, Roofline]]) -> str:
    """Return what FP8 makes of the rows as a Markdown table: microseconds per token, and the ratio."""
    parts = ("products", "elementwise", "main grads")
    lines = [f"| model, micro batch | card, FP8 | {' | '.join(parts)} | us per token | in bf16 | times as fast |"]
    lines += ["|" + "---|" * (len(parts) + 5)]
    for plain, row in found:
        own = [f"{row.seconds[part] / row.tokens * 1e6:.2f}" for part in parts]
        ends = [f"{row.us_per_token:.1f}", f"{plain.us_per_token:.1f}", f"{plain.us_per_token / row.us_per_token:.2f}"]
        lines.append(f"| {' | '.join([f'{row.model}, {row.micro_batch_size}', row.device, *own, *ends])} |")
    return "\n".join(lines)


def rates(names: Sequence[str]) -> str:
    """Return the rates of the cards that the table is made with."""
    lines = [
        "| card | large product, TFLOP/s | data sheet, TFLOP/s | stream, TB/s | launch, us |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        device: Device = cluster_of(f"1x{name}").load_device()
        large, peak = device.gemm_tflops(CEILING, CEILING, CEILING), device.peak_tflops["bf16"]
        stream = device.stream_bytes_per_s / 1e12
        lines.append(f"| {name} | {large:.0f} | {peak:.0f} | {stream:.2f} | {device.launch_us:.0f} |")
    return "\n".join(lines)


def text(golden: Golden) -> str:
    """Return what the command prints."""
    return f"{table(rooflines(golden))}\n\n{rates(list(DEVICES))}\n\n{fp8_table(pairs(golden))}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.roofline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    print(text(committed()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
