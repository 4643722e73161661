"""The saved view of a wandb project: every curve in it is one that a run sends."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.telemetry.outlets.sections import sections
from engine.telemetry.outlets.wandb import AGAINST_TOKENS
from launch.report import wandb_workspace
from tests.launch.report.test_report import SPLIT, STEP


def test_every_curve_is_sent_and_every_section_is_seen() -> None:
    sent = set(sections(replace(STEP, val_loss=2.0, time_split=SPLIT))) | {f"tokens/{name}" for name in AGAINST_TOKENS}
    panels = [panel for _, own in wandb_workspace.SECTIONS for panel in own]
    shown = {curve for _, _, curves in panels for curve in curves}
    assert shown <= sent and {x for _, x, _ in panels} <= sent
    assert {name.split("/")[0] for name in shown} == {name.split("/")[0] for name in sent}
    assert {name for name in sent if name.startswith("time/")} - shown == {
        *("time/step_seconds", "time/schedule_bubble_seconds", "time/slowest_compute_seconds")
    }


def test_it_is_saved_where_it_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made: dict[str, Any] = {}

    def workspace(**fields: Any) -> Any:
        made.update(fields)
        return SimpleNamespace(save=lambda: SimpleNamespace(url="saved there"))

    package, reports = ModuleType("wandb_workspaces"), ModuleType("wandb_workspaces.reports")
    plots, workspaces = ModuleType("wandb_workspaces.reports.v2"), ModuleType("wandb_workspaces.workspaces")
    vars(plots)["LinePlot"] = vars(workspaces)["Section"] = dict
    vars(workspaces)["Workspace"] = workspace
    vars(package)["workspaces"], vars(package)["reports"], vars(reports)["v2"] = workspaces, reports, plots
    for module in (package, reports, plots, workspaces):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert wandb_workspace.main(["me", "gpt"]) == 0
    assert capsys.readouterr().out == "saved there\n"
    assert (made["entity"], made["project"]) == ("me", "gpt")
    assert [section["name"] for section in made["sections"]] == [title for title, _ in wandb_workspace.SECTIONS]
    first = made["sections"][0]["panels"][0]
    assert first == {"title": "Training loss, nats per token", "x": "train/step", "y": ["train/loss"]}


def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    assert wandb_workspace.main(["me", "gpt"]) == 2
    assert "triaxis[workspace]" in capsys.readouterr().err
