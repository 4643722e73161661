"""Text from the model that was just trained, on the ranks that trained it.

Each new token is one forward-only pass of the pipeline over the whole window: the last stage's logits at the last
position are gathered over tp, a token is drawn, and the pipeline's other stages are told. (A key/value cache is not built
yet: a pass costs as much as the forward of one sample.)
"""

from collections.abc import Sequence

import torch

from engine.data.loader import MicroBatch
from engine.pipeline import schedules
from engine.pipeline.executor import Executor
from engine.pipeline.lowering import lower
from engine.precision import DTYPES, accumulate
from engine.step import Engine


@torch.no_grad()
def generate(
    engine: Engine, prompt: Sequence[int], num_tokens: int, *, temperature: float = 1.0, seed: int = 0
) -> list[int]:
    """Continue `prompt` by `num_tokens` tokens; every rank calls it and gets the same tokens.

    Args:
        engine: trained or not.
        prompt: at least one token id.
        num_tokens: how many to draw.
        temperature: divides the logits; 0 takes the most likely token.
        seed: of the draws.
    """
    config, topology = engine.config, engine.topology
    sizes, length = topology.sizes, config.model.seq_length
    for chunk in engine.chunks:
        chunk.train(False)
    local_length = length // (sizes.tp if config.parallel.sequence_parallel else 1)
    shape = (local_length, 1, config.model.hidden_size)
    executor = Executor(topology, [chunk.queue for chunk in engine.chunks], shape, DTYPES[config.precision.dtype])
    program = lower(schedules.build("forward_only", sizes.pp, sizes.vpp, 1))
    last_stage_rank = program.schedule.placement.rank_of(program.schedule.placement.num_stages - 1)

    tokens = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        window = tokens[-length:]
        outputs = executor.run(
            program,
            [_batch(window, length, topology.device)],
            lambda chunk, x, batch: engine.chunks[chunk].logits(x, batch),
        )
        token = torch.zeros(1, dtype=torch.int64, device=topology.device)
        if outputs:
            columns = outputs[0][len(window) - 1, 0]
            logits = topology.axis("tp").all_gather(columns, "generation").wait()
            token.fill_(_draw(logits[: config.model.vocab_size], temperature, generator))
        topology.axis("pp").broadcast(token, last_stage_rank, "generation").wait()
        tokens.append(int(token))
    return tokens[len(prompt) :]


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """One token id from logits [V]."""
    logits = accumulate(logits.cpu())
    if temperature == 0.0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def _batch(window: Sequence[int], length: int, device: torch.device) -> MicroBatch:
    """The window as one sample of `length` tokens; what follows its last token is causally invisible."""
    tokens = torch.zeros(1, length, dtype=torch.int64)
    tokens[0, : len(window)] = torch.tensor(window)
    return MicroBatch(
        tokens=tokens.to(device),
        labels=torch.zeros_like(tokens, device=device),
        loss_mask=torch.zeros(1, length, dtype=torch.bool, device=device),
        position_ids=torch.arange(length, device=device).unsqueeze(0),
        sample_ids=[0],
    )
