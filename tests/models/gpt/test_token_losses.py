"""The losses of single tokens, as a hook of the last stage's loss module sees them: their masked sum is the step's loss."""

from typing import Any

import torch

from tests.parity.cases import Case, build_rank
from triaxis.models.gpt.chunk import GPTChunk


def test_a_hook_of_the_loss_module_sees_the_losses_of_tokens() -> None:
    engine, batches = build_rank(0, Case("gpt", num_layers=1, global_batch_size=2, head_tokens=3))
    (chunk,) = engine.chunks
    assert isinstance(chunk, GPTChunk) and chunk.losses is not None
    seen: list[torch.Tensor] = []

    def see(module: torch.nn.Module, given: Any, losses: torch.Tensor) -> None:
        seen.append(losses.detach().clone())

    chunk.losses.register_forward_hook(see)
    microbatches = batches.next_step()
    losses = engine.forward_backward(microbatches)
    batches.close()
    assert [each.shape for each in seen] == [batch.tokens.t().shape for batch in microbatches]
    total = sum(float((each * batch.loss_mask.t()).sum()) for each, batch in zip(seen, microbatches, strict=True))
    torch.testing.assert_close(total, float(losses.sums[0]), rtol=1e-12, atol=0.0)
