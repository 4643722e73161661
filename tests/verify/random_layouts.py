"""Random legal layouts of the matrix's model families, as functions of a number."""

import math
import random
import tempfile
from itertools import product
from pathlib import Path

import yaml

from triaxis.engine.errors import ConfigError
from triaxis.launch.verify.matrix import DOCUMENTS, FAMILIES
from triaxis.launch.verify.run import Trial, trial

NUM_STEPS = 2


def random_trial(number: int, dtype: str, *, most_ranks: int = 8) -> Trial:
    """Return the trial of the first legal layout that a generator seeded with the number draws; 2 ranks or more."""
    draw = random.Random(number)
    while True:
        family = draw.choice(sorted(FAMILIES))
        words = _words(draw, dtype, most_ranks, has_experts="moe" in FAMILIES[family])
        try:
            return _trial(family, words, dtype)
        except ConfigError:
            continue


def _trial(family: str, words: list[str], dtype: str) -> Trial:
    model = FAMILIES[family]
    tree = {
        "model": model,
        "data": {"synthetic": True, **DOCUMENTS.get(family, {})},
        "train": {"steps": 1, "global_batch_size": 1},
        "kernels": {"attention": "explicit" if model.get("attention_dropout") else "auto"},
    }
    with tempfile.TemporaryDirectory(prefix="triaxis-test-") as folder:
        path = Path(folder) / "model.yaml"
        path.write_text(yaml.safe_dump(tree))
        return trial(path, tuple(words), small=False, num_steps=NUM_STEPS, dtype=dtype)


def _words(draw: random.Random, dtype: str, most_ranks: int, *, has_experts: bool) -> list[str]:
    all_sizes = product((1, 2, 4, 8), (1, 2, 4), (1, 2, 3, 4), (1, 2, 3, 4))
    tp, cp, pp, dp = draw.choice([sizes for sizes in all_sizes if 1 < math.prod(sizes) <= most_ranks])
    vpp = draw.choice([1, 2, 3]) if pp > 1 else 1
    micro = draw.choice([1, 2, 3])
    microbatches = pp * draw.choice([1, 2, 3]) if vpp > 1 else draw.randint(1, 7)
    layers = [draw.choice([0, 1, 1, 2, 3]) for _ in range(pp * vpp)]
    is_listed = draw.random() < 0.4 and sum(layers) > 0
    words = {
        "model.num_layers": sum(layers) if is_listed else draw.randint(4, 9),
        "model.seq_length": draw.choice([8, 16, 24, 48]),
        "model.vocab_size": draw.choice([17, 43, 60, 64]),
        "model.vocab_multiple": draw.choice([8, 64]),
        "parallel.tp": tp,
        "parallel.cp": cp,
        "parallel.pp": pp,
        "parallel.vpp": vpp,
        "parallel.dp": dp,
        "parallel.sequence_parallel": str(draw.random() < 0.5).lower(),
        "train.micro_batch_size": micro,
        "train.global_batch_size": micro * dp * microbatches,
        "train.seed": draw.randint(0, 10**6),
        "optimizer.bucket_bytes": draw.choice([512, 4096, 2**20]),
        "schedule.name": draw.choice(
            ["auto", "auto", "zbv", "zbv"] if vpp == 2 else ["auto", "auto", "gpipe", "zb_h1"]
        ),
        "recompute.granularity": (granularity := draw.choice(["none", "selective", "full"])),
        "offload.num_layers": draw.choice([0, 0, 1, 2]),
        "offload.min_bytes": 1,
    }
    if is_listed:
        words["parallel.layers_per_stage"] = str(layers)
    if granularity == "full":
        words |= {"recompute.method": draw.choice(["uniform", "block"]), "recompute.num_layers": draw.randint(1, 3)}
    if granularity == "selective" and (cp > 1 or draw.random() < 0.5):
        # The default, attention, is never made again with context parallelism.
        parts = draw.sample(["norm", "activation", "rope", "mlp"], draw.randint(1, 4))
        words["recompute.modules"] = f"[{', '.join(parts)}]"
    if draw.random() < 0.3:
        words["recompute.head_tokens"] = draw.randint(1, 24)
    if cp > 1:
        words["parallel.cp_method"] = draw.choice(["auto", "all_gather", "ulysses"])
        words["recompute.gathered_kv"] = draw.choice(["keep", "regather"])
    # Drawn last and by the family's need alone, so that other families keep their layouts.
    if has_experts:
        etp = draw.choice([1, tp])
        words["parallel.etp"] = etp
        words["parallel.ep"] = draw.choice([n for n in (1, 2, 4, 8) if tp * cp * dp % (n * etp) == 0] or [1])
        words["kernels.dispatch"] = draw.choice(["auto", "all_gather", "all_to_all"])
        words["model.moe.top_k"] = draw.choice([1, 3, 4])
        words["model.moe.score"] = draw.choice(["sigmoid", "softmax"])
    if dtype == "bf16":
        words["precision.gradients"] = draw.choice(["full", "full", "bf16"])
        words["precision.masters"] = draw.choice(["full", "full", "split"])
    return [f"{key}={value}" for key, value in words.items()]
