"""The kinds of the optimizer's state: what a rank keeps of each parameter that it owns, and a checkpoint holds (no torch here)."""

from typing import Literal

StateKind = Literal["master", "exp_avg", "exp_avg_sq"]
STATE_KINDS: tuple[StateKind, ...] = ("master", "exp_avg", "exp_avg_sq")
