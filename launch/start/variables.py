"""Check the numeric environment variables once, before anything starts."""

from collections.abc import Mapping

from triaxis.engine.errors import TopologyError, shown
from triaxis.engine.layout.rank_rules import MOST_RANKS

DEFAULT_PORT = "29500"
"""The port at which the nodes of a run meet, unless MASTER_PORT names another."""

NUMBERS = {
    "NNODES": (1, MOST_RANKS),
    "NPROC_PER_NODE": (1, MOST_RANKS),
    "OMP_NUM_THREADS": (1, 1024),
    "MASTER_PORT": (1, 65_535),
    "SLURM_RESTART_COUNT": (0, 10**6),
    "SLURM_STEP_NUM_TASKS": (1, 10**7),
    "SLURM_JOB_ID": (0, 2**32),
}
"""Variables read as whole numbers, with their least and largest values; an empty one counts as unset."""


def check_numbers(variables: Mapping[str, str]) -> None:
    """Check the `NUMBERS` that are set in the environment.

    Raises:
        TopologyError: some are not valid numbers; the message lists all of them.
    """
    wrong = []
    for name, (least, most) in NUMBERS.items():
        text = variables.get(name, "")
        # int() alone accepts other digits, blanks and underscores, and fails for thousands of digits.
        is_number = text.isascii() and text.isdecimal() and len(text) < 20
        if text and not (is_number and least <= int(text) <= most):
            wrong.append(
                f"{name}={shown(text)[1:-1]} in the environment: must be a whole number from {least:,} to {most:,}"
            )
    if wrong:
        raise TopologyError(f"{'; '.join(wrong)}. Ranks could not start with it. Set it to such a number, or unset it.")
