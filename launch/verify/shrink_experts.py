"""Choose the experts of a smaller model of the same kind.

All relations in `relations_of_experts` are kept. They concern experts, choices, groups and the ranks that share experts.
"""

from collections.abc import Iterator
from typing import Any

from triaxis.engine.config.schema.moe import MoEConfig

MOST_GROUPS = 6
"""Largest number of groups in a small model, per expert rank."""


def relations_of_experts(moe: MoEConfig, ep: int) -> tuple[object, ...]:
    """Relate a layer's expert counts to each other and to `ep`.

    Equal results mean that the same cases occur, such as several experts per rank.
    """
    local, in_group = moe.num_experts // ep, moe.num_experts // moe.groups
    eligible = moe.top_groups * in_group
    return (
        # a rank's experts: one or several; fewer or more than a token chooses
        (local > 1, _sign(moe.top_k - local)),
        # a token's experts: one, several, all; all experts in its groups
        (moe.top_k > 1, moe.top_k == moe.num_experts, moe.top_k == eligible),
        # an all-gather sends fewer bytes than an all-to-all
        ep <= moe.top_k,
        # groups: none, several, all used; several experts each; split over ranks, or whole on one
        (moe.groups > 1, moe.top_groups > 1, moe.top_groups == moe.groups, in_group > 1, _sign(in_group - local)),
        _sign(moe.top_k - in_group),
        min(moe.shared_experts, 2),
    )


def shrink_experts(moe: MoEConfig, ep: int, width: int) -> dict[str, Any]:
    """Build `model.moe` with the fewest experts that keep all relations. `width` is each expert's FFN width."""
    wanted = relations_of_experts(moe, ep)
    changes = {"ffn_hidden_size": width, "shared_experts": min(moe.shared_experts, 2)}
    smallest = next(
        small for small in _candidates(moe, ep, changes) if small is moe or relations_of_experts(small, ep) == wanted
    )
    return smallest.model_copy(update=changes).model_dump(mode="json")


def _candidates(moe: MoEConfig, ep: int, changes: dict[str, Any]) -> Iterator[MoEConfig]:
    """Yield variants of `moe` with fewer experts, smallest first, then `moe` itself.

    Groups and `ep` divide a variant's experts. `changes` are further fields to replace.
    """
    for num_experts in range(ep, moe.num_experts, ep):
        for groups in range(1, min(moe.groups, MOST_GROUPS * ep, num_experts) + 1):
            if num_experts % groups or (groups == 1) != (moe.groups == 1):
                continue
            in_group = num_experts // groups
            if groups > 1 and moe.group_score == "top2" and in_group < 2:
                continue
            for top_groups in range(1, min(moe.top_groups, groups) + 1):
                for top_k in range(1, min(moe.top_k, top_groups * in_group) + 1):
                    numbers = {"num_experts": num_experts, "groups": groups, "top_groups": top_groups, "top_k": top_k}
                    yield moe.model_copy(update=changes | numbers)
    yield moe


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
