"""Build the configurations that a verification runs, from a config and a layout."""

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.quantities.run_phases import as_a_run
from triaxis.engine.config.schema.data import DataConfig
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.extension_parts import OWN_CORPUS
from triaxis.engine.config.schema.training import CONSTANT_RATE
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS
from triaxis.engine.errors import ConfigError
from triaxis.launch.start.command_line import layout_overrides
from triaxis.launch.verify.shrink import shrink
from triaxis.launch.verify.verdict.bounds import TOLERANCES
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.predict.recompute_choice import candidates

DOCUMENT_LENGTH = 3
"""Mean document length in random samples, in tokens, if the run depends on documents."""

CLIP = 0.5
"""Gradient norm to clip to; any norm in a verification is larger, so clipping is always active."""

LEARNING_RATE = 1e-2

NO_WARMUP = {"warmup_steps": 0, "warmup_tokens": None}

NARROW_EPS = 1e-3
"""Adam's eps in fp32 and below, near the size of a clipped gradient's elements.

With 1e-8 the first update is lr x sign(g). If a gradient is zero up to rounding, its sign is random, and one such element is an
error of 2 lr, however small the rounding."""

ONE_PROCESS = {
    "tp": 1,
    "pp": 1,
    "vpp": 1,
    "dp": 1,
    "dp_replicas": 1,
    "cp": 1,
    "ep": 1,
    "etp": 1,
    "sequence_parallel": False,
    "layers_per_stage": None,
}


WIDER = {"bf16": "fp32", "fp16": "fp32", "fp32": "float64"}
"""For each dtype, the wider one in which one process's rounding is measured; float64 has a constant bound instead."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The configurations for one verification.

    Attributes:
        config: configuration with the layout, as it will run.
        reference: same configuration in one process.
        noise: the reference in a wider dtype, which measures rounding; None: rounding is not measured.
    """

    config: Config
    reference: Config
    noise: Config | None = None

    @property
    def tolerance(self) -> float | None:
        """Constant bound for relative errors in this dtype, unused if rounding is measured; None: there is none."""
        return TOLERANCES.get(self.config.precision.dtype)


def trial(path: Path, overrides: tuple[str, ...], *, small: bool, num_steps: int, dtype: str | None) -> Trial:
    """Build the configurations for a verification.

    Args:
        path, overrides: config file and overrides, including the layout's.
        small: shrink the model (`launch/verify/shrink.py`).
        dtype: dtype for both runs; None: the config's own.

    Raises:
        ConfigError: all problems at once.
    """
    asked = load_config(path, overrides, os.environ)
    asked = with_value(asked, "parallel.dp", asked.parallel.dp or 1)
    # Choices that depend on memory are made for the requested sizes.
    asked = _with_recompute(asked, small=small)
    tree = asked.model_dump(mode="json")
    for section, values in (shrink(asked) if small else {}).items():
        tree[section] |= values
    tree["data"] = _data(asked.data)
    as_a_run(tree, num_steps)
    optimizer = asked.optimizer
    tree["optimizer"] |= {
        **(NO_WARMUP if optimizer.lr_schedule == "extension" else CONSTANT_RATE),
        "lr": LEARNING_RATE,
        "clip_grad": CLIP,
        "weight_decay": optimizer.weight_decay or 0.1,
    }
    if dtype is not None and dtype != asked.precision.dtype:
        # Loss scale and narrow state belong to the requested dtype.
        tree["precision"] = {"dtype": dtype, "fp8": tree["precision"]["fp8"]}
    if tree["precision"]["fp8"] is not None:
        # Scaled GEMMs change their summation order with size, so layouts are compared with emulated products.
        tree["precision"]["fp8"]["backend"] = "emulated"
    if tree["precision"]["dtype"] in WIDER and "eps" in OPTIMIZERS[optimizer.name].fields:
        tree["optimizer"]["eps"] = NARROW_EPS
    tree["checkpoint"] = {"interval": "never"}
    tree["telemetry"] = {}
    one = deepcopy(tree) | {
        "parallel": tree["parallel"] | ONE_PROCESS,
        "schedule": {"name": "auto"},
        "recompute": {"granularity": "none"},
        "offload": {},
    }
    if (moe := tree["model"]["moe"]) is not None:
        # One process has room for every row.
        one["model"]["moe"] = moe | {"row_headroom": None}
    if asked.model.own.loss is not None and asked.model.moe is None:
        # A loss that is divided by its microbatch's contents then differs. (Router losses are per microbatch by definition.)
        one["train"]["micro_batch_size"] = 1
    without_gather(one)
    reference = checked(one)
    # Resolved like the layout, so that a one-process layout equals its reference.
    return Trial(checked(tree), resolve_recompute(reference, parallel_sizes(reference)), _noise(one))


