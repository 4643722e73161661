"""The roofline: its table is on the page, and it agrees with the planner's times, which count bytes by formula."""

import pytest

from benchmarks.gpu_code.cases import run_of
from benchmarks.gpu_code.golden import committed
from benchmarks.gpu_contenders.shapes import SHAPES
from benchmarks.roofline import DEVICES, PARTS, Roofline, largest_that_fits, main, pairs, rooflines
from triaxis.engine.config.plan import parallel_sizes
from triaxis.models.predict.step_time.cluster import cluster_of
from triaxis.models.predict.step_time.estimate import Estimator

GOLDEN = committed()


@pytest.fixture(scope="module")
def rows() -> list[Roofline]:
    return rooflines(GOLDEN)


def test_the_command_prints_each_model_on_each_card(rows: list[Roofline], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert rows and all(any(row.model in line and row.device in line for line in said.splitlines()) for row in rows)


@pytest.mark.slow
def test_a_card_has_the_largest_micro_batch_that_fits(rows: list[Roofline]) -> None:
    sizes = {(row.model, row.device): row.micro_batch_size for row in rows}
    assert sizes["llama-8b-4k-12l", "H200-SXM-141GB"] == 2
    assert sizes["llama-8b-4k-12l", "H100-SXM-80GB"] == 1
    assert largest_that_fits(GOLDEN, "llama-8b-4k", "H100-SXM-80GB") is None
    assert {row.device for row in rows} == set(DEVICES)


@pytest.mark.slow
def test_it_is_near_the_planners_time(rows: list[Roofline]) -> None:
    """Both time products and attention alike; bytes of the rest are counted there by formula, here from code and operators."""
    for row in rows:
        shape, size = SHAPES[row.model], row.micro_batch_size
        layers, count = shape.model["num_layers"], shape.samples_per_step // size
        config = run_of(row.model, size, num_layers=layers, num_microbatches=count)
        planned = Estimator(cluster_of(f"1x{row.device}")).closed_form(config, parallel_sizes(config)).seconds
        assert sum(row.seconds.values()) == pytest.approx(planned, rel=0.05), row


@pytest.mark.slow
def test_shares_follow_from_the_seconds(rows: list[Roofline]) -> None:
    for row in rows:
        assert tuple(sorted(row.seconds)) == tuple(sorted(PARTS)) and min(row.seconds.values()) > 0
        assert 0 < row.rate < row.ceiling < row.peak
        least = row.flops / sum(row.seconds.values()) / row.peak
        assert row.rate / row.peak == pytest.approx(least)


@pytest.mark.slow
def test_fp8_is_of_the_products_alone() -> None:
    """Compare equal micro batches: attention is the same, products take between half and all, and rounding is elementwise."""
    found = [(plain, row) for plain, row in pairs(GOLDEN) if plain.micro_batch_size == row.micro_batch_size]
    assert {plain.model for plain, _ in found} >= {"gpt-1.3b", "llama-8b-4k-12l"}
    for plain, row in found:
        assert row.seconds["attention"] == pytest.approx(plain.seconds["attention"])
        assert plain.seconds["products"] / 2 < row.seconds["products"] < plain.seconds["products"]
        assert row.seconds["elementwise"] > plain.seconds["elementwise"]
