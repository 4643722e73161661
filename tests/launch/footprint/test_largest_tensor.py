"""The largest tensor of a step has a name, and none on the path of a GPU has as many elements as there are pairs of tokens."""

from typing import Any

import pytest
import torch

from tests.documented import ROOT
from triaxis.engine.config.load import load_config
from triaxis.engine.config.tree import Config
from triaxis.engine.kernels.flash_attention import Varlen
from triaxis.launch.footprint.memory import NewTensor
from triaxis.launch.footprint.run import Footprints
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute

pytestmark = pytest.mark.distributed

LONG = ROOT / "configs" / "llama3_8b_128k.yaml"

MASKED = (
    "data={synthetic: true, attention: within, synthetic_document_length: 3001}",
    "kernels.attention=varlen",
    "parallel.dp=4",
    "model.layers=[local, global]",
    "model.layer_kinds={local: {window: 500}, global: {}}",
)
"""Documents, and windows in every second layer, by the kernel of a GPU."""

SMALL = (
    *("model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.num_kv_heads=2"),
    *("model.ffn_hidden_size=128", "model.vocab_size=512", "model.seq_length=8192"),
)


def config_of(*overrides: str) -> Config:
    config = load_config(LONG, (*MASKED, *overrides), {}, world_size=64)
    return resolve_recompute(config, Footprints(config, build_chunks).sizes)


def largest_below_pairs(config: Config) -> NewTensor:
    """Return the largest tensor; raise where it may have s/cp x s elements, each of which has a byte at least."""
    s, cp = config.model.seq_length, config.parallel.cp
    found = Footprints(config, build_chunks).of(0).largest
    assert found.num_bytes < s // cp * s, found
    return found


def test_the_gpus_path_has_no_tensor_of_all_pairs() -> None:
    largest_below_pairs(config_of(*SMALL))


@pytest.mark.parametrize("is_backward", [False, True])
def test_a_mask_of_all_pairs_is_found_by_name(is_backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "backward" if is_backward else "forward"
    original = getattr(Varlen, name)

    def masked(self: Varlen, *tensors: torch.Tensor) -> Any:
        q, k = tensors[1:3] if is_backward else tensors[:2]
        torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        return original(self, *tensors)

    monkeypatch.setattr(Varlen, name, masked)
    site = r"blocks\.1\.attention \(backward\)" if is_backward else r"blocks\.0\.attention"
    with pytest.raises(AssertionError, match=rf"site='{site}', operator='aten::ones', shape=\(1024, 8192\)"):
        largest_below_pairs(config_of(*SMALL))


@pytest.mark.slow
@pytest.mark.distributed
def test_llama_3_8b_at_131072_tokens_has_none() -> None:
    """The name is that of the head's matrix multiplication, whose tokens are limited by `recompute.head_tokens`."""
    config = config_of()
    found = largest_below_pairs(config)
    vocabulary = config.model.vocab_size // config.parallel.tp
    assert found == NewTensor("losses", "aten::mm", (4096, vocabulary), torch.bfloat16, 4096 * vocabulary * 2)
