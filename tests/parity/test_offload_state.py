"""Optimizer state in host memory: every bit of a run equals that of the state on the device."""

from dataclasses import replace

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank
from triaxis.engine.optimizer import host_state

CASES = [
    Case("gpt", dp=2, num_layers=2, dtype="bf16", global_batch_size=4),
    Case("llama", tp=2, dp=2, zero=2, num_layers=2, dtype="bf16", narrow=True, ema=0.9, global_batch_size=4),
    Case("mqa_rope_bias", dp=4, dp_replicas=2, zero=3, num_layers=2, groups=True, global_batch_size=4),
    Case("deepseek", dp=4, ep=2, zero=3, dtype="fp16", ema=0.9, global_batch_size=4),
    Case("gpt", pp=2, dp=2, frozen=("layers.0.*", "embedding.*"), num_layers=2, global_batch_size=4),
    Case("gpt", dp=2, optimizer="extension", num_layers=2, global_batch_size=4),
]
"""Exact and narrow state, with each kind of update; zero 1 to 3, replicas, experts, frozen parameters, a skipped step (fp16)."""


def states(rank: int, case: Case, piece_numel: int) -> list[torch.Tensor]:
    """Run three steps, the second of which is skipped in fp16. Return parameters, main grads and the state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_state, "PIECE_NUMEL", piece_numel)
        engine, batches = build_rank(rank, case)
    for step in range(3):
        losses = engine.forward_backward(batches.next_step())
        if step == 1 and case.dtype == "fp16":
            next(owned for owned in engine.optimizer.trained if owned.buffer.is_first).grads[0] = torch.inf
        engine.update(losses, 1e-2).wait()
    batches.close()
    engine.buffers.wait_all()
    optimizer = engine.optimizer
    found = [optimizer._num_updates, *(tensor for buffer in engine.buffers.buffers for tensor in buffer.weights[:1])]
    for owned in optimizer.owned:
        found += [owned.grads, *(owned.state.read(kind) for kind in owned.state.kinds)]
    return [tensor.clone() for tensor in found]


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_do_not_depend_on_the_place_of_the_state(case: Case) -> None:
    """Pieces of 1,000 elements end anywhere in a parameter; a stage has fewer or many more than the places on the device."""
    ranks = [run_ranks(states, case.world_size, replace(case, offload_state=place), 1000) for place in (False, True)]
    for on_device, in_host_memory in zip(*ranks, strict=True):
        assert len(on_device) == len(in_host_memory)
        assert all(torch.equal(one, other) for one, other in zip(on_device, in_host_memory, strict=True))
