"""The work of a whole step of each model, from four small ones: it grows by equal amounts with each layer and each microbatch.

    work(L, m) = work(2, 2) + (L - 2) a layer + (m - 2) a microbatch + (L - 2) (m - 2) a layer of a microbatch

Two, so that what a first or last one does apart is in it.
"""

from collections.abc import Callable, Mapping

from benchmarks.gpu_code.cases import IN_FP8, MODELS, run_of
from benchmarks.gpu_code.golden import Work, step_key
from benchmarks.gpu_code.step import PARTS, StepRecord, record_step
from benchmarks.gpu_contenders.shapes import SHAPES
from triaxis.engine.config.tree import Config

FEWEST = 2

Amounts = Mapping[tuple[str, str], int]


def model_steps() -> dict[str, Work]:
    """Return the work of a step of every model and micro batch size, without FP8 and with it."""
    return {
        step_key(name, size, in_fp8=in_fp8): model_step(
            name, size, SHAPES[name].model["num_layers"], SHAPES[name].samples_per_step, in_fp8=in_fp8
        )
        for in_fp8 in (False, True)
        for name, sizes in MODELS.items()
        for size in sizes
    }


def model_step(name: str, micro_batch_size: int, num_layers: int, num_samples: int, *, in_fp8: bool) -> Work:
    """Return the work of one step of so many layers and samples."""

    def run(layers: int, microbatches: int) -> Config:
        words = IN_FP8 if in_fp8 else ()
        return run_of(name, micro_batch_size, words, num_layers=layers, num_microbatches=microbatches)

    return added_up(run, num_layers, num_samples // micro_batch_size)


def added_up(run: Callable[[int, int], Config], num_layers: int, num_microbatches: int) -> Work:
    """Return the work of a step, from four with at most 3 layers and microbatches.

    Args:
        run: the configuration with so many layers and microbatches.
        num_layers, num_microbatches: of the step, at least 2.
    """
    base, layer, micro, both = (
        _amounts(record_step(run(FEWEST + more_layers, FEWEST + more)))
        for more_layers, more in ((0, 0), (1, 0), (0, 1), (1, 1))
    )
    layers, microbatches = num_layers - FEWEST, num_microbatches - FEWEST

    def at(key: tuple[str, str]) -> int:
        a, b, c, d = (amounts.get(key, 0) for amounts in (base, layer, micro, both))
        return a + layers * (b - a) + microbatches * (c - a) + layers * microbatches * (d - c - b + a)

    return _work({key: at(key) for key in base | layer | micro | both})


def whole(record: StepRecord) -> Work:
    """Return the work of a step that ran as a whole."""
    return _work(_amounts(record))


def _amounts(record: StepRecord) -> dict[tuple[str, str], int]:
    found = {("products", ""): sum(record.products.values()), ("attentions", ""): record.attentions}
    found |= {("calls", key): count for key, count in record.counts.items()}
    found |= {("elements", key): count for key, count in record.elements.items()}
    for part, moved in record.eager.items():
        found |= {("bytes", part): moved.bytes, ("launches", part): moved.launches}
    return found


def _work(amounts: Amounts) -> Work:
    of_kind = {kind: {key: n for (found, key), n in amounts.items() if found == kind} for kind in ("calls", "elements")}
    return Work(
        calls=of_kind["calls"],
        elements=of_kind["elements"],
        eager={part: (amounts["bytes", part], amounts["launches", part]) for part in PARTS},
        products=amounts["products", ""],
        attentions=amounts["attentions", ""],
    )
