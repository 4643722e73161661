"""Rules for rank counts and nodes, worded for error messages."""

MOST_RANKS = 2**20
"""Largest number of ranks in a run, far above any real one; also the bound for each parallel size."""


def too_many_ranks(world_size: int) -> str | None:
    """Return the broken rule in words if there are more than `MOST_RANKS` ranks; else None."""
    if world_size <= MOST_RANKS:
        return None
    return f"is {world_size:,} ranks, and at most {MOST_RANKS:,} are planned: the groups of so many would not fit in memory"


def partial_node(world_size: int, ranks_per_node: int) -> str | None:
    """Return the broken rule in words if the last node would be partly used; None if the world fills nodes, or fits on one."""
    if world_size <= ranks_per_node or world_size % ranks_per_node == 0:
        return None
    return (
        f"must fill whole nodes of {ranks_per_node} ranks: the last node would be partly used, and its groups misplaced"
    )


def tp_across_nodes(tp: int, world_size: int, ranks_per_node: int) -> str | None:
    """Return the broken rule in words if a tensor-parallel group spans two nodes; None if each group is on one node."""
    if world_size <= ranks_per_node or ranks_per_node % tp == 0:
        return None
    return (
        f"must divide the {ranks_per_node} ranks of a node: a tensor-parallel group would span two nodes, and its collectives in "
        f"every layer cross the slow network"
    )


def uneven_replicas(dp: int, expert_dp: int, replicas: int) -> str | None:
    """Return the broken rule in words unless `replicas` divides both `dp` and `expert_dp`; else None."""
    if dp % replicas == 0 and expert_dp % replicas == 0:
        return None
    divided = f"parallel.dp = {dp}" if dp % replicas else f"the {expert_dp} ranks that hold the same experts"
    return f"must divide {divided}: replicas of the state would be cut over unequal numbers of ranks"


def uneven_experts(stage_ranks: int, ep: int, etp: int) -> str | None:
    """State the rule that `ep` and `etp` break if sets of experts do not divide a stage's ranks evenly; None if they do."""
    if stage_ranks % (ep * etp) == 0:
        return None
    return (
        f"has ep x etp = {ep * etp}, which must divide the {stage_ranks} ranks (tp x cp x dp) of a stage: some ranks would share "
        f"experts with too few others"
    )
