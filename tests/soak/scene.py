"""Where the soak happens: one small run of 4 ranks on two hosts, its configuration, and how long what may take.

host 0   rank 0 (pp 0, dp 0)   rank 1 (pp 0, dp 1)      layers 0, 1      replicas on one host
  ===== the link =====                                                   the pipeline across it
host 1   rank 2 (pp 1, dp 0)   rank 3 (pp 1, dp 1)      layers 2, 3
"""

from dataclasses import dataclass

from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.resilience.hang.watch import HangLimits
from triaxis.engine.telemetry.outlets.terminal import MOST_BYTES

SIZES = ParallelSizes(pp=2, dp=2)
RANKS_PER_HOST = 2
GRID = RankGrid(SIZES, RANKS_PER_HOST)
NUM_HOSTS = GRID.num_nodes
RANKS = range(GRID.world_size)

LAYERS_PER_STAGE = 2
NUM_MICROBATCHES = 4
"""Of each replica in a step."""
SAMPLES_PER_STEP = NUM_MICROBATCHES * SIZES.dp

SAVE_INTERVAL = 8
LOG_INTERVAL = 4
EVAL_INTERVAL = 12
EVAL_STEPS = 3
"""Batches of a validation. Ranks agree on a stop two batches after its signal, so the third is left out."""

BACKGROUND_SAVE_STEPS = 6
"""Steps that are made while a save is written in the background: what each rank and then rank 0 has written is told with the next
step and read a step later (two times two), and each of the two writes may take a step."""

STEPS_AFTER_THE_LAST_FAULT = 10
ENDLESS_STEPS = 1_000_000

TIMEOUT_SECONDS = 120.0
"""After which a collective fails by itself; nine tenths of it are the limit of an attempt's first step."""

LEAVING_SECONDS = 10.0
"""From a decision to end to the end of the launcher: open files are closed, Python ends, torchrun looks at its ranks."""

START_SECONDS = 600.0
"""The soak's patience with an attempt that does not begin; no promise of the run's, and a busy machine needs minutes."""

KILL_WAIT_SECONDS = 30.0
"""SLURM's default (KillWait) between SIGTERM and SIGKILL: by then the state must be on the disk."""

PACE_SECONDS = 0.03
"""Each forward of a microbatch takes so long more, on all ranks: what a rank computes stands out from what a busy machine does."""
SLOW_PACE_SECONDS = 0.15
"""The same on a rank that is made slow."""

PLAN, ACTS = "plan.json", "acts.jsonl"
"""In the soak's folder: what ranks are to do to themselves, and what they have done (`disturb.py`)."""

DISK_BYTES = 48 * 2**20
"""Of the disk that checkpoints are written to; one checkpoint is below a megabyte."""

RUNS_DISK_BYTES = 48 * 2**20
"""Size of the disk of the run directory: some KiB per step, and a few MiB per paused terminal."""

ROWS_PER_PAGE = 4096 // 400
"""Rows of metrics.jsonl, each above 400 bytes, in one page of a full disk: a file's last page is its own."""

PRINTED_LINE_BYTES = 200
PRINTED_LINES = (MOST_BYTES + 2**18) // PRINTED_LINE_BYTES
"""Lines that rank 0 prints while its terminal is paused: more than the pipe (64 KiB) and the terminal's queue hold."""


@dataclass(frozen=True)
class Settings:
    """What may be chosen for a soak.

    Attributes:
        hang_seconds: `runtime.hang_seconds` of the run.
    """

    hang_seconds: float = 5.0

    @property
    def limits(self) -> HangLimits:
        return HangLimits.after(self.hang_seconds, TIMEOUT_SECONDS)


def config_text(settings: Settings, disk: str) -> str:
    """The run's YAML file; `disk` is the folder of its checkpoints."""
    layers = SIZES.pp * LAYERS_PER_STAGE
    return f"""\
model: {{num_layers: {layers}, hidden_size: 32, num_attention_heads: 2, seq_length: 16, vocab_size: 64}}
data: {{synthetic: true}}
train: {{steps: {ENDLESS_STEPS}, global_batch_size: {SAMPLES_PER_STEP}, micro_batch_size: 1, seed: 7}}
eval: {{interval: {EVAL_INTERVAL}, steps: {EVAL_STEPS}}}
parallel: {{tp: {SIZES.tp}, pp: {SIZES.pp}, dp: {SIZES.dp}}}
optimizer: {{lr: 1.0e-3, lr_schedule: constant}}
precision: {{dtype: fp32}}
checkpoint: {{interval: {SAVE_INTERVAL}, keep_last: 3, dir: {disk}}}
telemetry: {{log_interval: {LOG_INTERVAL}}}
resilience: {{on_nonfinite: rollback, max_rollbacks: 1000, replica_check_interval: 1}}
runtime: {{device: cpu, hang_seconds: {settings.hang_seconds}, timeout_seconds: {TIMEOUT_SECONDS}}}
"""


def host_of(rank: int) -> int:
    """The index of the host that a rank is on."""
    return GRID.node(rank)


def address(host: int) -> str:
    """Of a host on the link (`tests/netns.py`)."""
    return f"10.77.0.{host + 1}"


def replicas_of(rank: int) -> frozenset[int]:
    """The ranks that hold the same weights, this one among them."""
    stage = GRID.coordinates(rank).pp
    return frozenset(other for other in RANKS if GRID.coordinates(other).pp == stage)
