"""Batch and learning rate of a run, from scratch or from a model's weights.

    tokens per step   GPT-3's for the model's size, and at most a thousandth of all tokens
    peak              GPT-3's for the model's size, after a linear warm-up over a hundredth of the steps
    decay             by cosine to a tenth of the peak at the last step

The size's row of GPT-3's table (2005.14165, table 2.1) is the first that is at least as large. Its peaks are at or below those of
models made since, so that a trained model forgets less. Warming up again and decaying again is what 2403.08763 found to match
training from scratch on old and new text, if some of the old text is mixed in.
"""

from dataclasses import dataclass

LEAST_STEPS = 1000
"""Steps that a run has room for: a shorter run has smaller batches."""

WARM_UP_SHARE = 100
"""One of so many steps warms up."""

LAST_SHARE = 10
"""The learning rate of the last step is one of so many parts of the peak."""


@dataclass(frozen=True, slots=True)
class Gpt3Row:
    """A model of GPT-3's table.

    Attributes:
        name: as in the paper.
        num_parameters: of the model.
        tokens_per_step: 0.5M, 1M, 2M and 3.2M of the paper, in powers of two.
        lr: peak learning rate.
    """

    name: str
    num_parameters: int
    tokens_per_step: int
    lr: float


GPT3 = (
    Gpt3Row("125M", 125 * 10**6, 2**19, 6.0e-4),
    Gpt3Row("350M", 350 * 10**6, 2**19, 3.0e-4),
    Gpt3Row("760M", 760 * 10**6, 2**19, 2.5e-4),
    Gpt3Row("1.3B", 1300 * 10**6, 2**20, 2.0e-4),
    Gpt3Row("2.7B", 2700 * 10**6, 2**20, 1.6e-4),
    Gpt3Row("6.7B", 6700 * 10**6, 2**21, 1.2e-4),
    Gpt3Row("13B", 13 * 10**9, 2**21, 1.0e-4),
    Gpt3Row("175B", 175 * 10**9, 3 * 2**20, 0.6e-4),
)
"""Table 2.1 of 2005.14165, from small to large."""


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """Batch and learning rate of a run.

    Attributes:
        row: of GPT3 that they are taken from.
        is_as_large: whether the row's model is; else it is the largest there.
        samples_per_step: the global batch that is aimed at; a layout may round it.
        lr, min_lr: peak, and learning rate at the last step.
    """

    row: Gpt3Row
    is_as_large: bool
    samples_per_step: int
    lr: float
    min_lr: float


def recipe(num_parameters: int, num_tokens: int, seq_length: int) -> TrainingRecipe:
    """Return the recipe for a model and a number of training tokens.

    Args:
        num_parameters: of the model; one above the table's largest has that one's row.
        num_tokens: of the whole run.
        seq_length: tokens of a sample.
    """
    row = next((row for row in GPT3 if row.num_parameters >= num_parameters), GPT3[-1])
    tokens_per_step = min(row.tokens_per_step, num_tokens // LEAST_STEPS)
    # Rounded, since 6e-4 / 10 has a long tail in binary.
    min_lr = float(f"{row.lr / LAST_SHARE:.3g}")
    return TrainingRecipe(
        row, row.num_parameters >= num_parameters, max(1, tokens_per_step // seq_length), row.lr, min_lr
    )


def warm_up_steps(num_steps: int) -> int:
    """Return the steps of linear warm-up of a run: a hundredth of them, at least one."""
    return -(-num_steps // WARM_UP_SHARE)
