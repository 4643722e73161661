"""Small configurations of any layout for the tests of this room."""

from collections.abc import Mapping
from typing import Any

from triaxis.engine.config.rules.check import problems
from triaxis.engine.config.tree import Config

MODEL = {
    "num_layers": 8,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "seq_length": 256,
    "vocab_size": 1024,
}


def layout(
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    dp: int = 1,
    cp: int = 1,
    sp: bool = False,
    method: str = "auto",
    schedule: str = "auto",
    microbatches: int = 4,
    model: Mapping[str, object] = {},
    recompute: Mapping[str, object] = {},
    train: Mapping[str, object] = {},
    parallel: Mapping[str, object] = {},
) -> Config:
    """Build a legal configuration.

    Args:
        microbatches: of each pipeline in a step.
        model, recompute, train, parallel: what differs from the defaults.
    """
    batch: dict[str, Any] = {"steps": 1, "micro_batch_size": 2, **train}
    batch.setdefault("global_batch_size", dp * microbatches * batch["micro_batch_size"])
    sizes = {"tp": tp, "pp": pp, "vpp": vpp, "dp": dp, "cp": cp, "sequence_parallel": sp, "cp_method": method}
    config = Config.model_validate(
        {
            "model": {**MODEL, **model},
            "data": {"synthetic": True},
            "train": batch,
            "parallel": {**sizes, **parallel},
            "schedule": {"name": schedule},
            "recompute": dict(recompute),
        }
    )
    assert not problems(config, tp * pp * dp * cp), problems(config, tp * pp * dp * cp)
    return config
