"""The digest of a routing: the same however tokens are dealt out, another one for any other choice."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from triaxis.launch.verify.routing import routing_digest
from triaxis.launch.verify.verdict.records import RoutingReport

LENGTH, TOP_K = 12, 3
POSITIONS = torch.arange(LENGTH)
CHOSEN = torch.rand(LENGTH, 16, generator=torch.Generator().manual_seed(3)).argsort(-1)[:, :TOP_K]


def reported(sample: int, positions: torch.Tensor, experts: torch.Tensor) -> RoutingReport:
    return RoutingReport(0, 2, experts.numel(), 0, routing_digest(2, sample, positions, experts))


WHOLE = reported(7, POSITIONS, CHOSEN) + reported(8, POSITIONS, CHOSEN.flip(0))


@given(st.permutations(range(LENGTH)), st.integers(1, LENGTH - 1), st.permutations(range(TOP_K)))
def test_parts_add_up_to_the_whole_in_any_deal(order: list[int], cut: int, ranks: list[int]) -> None:
    """The order of a token's experts is not part of its choice."""
    total = reported(8, POSITIONS, CHOSEN.flip(0))
    for part in (torch.tensor(order[:cut]), torch.tensor(order[cut:])):
        total += reported(7, part, CHOSEN[part][:, ranks])
    assert total == WHOLE


@given(st.integers(0, LENGTH - 1), st.integers(0, TOP_K - 1), st.integers(1, 15))
def test_another_expert_is_another_digest(token: int, place: int, step: int) -> None:
    changed = CHOSEN.clone()
    changed[token, place] = (changed[token, place] + step) % 16
    assert routing_digest(2, 7, POSITIONS, changed) != routing_digest(2, 7, POSITIONS, CHOSEN)


def test_layer_sample_and_position_are_in_it() -> None:
    digests = {
        routing_digest(2, 7, POSITIONS, CHOSEN),
        routing_digest(3, 7, POSITIONS, CHOSEN),
        routing_digest(2, 8, POSITIONS, CHOSEN),
        routing_digest(2, 7, POSITIONS.flip(0), CHOSEN),
        routing_digest(2, 7, POSITIONS[1:], CHOSEN[1:]),
    }
    assert len(digests) == 5
