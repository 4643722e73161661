"""Extensions that must be refused, in the form of `bad_configs.BAD`."""

from collections.abc import Sequence
from pathlib import Path

UNEVEN = Path(__file__).with_name("uneven.py")
"""An MLP with 3 numbers that are cut over tp."""

PARTS = Path(__file__).parents[2] / "models" / "gpt" / "own_parts.py"

BAD_EXTENSIONS: dict[str, tuple[Sequence[str], dict[str, int], Sequence[str]]] = {
    "a parameter of a part that tp cannot cut": (
        [f"model.extension={UNEVEN}", "parallel.tp=2"],
        {},
        [
            "model.extension.source = /",
            "mlp.specs lists three whose dim 0 of 3 cannot be cut evenly over parallel.tp = 2",
        ],
    ),
    "a factor of another loss": (
        [f"model.extension={PARTS}", "model.z_loss=0.1"],
        {},
        ["model.z_loss = 0.1", "is read by the engine's own loss", "model.z_loss = 0"],
    ),
    "a schedule that no extension gives": (
        ["optimizer.lr_schedule=extension"],
        {},
        ["lr_schedule = extension", "needs an Extension(schedule=..)", "lr_schedule = cosine"],
    ),
    "an update that no extension gives": (
        ["optimizer.name=extension"],
        {},
        ["optimizer.name = extension", "needs an Extension(update=..)", "name = adamw"],
    ),
    "a corpus that no extension gives": (
        ["data.train=extension:mine"],
        {},
        ["data.train = extension:mine", "names the corpus 'mine' of model.extension, which gives none"],
    ),
}
