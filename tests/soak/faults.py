"""The faults of a soak, drawn from a seed: kind, rank, step and details, so that the same seed disturbs in the same way."""

import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tests.soak.scene import GRID, LAYERS_PER_STAGE, NUM_MICROBATCHES, RANKS, SAVE_INTERVAL

EARLIEST, LATEST = 3, 2 * SAVE_INTERVAL
"""Steps between the start of an attempt, or the end of the fault before, and a fault: an attempt's first step has other limits."""

_WEIGHTS = ("attention.proj.weight", "mlp.norm.weight", "mlp.up.weight", "mlp.down.weight")
_MODULES = ("attention", "mlp")
_MANTISSA_BITS = 23
_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Kind(Enum):
    """What can happen; the value is the word on the command line."""

    KILL_RANK = "kill-rank"
    KILL_NODE = "kill-node"
    STOP_RANK = "stop-rank"
    PREEMPT = "preempt"
    FULL_DISK = "full-disk"
    CUT_LINK = "cut-link"
    NAN = "nan"
    SLOW_RANK = "slow-rank"
    FLIP_BIT = "flip-bit"
    READER_ENDS = "reader-ends"
    PAUSED_TERMINAL = "paused-terminal"
    FULL_LOG_DISK = "full-log-disk"
    STOP_IN_VALIDATION = "stop-in-validation"
    REMOVED_RUN_DIR = "removed-run-dir"


WORDS = {
    Kind.KILL_RANK: "SIGKILL to a rank",
    Kind.KILL_NODE: "SIGKILL to a launcher: its node dies",
    Kind.STOP_RANK: "SIGSTOP to a rank",
    Kind.PREEMPT: "SIGTERM, SIGUSR1 or SIGHUP to one rank",
    Kind.FULL_DISK: "the disk of the checkpoints is full",
    Kind.CUT_LINK: "the link between the hosts is cut",
    Kind.NAN: "a NaN in the output of a module",
    Kind.SLOW_RANK: "a rank computes slowly",
    Kind.FLIP_BIT: "one bit of one weight of one replica flips",
    Kind.READER_ENDS: "the reader of rank 0's terminal ends; a preemption some steps later",
    Kind.PAUSED_TERMINAL: "the reader of rank 0's terminal stops reading for some steps, in which rank 0 prints over 1 MiB",
    Kind.FULL_LOG_DISK: "the disk of the run directory (metrics, events, logs) is full for some steps",
    Kind.STOP_IN_VALIDATION: "SIGTERM, SIGUSR1 or SIGHUP to one rank during a validation",
    Kind.REMOVED_RUN_DIR: "the run directory is removed; a preemption some steps later",
}
"""What a kind does, for people."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        number: from 1.
        rank: that it strikes; of a node that dies, one of its ranks. Full disks, a cut link and a removed directory strike all,
            faults of the terminal rank 0.
        after_steps: made since the attempt began or the fault before was over.
        signal: of a preemption, also during a validation.
        layer: global number, of the rank's stage.
        module, weight: of that layer, where a NaN comes from and whose bit flips.
        bit: of the weight's first element, from the lowest.
        microbatch: of the replica, in which the NaN comes.
    """

    number: int
    kind: Kind
    rank: int
    after_steps: int
    signal: signal.Signals
    layer: int
    module: str
    weight: str
    bit: int
    microbatch: int

    @property
    def where(self) -> str:
        """What it strikes, for people."""
        match self.kind:
            case Kind.KILL_NODE:
                return f"host {GRID.node(self.rank)}"
            case Kind.FULL_DISK | Kind.CUT_LINK | Kind.FULL_LOG_DISK | Kind.REMOVED_RUN_DIR:
                return "all ranks"
            case Kind.READER_ENDS | Kind.PAUSED_TERMINAL:
                return "host 0"
            case Kind.PREEMPT | Kind.STOP_IN_VALIDATION:
                return f"rank {self.rank}, {self.signal.name}"
            case Kind.NAN:
                return f"rank {self.rank}, {self.module_name}"
            case Kind.FLIP_BIT:
                return f"rank {self.rank}, {self.weight_name}"
        return f"rank {self.rank}"

    @property
    def module_name(self) -> str:
        return f"layers.{self.layer}.{self.module}"

    @property
    def weight_name(self) -> str:
        return f"layers.{self.layer}.{self.weight}"


def draw(seed: int, num_faults: int, kinds: Sequence[Kind] = tuple(Kind)) -> list[Fault]:
    """So many faults in a random order, each kind as often as the others or once more."""
    chance = random.Random(seed)
    whole, rest = divmod(num_faults, len(kinds))
    drawn = [*kinds] * whole + chance.sample(list(kinds), rest)
    chance.shuffle(drawn)
    num_drawn = Counter[Kind]()
    faults = []
    for number, kind in enumerate(drawn, start=1):
        rank = chance.choice(RANKS)
        first_layer = GRID.coordinates(rank).pp * LAYERS_PER_STAGE
        fault = Fault(
            number=number,
            kind=kind,
            rank=rank,
            after_steps=chance.randint(EARLIEST, LATEST),
            signal=_PREEMPTING[num_drawn[kind] % len(_PREEMPTING)],
            layer=first_layer + chance.randrange(LAYERS_PER_STAGE),
            module=chance.choice(_MODULES),
            weight=chance.choice(_WEIGHTS),
            bit=chance.randrange(_MANTISSA_BITS),
            microbatch=chance.randrange(NUM_MICROBATCHES),
        )
        num_drawn[kind] += 1
        faults.append(fault)
    return faults
