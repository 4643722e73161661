"""Comparisons with oracles on ranks of the test harness, with or without a bug in the oracle."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from tests.planting import Plant, run_planted
from tests.verify import trials
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.tree import Config
from triaxis.launch.verify.oracle import SITES, OracleTrial, oracle_trial, verdict_against
from triaxis.launch.verify.oracles.corpus import with_corpus, write_corpus
from triaxis.launch.verify.verdict.judge import Verdict

BASE: dict[str, Any] = {
    "num_layers": 5,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "seq_length": 8,
    "vocab_size": 43,
    "vocab_multiple": 8,
    "ffn_hidden_size": 40,
}
"""5 layers make stages uneven; 43 tokens leave padding that no oracle has."""

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "bias": "none", "num_kv_heads": 2, "tie_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": BASE | {"position": "learned"},
    "gpt2, tanh": BASE | {"position": "learned", "activation": "gelu_tanh", "tie_embeddings": False},
    "one kv head": BASE | {"num_kv_heads": 1, "activation": "gelu_tanh", "head_dim": 8},
    "llama": BASE | LLAMA | {"rope_base": 5000.0},
    "mistral": BASE | LLAMA | {"num_attention_heads": 6, "head_dim": 4},
    "qwen2": BASE | LLAMA | {"bias": "qkv", "tie_embeddings": True},
    "qwen3": BASE | LLAMA | {"qk_norm": True, "head_dim": 8, "norm_eps": 1e-6},
    "qwen2 and qwen3": BASE | LLAMA | {"bias": "qkv", "qk_norm": True},
    "mixtral": BASE | LLAMA | {"layers": ["moe"], "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}},
}
MODELS["deepseek_v3"] = BASE | {
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "activation": "swiglu",
    "bias": "none",
    "tie_embeddings": False,
    "mla": {"q_lora_rank": 10, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 5},
    "layers": ["dense", "moe*4"],
    "moe": {
        "num_experts": 12,
        "top_k": 3,
        "ffn_hidden_size": 16,
        "shared_experts": 1,
        "score": "sigmoid",
        "scaling": 2.5,
        "groups": 4,
        "top_groups": 2,
        "choice_bias": True,
    },
}
ONLY_MEGATRON = ("one kv head", "qwen2 and qwen3")
ONLY_TRANSFORMERS = ("mixtral", "deepseek_v3")
COMPARED = [
    "samples",
    "start",
    "output",
    "loss",
    "gradient",
    "gradient norm",
    "master",
    "exp_avg",
    "exp_avg_sq",
    "parameter",
]
"""The kinds of numbers that a comparison with an oracle reports."""


def asked(
    oracle: str,
    name: str,
    *,
    layout: Sequence[str] | None = None,
    dtype: str = "float64",
    data: Mapping[str, Any] = MappingProxyType({}),
) -> OracleTrial:
    """Three steps of one of `MODELS`.

    Args:
        layout: words of a configuration; None: the command's own layouts.
        data: fields of that section.
    """
    tree = {
        "model": MODELS[name],
        "data": {"synthetic": True, **data},
        "train": {"steps": 1, "global_batch_size": 4},
        "optimizer": {"bucket_bytes": 4096},
    }
    with tempfile.TemporaryDirectory(prefix="triaxis-test-") as folder:
        path = Path(folder) / "model.yaml"
        path.write_text(yaml.safe_dump(tree))
        return oracle_trial(path, (), oracle=oracle, layout=layout, small=False, num_steps=3, dtype=dtype)


def run_oracle(rank: int, name: str, config: Config, folder: str) -> None:
    """Run the process of an oracle."""
    from triaxis.launch.verify.oracles import rank as process

    process.run(name, config, Path(folder))


def verdicts(
    one: OracleTrial,
    references: Path,
    plant: Plant | None = None,
    layout_plant: Plant | None = None,
    our_plant: Plant | None = None,
) -> dict[str, Verdict]:
    """By layout, our one process first; bugs are in the oracle, in the ranks of layouts, or in all ranks of ours.

    `references`: a folder for what oracles write; one without a bug is run once.
    """
    reference = one.trials[0].reference

    def refer(where: str) -> None:
        write_corpus(reference, Path(where))
        run_planted(plant, run_oracle, 1, one.oracle, with_corpus(reference, Path(where)), where)

    found = {}
    with tempfile.TemporaryDirectory(prefix="triaxis-test-") as name:
        folder = Path(name)
        if plant is None:
            trials.written_once(references, one.oracle + reference.model_dump_json(), refer, folder)
        else:
            refer(name)
        for trial in one.trials:
            sizes = parallel_sizes(trial.config)
            bug = our_plant or (layout_plant if found else None)
            config = with_corpus(trial.config, folder)
            run_planted(bug, trials.observe, sizes.world_size, config, name, False, SITES)
            found[str(sizes)] = verdict_against(one, trial, folder)
            for report in folder.glob("rank_*.json"):
                report.unlink()
    return found
