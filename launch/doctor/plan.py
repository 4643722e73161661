"""Derive what `triaxis doctor` checks from a run's configuration: message sizes to measure, folders, data files, needs."""

from collections.abc import Mapping
from pathlib import Path

from triaxis.engine.config.quantities.plan import stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.indexed import bin_path, idx_path
from triaxis.engine.data.run_tokenizer import corpora_of
from triaxis.engine.layout.axis_groups import OF_REPLICAS
from triaxis.engine.layout.rank_grid import Coordinates, ParallelSizes
from triaxis.launch.doctor.records import Needs, Size
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.predict.terms import accumulation_bytes
from triaxis.models.predict.traffic import BYTES_PER_ELEMENT, expected_traffic
from triaxis.models.specs import num_parameters

AXES = (
    "tp",
    "cp",
    "kv_replicas",
    "sample",
    "experts",
    "expert_dp",
    "dp",
    *OF_REPLICAS,
    "ends",
    "pp_forward",
    "pp_backward",
)
"""Axes in the order of measurement; `world` is left out, since it carries only a few bytes per step."""

NODE_PATH_BYTES = 4 * 2**20
"""Message size from node to node, for any layout."""

RUNS_DIR = "runtime.runs_dir"
CHECKPOINT_DIR = "checkpoint.dir"


def message_sizes(config: Config, sizes: ParallelSizes) -> list[Size]:
    """Choose a typical message for each axis and operation. All ranks compute the same list.

    Calls are grouped by pipeline stage and purpose (their label in the ledger). The message has the mean size in the group that
    sends the most bytes.
    """
    config = resolve_recompute(config, sizes)
    stages = stages_of(config)
    largest: dict[tuple[str, str], Size] = {}
    most: dict[tuple[str, str], int] = {}
    for pp in range(sizes.pp):
        traffic = expected_traffic(config, sizes, Coordinates(pp=pp, dp=0, cp=0, tp=0), stages)
        for flow, volume in traffic.items():
            key = (flow.axis, flow.op)
            if flow.axis not in AXES or flow.op == "recv" or volume.wire_bytes <= most.get(key, 0):
                continue
            most[key] = volume.wire_bytes
            mean = _called_bytes(flow.op, _ranks(flow.axis, config, sizes), volume.wire_bytes // volume.calls)
            largest[key] = Size(flow.axis, flow.op, mean, volume.calls)
    return sorted(largest.values(), key=lambda one: (AXES.index(one.axis), one.op))


def _ranks(axis: str, config: Config, sizes: ParallelSizes) -> int:
    others = {
        sizes.owner_axis("dp"): sizes.owners("dp"),
        sizes.owner_axis("expert_dp"): sizes.owners("expert_dp"),
        "dp_replicas": sizes.dp_replicas,
        "kv_replicas": max(1, sizes.tp // config.model.kv_heads),
        "sample": sizes.cp * sizes.tp,
        "experts": sizes.expert_ranks,
        "ends": sizes.num_ends,
    }
    return others.get(axis) or sizes.size(axis.partition("_")[0])


def _called_bytes(op: str, size: int, wire: int) -> int:
    """Compute a call's tensor bytes from the bytes that a rank sends: the inverse of `models.predict.layer_calls.wire_bytes`."""
    if op == "all_reduce":
        return wire * size // (2 * (size - 1))
    if op in ("reduce_scatter", "all_to_all", "all_to_all_rows"):
        # Rows that stay on the rank are as many as go to any other rank.
        return wire * size // (size - 1)
    return wire // (size - 1) if op == "all_gather" else wire


def folders(config: Config) -> Mapping[str, Path]:
    """Folders that the run writes to, by configuration key."""
    found = {RUNS_DIR: Path(config.runtime.runs_dir)}
    if config.checkpoint.saves and config.checkpoint.dir is not None:
        found[CHECKPOINT_DIR] = Path(config.checkpoint.dir)
    if not config.data.synthetic and config.data.cache_dir is not None:
        found["data.cache_dir"] = Path(config.data.cache_dir)
    return found


def data_files(config: Config) -> list[Path]:
    """Files of all corpora that the run's training phases name; empty for a run on random tokens."""
    return [path for prefix in corpora_of(config) for path in (bin_path(prefix), idx_path(prefix))]


def needs(config: Config, backend: str) -> Needs:
    """Compute a checkpoint's size and the folders to share. The index cache is not shared; each node builds its own."""
    saves = config.checkpoint.saves
    saved_to = CHECKPOINT_DIR if config.checkpoint.dir is not None else RUNS_DIR
    # A checkpoint holds each parameter's state kinds in the accumulation dtype.
    numel = num_parameters(config.model)
    bytes_each = len(config.state_kinds) * accumulation_bytes(BYTES_PER_ELEMENT[config.precision.dtype])
    return Needs(
        backend,
        save_bytes=numel * bytes_each if saves else 0,
        kept_saves=config.checkpoint.keep_last,
        shared=tuple(dict.fromkeys((RUNS_DIR, *([saved_to] if saves else [])))),
        saved_to=saved_to,
    )
