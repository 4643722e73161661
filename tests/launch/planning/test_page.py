"""The page of a plan: whole and self-contained, with the plan's numbers in every picture."""

import re
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path

import pytest

from tests.launch.html_page import Page, self_contained
from tests.launch.planning.test_search import CLUSTER, config_of
from triaxis.engine.errors import ConfigError
from triaxis.engine.telemetry.outlets.format import gigabytes, significant
from triaxis.launch.cli import main
from triaxis.launch.planning.page import render
from triaxis.launch.planning.search import Plan, search
from triaxis.models.predict.rank_memory import KINDS


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Of a model whose fastest layout that has a pipeline is the chosen one, so that each picture has something to show."""
    found = search(config_of(), CLUSTER, simulated=126)
    found.found = [one for one in found.found if one.sizes.pp > 1][:20]
    return found


def titles(html: str, section: str) -> list[str]:
    inside = re.search(rf'<section id="{section}">(.*?)</section>', html, re.DOTALL)
    assert inside is not None
    return [unescape(title) for title in re.findall(r"<title>(.*?)</title>", inside[1])]


def test_the_page_is_whole_and_text_is_never_markup(plan: Plan) -> None:
    html = render(plan, "<b>mine & 'yours'", "<i>5 days")
    page = self_contained(html)
    assert page.sections.keys() >= {"pareto", "layouts", "time", "memory", "schedule", "ranks", "config"}
    assert "Plan of <b>mine & 'yours'" in page.text and "<i>5 days" in page.text
    assert f"Chosen: {plan.best.layout}" in page.text


def test_every_layout_is_a_dot_and_the_front_is_a_staircase(plan: Plan) -> None:
    html = render(plan, "run")
    wanted = [
        f"{number}: {one.layout}: {significant(one.time.seconds)} s, {gigabytes(one.memory.fullest.total)}"
        for number, one in enumerate(plan.found, 1)
    ]
    assert sorted(titles(html, "pareto")) == sorted(wanted)
    assert html.count('<circle class="c0 large"') == 1 and html.count('<circle class="c1"') == len(plan.pareto) - 1 > 0
    (line,) = re.findall(r'<polyline class="c1" points="([^"]*)"', html)
    corners = [tuple(map(float, point.split(","))) for point in line.split()]
    assert len(corners) == 2 * len(plan.pareto)
    assert all(x0 <= x1 and y0 <= y1 for (x0, y0), (x1, y1) in pairwise(corners)), "down to the right"
    (chosen,) = re.findall(r'<circle class="c0 large" cx="([\d.]+)" cy="([\d.]+)"', html)
    assert (float(chosen[0]), float(chosen[1])) == corners[-2]
    layouts = Page(html).sections["layouts"]
    for one in plan.found:
        numbers = (
            f"{significant(one.time.seconds)}{one.tokens_per_second / 4:,.0f}{one.model_tflops:,.0f}{plan.mfu(one):.1%}"
        )
        assert numbers in layouts and one.layout in layouts


def test_a_layout_that_is_far_slower_does_not_flatten_the_plot(plan: Plan) -> None:
    slow = replace(plan.found[-1], time=replace(plan.best.time, seconds=9 * plan.best.time.seconds))
    html = render(replace(plan, found=[*plan.found, slow]), "run")
    page = self_contained(html)
    assert len(titles(html, "pareto")) == len(plan.found)
    assert "in the table alone: 1." in page.sections["pareto"]
    assert significant(slow.time.seconds) in page.sections["layouts"]


def test_pictures_have_the_numbers_of_the_chosen_layout(plan: Plan) -> None:
    html = render(plan, "run")
    best = plan.best
    assert titles(html, "memory") == [
        f"pp {pp}, {kind}: {gigabytes(getattr(held, kind))} ({getattr(held, kind) / held.total:.1%})"
        for pp, held in enumerate(best.memory.ranks)
        for kind in KINDS
        if getattr(held, kind)
    ]
    times = titles(html, "time")
    assert any(title.startswith("pp 1, compute: ") for title in times)
    assert {title.partition(",")[0] for title in times} >= {"pp 0", "pp 1"}
    actions = titles(html, "schedule")
    assert len(actions) >= 2 * best.sizes.pp * best.sizes.vpp
    assert all(
        re.fullmatch(r".* of microbatch \d+.*: [\d.]+ m?s, from [\d.]+ m?s to [\d.]+ m?s", title) for title in actions
    )
    assert [title.partition(",")[0] for title in titles(html, "ranks")] == [f"rank {rank}" for rank in range(4)]
    assert f"pp: {best.sizes.pp}" in Page(html).sections["config"]


def test_the_command_writes_the_page_and_refuses_another_ending(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "configs/gpt_125m.yaml", "--gpus", "2xH100", "--tokens", "26B"]
    assert main([*words, "--output", str(tmp_path / "plan.html")]) == 0
    assert f"wrote {tmp_path / 'plan.html'}" in capsys.readouterr().out
    page = self_contained((tmp_path / "plan.html").read_text())
    assert "Plan of configs/gpt_125m.yaml" in page.text and "GPU-hours" in page.text
    assert main([*words, "--output", "plan.pdf", "--output", "plan.json"]) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert "--output plan.pdf" in said and "--output plan.json" in said
