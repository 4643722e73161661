"""Greedy text of ours is greedy text of transformers, on the model that was exported from the same checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lacking import need_package
from tests.launch.small_checkpoint import END_OF_DOCUMENT, GPT, LLAMA, save, say

QWEN3: dict[str, Any] = {**LLAMA, "qk_norm": True, "head_dim": 8, "tie_embeddings": True}
PROMPTS = ("def", "A longer prompt", "import os")
NUM_TOKENS = 16


@pytest.fixture(scope="module", autouse=True)
def _transformers() -> None:
    """Transformers is the oracle of these tests."""
    need_package("transformers", "pip install -e '.[dev]'")


def loudness(name: str) -> float:
    """Sharp attention, and branches that outweigh the residual stream: else a tied head answers each token with itself."""
    if name.endswith(("q.weight", "q_norm.weight")):
        return 20.0
    return 5.0 if name.endswith(("proj.weight", "down.weight")) else 1.0


def greedy(folder: Path, prompt: list[int]) -> list[int]:
    """What transformers' `generate` writes after the prompt, until the document ends."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    ids = torch.tensor([prompt])
    settings = transformers.GenerationConfig(
        max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=END_OF_DOCUMENT, pad_token_id=END_OF_DOCUMENT
    )
    written: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[
        0
    ].tolist()
    tokens = written[len(prompt) :]
    return tokens[: tokens.index(END_OF_DOCUMENT)] if END_OF_DOCUMENT in tokens else tokens


@pytest.mark.parametrize("model", [GPT, LLAMA, QWEN3], ids=["gpt2", "llama", "qwen3"])
def test_greedy_text_is_that_of_transformers(model, tmp_path, capsys, monkeypatch):
    drawn = save(tmp_path / "drawn", model).weights
    saved = save(tmp_path, model, {name: loudness(name) * weight for name, weight in drawn.items()})
    exported = tmp_path / "exported"
    assert say(capsys, monkeypatch, "export", saved.folder, exported, "--dtype", "fp32").exit_code == 0
    written = set()
    for prompt in PROMPTS:
        words = (
            "--prompt",
            prompt,
            "--temperature",
            0,
            "--max-new-tokens",
            NUM_TOKENS,
            "--json",
            "precision.dtype=fp32",
        )
        said = say(capsys, monkeypatch, "generate", saved.folder, *words)
        tokens = json.loads(said.out)["tokens"]
        assert tokens == greedy(exported, list(prompt.encode()))
        written |= set(tokens)
    assert len(written) > 8, "a model that repeats itself would prove little"
