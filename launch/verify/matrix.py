"""Choose layouts, schedules and models for `triaxis verify --matrix`.

Two choices for different features, such as tp 4 and schedule zbv, occur together in at least one trial if any legal
combination has both. A legal combination has 2 to `most_ranks` ranks.
"""

import os
import tempfile
from collections.abc import Hashable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from triaxis.engine.config.load import load_config
from triaxis.engine.config.rules.layout import schedule_problems
from triaxis.engine.config.schema.layout import DEFERS_WEIGHT_GRADIENTS
from triaxis.engine.errors import ConfigError
from triaxis.launch.verify.covering import Row, covering_rows
from triaxis.launch.verify.run import Trial, trial

_BASE: dict[str, Any] = {
    "num_layers": 9,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "head_dim": 4,
    "seq_length": 8,
    "vocab_size": 43,
    "vocab_multiple": 8,
}
"""9 layers, which only 1 and 3 stages divide evenly. 43 tokens, so that the padded vocabulary has rows of padding."""

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": _BASE | {"ffn_hidden_size": 24, "position": "learned"},
    "gpt, dropout": _BASE
    | {"ffn_hidden_size": 24, "position": "learned", "hidden_dropout": 0.2, "attention_dropout": 0.3},
    "llama": _BASE
    | {
        "num_kv_heads": 2,
        "ffn_hidden_size": 40,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": "none",
        "tie_embeddings": False,
        "mtp": {"num_layers": 2},
    },
    "qwen": _BASE
    | {
        "num_kv_heads": 4,
        "ffn_hidden_size": 24,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": "qkv",
        "qk_norm": True,
    },
    "one kv head": _BASE | {"num_kv_heads": 1, "ffn_hidden_size": 24, "activation": "gelu_tanh"},
    "kinds of layers": _BASE
    | {
        "num_kv_heads": 2,
        "ffn_hidden_size": 24,
        "norm": "rmsnorm",
        "bias": "none",
        "layers": ["near*2", "far", "free"],
        "layer_kinds": {
            "near": {"window": 3, "sinks": True},
            "far": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rotary_share": 0.5},
            "free": {"position": "none"},
        },
    },
    "experts": _BASE
    | {
        "num_kv_heads": 4,
        "ffn_hidden_size": 24,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": "none",
        "layers": ["dense", "moe*2"],
        "moe": {
            "num_experts": 8,
            "top_k": 3,
            "ffn_hidden_size": 16,
            "shared_experts": 1,
            "score": "sigmoid",
            "groups": 4,
            "top_groups": 2,
            "balance": {"bias_rate": 0.05, "sequence_loss": 0.3, "z_loss": 0.02},
        },
    },
}
"""Models that together have every kind of parameter, since each kind is cut or summed in its own way, and layers that differ.

With a single key/value head, every tp rank has a replica of it."""

DOCUMENTS = {"kinds of layers": {"attention": "within", "positions": "document", "count_document_starts": False}}
"""Fields of `data` for families whose samples keep documents apart."""

WAYS_OF_EXPERTS: dict[str, dict[str, object]] = {
    "whole": {"ep": 1, "etp": 1, "dispatch": "auto"},
    "ep 2, all-gather": {"ep": 2, "etp": 1, "dispatch": "all_gather"},
    "ep 4, all-to-all": {"ep": 4, "etp": 1, "dispatch": "all_to_all"},
    "ep 2 and etp, all-to-all": {"ep": 2, "etp": 2, "dispatch": "all_to_all"},
}
"""Ways to cut experts over ranks and to send tokens to them. etp is 1 or equals tp, so etp 2 needs tp 2."""

OWN = "own"
"""Family name of the model in a given config, which replaces `FAMILIES`."""

MOST_RANKS = 8


