"""Secrets of the environment stay out of what is written down (no torch here).

Nothing of ours writes an environment variable; an error's text may quote one (a key in an address, say), so whatever quotes errors
passes through here.
"""

import os
import re
from collections.abc import Mapping

_NAMES = re.compile(r".*(API_?KEY|ACCESS_KEY|TOKEN|SECRET|PASSWORD|PASSWD)", re.IGNORECASE)
_LEAST_LENGTH = 8
"""A shorter value is a word or a number that other text may well contain."""

REDACTED = "[redacted]"


def without_secrets(text: str, variables: Mapping[str, str] | None = None) -> str:
    """`text` with the value of every variable that is named like a secret (WANDB_API_KEY, HF_TOKEN, ...) blotted out.

    Args:
        text: about to be written.
        variables: the environment; None: this process's.
    """
    given = os.environ if variables is None else variables
    values = {value for name, value in given.items() if _NAMES.fullmatch(name) and len(value) >= _LEAST_LENGTH}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    return text
