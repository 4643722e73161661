"""Choose batch size and learning rate for a run.

    tokens per step   GPT-3's for the model's size, and at most a thousandth of all tokens
    peak              GPT-3's for the model's size, after a linear warm-up over a hundredth of the steps
    decay             by cosine to a tenth of the peak at the last step

A model uses the first row of GPT-3's table (2005.14165, table 2.1) with at least as many parameters. A run that starts from a
model's weights has warm-up and decay as well, following 2403.08763.
"""

from dataclasses import dataclass

LEAST_STEPS = 1000
"""Fewest steps that a run is planned for: a run with few tokens gets smaller batches."""

WARM_UP_SHARE = 100
"""One step in this many warms up."""

LAST_SHARE = 10
"""The last step's learning rate is the peak divided by this."""


@dataclass(frozen=True, slots=True)
class Gpt3Row:
    """A model in GPT-3's table.

    Attributes:
        name: name in the paper.
        num_parameters: the model's parameter count.
        tokens_per_step: the paper's batch size in tokens (0.5M to 3.2M), as a power of two.
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
    """Batch size and learning rate for a run.

    Attributes:
        row: row of GPT3 with the batch and the learning rate.
        is_as_large: whether the row's model has at least as many parameters as the run's; False: the row is the table's largest.
        samples_per_step: target for the global batch, which a layout may round.
        lr, min_lr: peak learning rate, and learning rate at the last step.
    """

    row: Gpt3Row
    is_as_large: bool
    samples_per_step: int
    lr: float
    min_lr: float


def recipe(num_parameters: int, num_tokens: int, seq_length: int) -> TrainingRecipe:
    """Look up batch size and learning rate for a run.

    Args:
        num_parameters: the model's parameter count.
        num_tokens: training tokens for the whole run.
        seq_length: tokens per sample.
    """
    row = next((row for row in GPT3 if row.num_parameters >= num_parameters), GPT3[-1])
    tokens_per_step = min(row.tokens_per_step, num_tokens // LEAST_STEPS)
    samples_per_step = max(1, tokens_per_step // seq_length)
    return TrainingRecipe(row, row.num_parameters >= num_parameters, samples_per_step, row.lr, last_rate(row.lr))


def last_rate(lr: float) -> float:
    """Return the last step's learning rate, a tenth of the peak `lr`, rounded to three significant digits."""
    return float(f"{lr / LAST_SHARE:.3g}")


def warm_up_steps(num_steps: int) -> int:
    """Return the number of warm-up steps, a hundredth of all steps and at least one."""
    return -(-num_steps // WARM_UP_SHARE)