def without_gather(tree: dict[str, Any]) -> None:
    """Set `precision.fp8.gather` to bf16, in place, if the configuration tree has FP8 but no sequence parallelism."""
    if tree["precision"]["fp8"] is not None and not tree["parallel"]["sequence_parallel"]:
        tree["precision"]["fp8"]["gather"] = "bf16"


def _with_recompute(asked: Config, *, small: bool) -> Config:
    """Resolve `recompute`, which may depend on the memory limit.

    If no candidate fits in memory and the model will be shrunk, the candidate that saves most memory is used.

    Raises:
        ConfigError: no candidate fits, and the model keeps its sizes.
    """
    sizes = parallel_sizes(asked)
    try:
        return resolve_recompute(asked, sizes)
    except ConfigError:
        if not small:
            raise
    *_, most = [asked.recompute] if asked.recompute.granularity != "auto" else candidates(asked, sizes)
    return resolve_recompute(asked.model_copy(update={"recompute": most.model_copy(update={"memory_gb": None})}), sizes)


def layout_words(path: Path, overrides: Sequence[str], layout: str) -> list[str]:
    """Turn `--layout` into overrides.

    `parallel.layers_per_stage` is set to null if the file lists another number of stages and no override sets the key.

    Raises:
        ConfigError: a word in the layout is not valid.
    """
    words = layout_overrides(layout)
    try:
        listed = load_config(path, overrides, os.environ).parallel.layers_per_stage
    except ConfigError:
        return words  # other problems are reported together with the layout
    sizes = dict(word.removeprefix("parallel.").split("=") for word in words)
    num_stages = math.prod(int(sizes[name]) if sizes[name].isdecimal() else 0 for name in ("pp", "vpp"))
    is_typed = any(word.startswith("parallel.layers_per_stage=") for word in overrides)
    if is_typed or not isinstance(listed, list) or len(listed) == num_stages:
        return words
    return [*words, "parallel.layers_per_stage=null"]


def _data(data: DataConfig) -> dict[str, Any]:
    """Keep only an extension's corpora, and use all their documents for training.

    Without such corpora, random samples are used.
    """
    own = [source.model_dump() for source in data.train if source.path.startswith(OWN_CORPUS)]
    asked = data.model_dump(mode="json", include={"attention", "positions", "count_document_starts"})
    if not own:
        # Random samples have documents only if attention, positions or loss depends on where they end.
        return {"synthetic": True} | (
            asked | {"synthetic_document_length": DOCUMENT_LENGTH} if data.reads_documents else {}
        )
    return asked | {"cache_dir": data.cache_dir, "train": own, "split": [1.0, 0.0, 0.0]}


def _noise(one: Mapping[str, Any]) -> Config | None:
    """Build the configuration `one` in the next wider dtype. None: no dtype is wider."""
    dtype = WIDER.get(one["precision"]["dtype"])
    if dtype is None:
        return None
    attention = "explicit" if one["kernels"]["attention"] == "explicit" else "auto"
    config = checked(dict(one) | {"precision": {"dtype": dtype}, "kernels": {"attention": attention}})
    return resolve_recompute(config, parallel_sizes(config))


def checked(tree: Mapping[str, Any]) -> Config:
    """Validate a tree and load it as a configuration.

    Raises:
        ConfigError: all problems at once.
    """
    with tempfile.TemporaryDirectory(prefix="triaxis-") as folder:
        path = Path(folder) / "verify.yaml"
        path.write_text(json.dumps(tree))
        try:
            return load_config(path)
        except ConfigError as error:
            raise ConfigError(error.problems, "the configuration to verify") from None
