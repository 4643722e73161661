"""Builds the forward-only schedule, for validation and generation.

pp 2, vpp 2, 4 microbatches; 1F0 = chunk 1, forward, microbatch 0

    rank 0, loop (stages 0, 2)    0F0 0F1 1F0 1F1 0F2 0F3 1F2 1F3
    rank 1, loop (stages 1, 3)    0F0 0F1 1F0 1F1 0F2 0F3 1F2 1F3
    rank 0, V (stages 0, 3)       0F0 0F1 1F0 0F2 1F1 0F3 1F2 1F3
    rank 1, V (stages 1, 2)       0F0 1F0 0F1 1F1 0F2 1F2 0F3 1F3
"""

from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.pipeline.actions import Action, Kind, Placement, Schedule


def forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    """Build a schedule with forwards only, on stages placed as in training.

    In a loop, microbatches go through a rank's chunks in groups of pp, as in interleaved 1F1B. In a V, microbatch i runs on stage s
    in time slot 2 i + s. So a rank waits only before its first and after its last action.
    """

    def turn(rank: int, action: Action) -> tuple[int, ...]:
        if placement.is_v:
            return (2 * action.microbatch + placement.stage_of(rank, action.chunk),)
        return (action.microbatch // placement.pp, action.chunk, action.microbatch)

    forwards = [Action(Kind.F, chunk, at) for chunk in range(placement.vpp) for at in range(num_microbatches)]
    rows = (tuple(sorted(forwards, key=lambda each: turn(rank, each))) for rank in range(placement.pp))
    return Schedule("forward_only", placement, num_microbatches, True, tuple(rows))


def of_forward(sizes: ParallelSizes, num_microbatches: int) -> Schedule:
    """Build the forward-only schedule for a layout's pipeline sizes."""
    return forward_only(Placement(sizes.pp, sizes.vpp, sizes.is_v), num_microbatches)