def matrix(
    path: Path | None, overrides: tuple[str, ...], *, num_steps: int, dtype: str, most_ranks: int = MOST_RANKS
) -> list[tuple[Row, Trial]]:
    """Build a matrix's trials, each with its row of features.

    Args:
        path, overrides: config to verify; its layout is varied and its model shrunk. If `path` is None, the models in `FAMILIES`
            are verified, unshrunk.
        most_ranks: largest number of ranks in a layout.

    Raises:
        ConfigError: the config itself is wrong, or no layout is legal for it.
    """
    features: dict[str, tuple[Hashable, ...]] = {
        "model": (OWN,) if path is not None else tuple(FAMILIES),
        "tp": (2, 4, 8, 1),
        "cp": (1, 2, 4),
        "cp method": ("all_gather", "ulysses"),
        "pp": (2, 4, 1),
        "vpp": (2, 1),
        "dp": (2, 4, 1),
        "sp": (True, False),
        "schedule": ("auto", "gpipe", "zb_h1", "zbv"),
        "recompute": ("full", "selective", "none"),
        "micro batch": (2, 1),
        "experts": tuple(WAYS_OF_EXPERTS),
    }
    of_families = {family for family, model in FAMILIES.items() if "moe" in model}
    if path is not None:
        has_experts = load_config(path, overrides, os.environ).model.has_experts
        of_families = {OWN} if has_experts else set()
    if not of_families:
        features["experts"] = ("whole",)
    with tempfile.TemporaryDirectory(prefix="triaxis-") as name:
        folder = Path(name)

        def make(row: Row) -> Trial:
            source = path or _family_file(folder, str(row["model"]))
            small = path is not None
            return trial(source, (*overrides, *_overrides(row)), small=small, num_steps=num_steps, dtype=dtype)

        @cache
        def is_legal(
            model: str, tp: int, cp: int, method: str, pp: int, vpp: int, sp: bool, experts: str, dp: int
        ) -> bool:
            row: Row = {
                "model": model,
                "tp": tp,
                "cp": cp,
                "cp method": method,
                "pp": pp,
                "vpp": vpp,
                "dp": dp,
                "sp": sp,
                "experts": experts,
            }
            try:
                make(row | {"schedule": "auto", "recompute": "none", "micro batch": 1})
            except ConfigError:
                return False
            return True

        def can_run(row: Row) -> bool:
            tp, cp, pp, vpp, dp = (int(str(row[size])) for size in ("tp", "cp", "pp", "vpp", "dp"))
            sp, method = row["sp"], str(row["cp method"])
            has_effect = not (sp and tp == 1) and not (method == "ulysses" and cp == 1)
            fits = has_effect and 1 < tp * cp * pp * dp <= most_ranks
            way = WAYS_OF_EXPERTS[experts := str(row["experts"])]
            ep, etp = int(str(way["ep"])), int(str(way["etp"]))
            if experts != "whole":
                fits = fits and row["model"] in of_families and etp in (1, tp) and tp * cp * dp % (ep * etp) == 0
            schedule = str(row["schedule"])
            fits = fits and not any(schedule_problems(schedule, vpp)) and (vpp == 1 or pp > 1)
            # Deferred weight gradients keep the activations that whole layers would recompute.
            fits = fits and not (schedule in DEFERS_WEIGHT_GRADIENTS and row["recompute"] == "full")
            # Only experts depend on dp.
            dp_of_rules = dp if experts != "whole" else 1
            return fits and is_legal(str(row["model"]), tp, cp, method, pp, vpp, bool(sp), experts, dp_of_rules)

        rows = covering_rows(features, can_run)
        if not rows:
            raise ConfigError(
                [f"no layout of at most {most_ranks} ranks is legal for {path}: nothing can be compared."]
            )
        return [(row, make(row)) for row in rows]


def _overrides(row: Row) -> list[str]:
    """Convert a matrix row to config overrides. A step has 2 x pp + 1 microbatches if vpp is 1, else 2 x pp."""
    micro, dp, pp = (int(str(row[name])) for name in ("micro batch", "dp", "pp"))
    num_microbatches = 2 * pp if row["vpp"] != 1 else 2 * pp + 1
    way = WAYS_OF_EXPERTS[str(row["experts"])]
    words: Mapping[str, Hashable] = {
        "parallel.tp": row["tp"],
        "parallel.cp": row["cp"],
        "parallel.cp_method": row["cp method"],
        "parallel.pp": row["pp"],
        "parallel.vpp": row["vpp"],
        "parallel.dp": row["dp"],
        "parallel.ep": way["ep"],
        "parallel.etp": way["etp"],
        "parallel.sequence_parallel": row["sp"],
        "schedule.name": row["schedule"],
        "recompute.granularity": row["recompute"],
        "train.micro_batch_size": micro,
        "train.global_batch_size": micro * dp * num_microbatches,
    }
    if row["recompute"] == "selective" and row["cp"] != 1 and row["cp method"] == "all_gather":
        # Attention, the default module, is never recomputed from gathered keys and values.
        words = {**words, "recompute.modules": "[norm]"}
    if way["dispatch"] != "auto":
        words = {**words, "kernels.dispatch": way["dispatch"]}
    return [*(f"{key}={str(value).lower()}" for key, value in words.items()), "schedule.file=null"]


def _family_file(folder: Path, family: str) -> Path:
    path = folder / f"{family.replace(' ', '_')}.yaml"
    if not path.exists():
        model = FAMILIES[family]
        tree = {
            "model": model,
            "data": {"synthetic": True, **DOCUMENTS.get(family, {})},
            "train": {"steps": 1, "global_batch_size": 1},
            "optimizer": {"bucket_bytes": 4096},
            # Dropout of probabilities has no other kernel.
            "kernels": {"attention": "explicit" if model.get("attention_dropout") else "auto"},
        }
        path.write_text(yaml.safe_dump(tree))
    return path
