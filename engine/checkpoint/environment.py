"""Describes the environment that must match for a bit-identical resume.

If anything in the environment differs, results match only to rounding.
"""

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from triaxis.engine.checkpoint.resume_rules import flat
from triaxis.engine.program import version
from triaxis.engine.step import Engine


def describe_environment(engine: Engine) -> dict[str, Any]:
    """Return a live engine's layout, kernels, device and versions, as JSON values.

    Recomputation and kernels are recorded as resolved, never as `auto`.
    """
    config, topology = engine.config, engine.topology
    sizes = topology.sizes
    device = topology.device
    return {
        "world_size": topology.grid.world_size,
        "nodes": topology.grid.num_nodes,
        **{name: getattr(sizes, name) for name in ("tp", "pp", "vpp", "dp", "dp_replicas", "cp", "ep", "etp")},
        "zero": config.parallel.zero,
        "sequence_parallel": config.parallel.sequence_parallel,
        "layers_per_stage": [stage.num_own for stage in engine.stages],
        "schedule": engine.schedule.name,
        "micro_batch_size": config.train.micro_batch_size,
        "bucket_bytes": config.optimizer.bucket_bytes,
        "recompute": engine.config.recompute.model_dump(mode="json"),
        "kernels": {name: one for name, one in engine.kernels.choices.named().items() if name != "decoding"},
        "dtype": config.precision.dtype,
        "deterministic": config.runtime.deterministic,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads_per_rank": torch.get_num_threads(),
        "versions": {
            "triaxis": version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def layout_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """List where a saved layout differs from this one, for example as `tp 2 -> 4`.

    Only the keys of `here` are compared.
    """
    was, now = dict(flat(there)), dict(flat(here))
    return [f"{key} {was.get(key, 'unknown')} -> {value}" for key, value in now.items() if was.get(key) != value]
