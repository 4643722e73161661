"""A saved view of the runs in a wandb project: our panels in our order, where wandb would sort them by the alphabet.

python -P -m launch.report.wandb_workspace ENTITY PROJECT    needs a key, a network, and: pip install 'triaxis[workspace]'
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from engine.errors import TriaxisError

NAME = "Triaxis"
STEPS, TOKENS = "train/step", "train/consumed_tokens"

Panel = tuple[str, str, tuple[str, ...]]
"""Title, x axis, curves."""

SECTIONS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Loss",
        (
            ("Training loss, nats per token", STEPS, ("train/loss",)),
            ("Validation loss, nats per token", STEPS, ("train/val_loss",)),
            ("Training loss over tokens", TOKENS, ("tokens/loss",)),
            ("Validation loss over tokens", TOKENS, ("tokens/val_loss",)),
        ),
    ),
    (
        "Optimizer",
        (
            ("Learning rate", STEPS, ("optim/lr",)),
            ("Gradient norm, before clipping", STEPS, ("optim/grad_norm",)),
        ),
    ),
    (
        "Speed",
        (
            ("Tokens per second, all ranks", STEPS, ("perf/tokens_per_second",)),
            ("MFU and HFU", STEPS, ("perf/mfu", "perf/hfu")),
            (
                "TFLOP/s per device",
                STEPS,
                ("perf/model_tflops_per_device", "perf/hardware_tflops_per_device"),
            ),
            ("Peak memory of rank 0, GiB", STEPS, ("memory/peak_gib",)),
        ),
    ),
    (
        "Where the time goes",
        (
            (
                "Seconds per step",
                STEPS,
                (
                    "time/compute_seconds",
                    "time/exposed_tp_seconds",
                    "time/bubble_seconds",
                    "time/exposed_pp_seconds",
                    "time/exposed_dp_seconds",
                    "time/optimizer_seconds",
                    "time/data_seconds",
                    "time/checkpoint_seconds",
                    "time/other_seconds",
                ),
            ),
            (
                "Bubble, measured and of the schedule",
                STEPS,
                ("pipeline/bubble_fraction", "pipeline/schedule_bubble_fraction"),
            ),
            (
                "Waits for communication, of the step",
                STEPS,
                ("comm/exposed_tp_fraction", "comm/exposed_pp_fraction", "comm/exposed_dp_fraction"),
            ),
        ),
    ),
    (
        "Attempts and data",
        (
            ("Attempt", STEPS, ("train/attempt",)),
            ("Unmasked tokens per step", STEPS, ("data/loss_tokens",)),
        ),
    ),
)
"""Panels by section. Every curve is a name of `engine.telemetry.outlets.sections` or of the wandb sink."""


def build(entity: str, project: str) -> Any:
    """The workspace, not saved yet.

    Raises:
        TriaxisError: the package that knows workspaces is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise TriaxisError(
            f"wandb-workspaces is not installed ({error}), and wandb itself cannot save a view of a project. Install it with: "
            "pip install 'triaxis[workspace]'. The runs' pages work without it."
        ) from None
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[
            workspaces.Section(
                name=title,
                is_open=True,
                panels=[panels.LinePlot(title=name, x=x, y=list(curves)) for name, x, curves in own],
            )
            for title, own in SECTIONS
        ],
    )


def main(argv: Sequence[str]) -> int:
    """Save it to a project and print where it is."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.report.wandb_workspace", description=NAME + "'s panels in wandb"
    )
    parser.add_argument("entity", metavar="ENTITY", help="user or team")
    parser.add_argument("project", metavar="PROJECT", help="as in telemetry.wandb.project")
    chosen = parser.parse_args(argv)
    try:
        print(build(chosen.entity, chosen.project).save().url)
    except TriaxisError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
