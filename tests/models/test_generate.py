"""Generated tokens do not depend on the layout, and greedy decoding is what the oracle's logits say."""

import pytest

from models.generate import generate
from tests.harness import run_ranks
from tests.parity.cases import Case, load_weights, weights_of
from tests.parity.test_step_properties import build_rank

pytestmark = pytest.mark.distributed

PROMPT = [3, 1, 4, 1, 5]


def continue_prompt(rank: int, case: Case, temperature: float) -> list[int]:
    engine, batches = build_rank(rank, case)
    batches.close()
    load_weights(engine, {name: weight.detach() for name, weight in weights_of(case.model).items()})
    return generate(engine, PROMPT, 12, temperature=temperature, seed=3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_layout_writes_the_same_tokens(temperature: float) -> None:
    """12 tokens after a prompt of 5, in a window of 8: the window slides, too."""
    (alone,) = run_ranks(continue_prompt, 1, Case("qwen"), temperature)
    assert len(alone) == 12
    assert all(0 <= token < 43 for token in alone), "a padded column was drawn"
    for case in (Case("qwen", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True), Case("qwen", tp=8)):
        assert run_ranks(continue_prompt, 8, case, temperature) == [alone] * 8, str(case)


def test_temperature_and_seed_matter() -> None:
    (greedy,), (sampled,) = (run_ranks(continue_prompt, 1, Case("qwen"), temperature) for temperature in (0.0, 5.0))
    assert greedy != sampled
