"""Builds every rank's compute actions from the pipeline's sizes.

    gpipe         FFFFBBBB        all forwards, then all backwards, with m microbatches in flight
    1f1b          FFF FB FB BBB   warm-up, then forwards and backwards in turn, then cool-down, with p - r in flight
    interleaved                   1f1b with v chunks per rank, which divides the bubble by v and needs more transfers
    zb_h1                         1f1b with delayed weight gradients, of at most r microbatches on rank r
    zbv                           two chunks per rank in a V, with weight gradients in the bubble
    forward_only  FFFF            forwards alone, for validation and generation

m is the number of microbatches, p the number of pp ranks, r a rank's index, v = vpp. A microbatch is in flight from the start of
its forward to the end of its backward.

A rank runs its forwards in one fixed order and its backwards in another. A schedule is given by those two orders and the warm-up,
the number of forwards before the first backward. `triaxis.engine.pipeline.zero_bubble` builds the schedules that split a backward
in two.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from triaxis.engine.config.quantities.plan import batch_plan
from triaxis.engine.config.schema.layout import IS_INTERLEAVED, RUNS_IN_A_V
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.schedule_file import ScheduleText
from triaxis.engine.errors import ScheduleError
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.pipeline.actions import Action, Kind, Placement, Schedule
from triaxis.engine.pipeline.forwards import forward_only
from triaxis.engine.pipeline.zero_bubble import zb_h1, zbv


def gpipe(pp: int, num_microbatches: int) -> Schedule:
    """Build a schedule of all forwards, then all backwards (1811.06965).

    In flight on every rank: all m microbatches. Bubble: (p - 1)/m of the ideal time, for p ranks.
    """
    return _warm_up_then_alternate("gpipe", pp, 1, num_microbatches, lambda rank: num_microbatches)


def one_f_one_b(pp: int, num_microbatches: int) -> Schedule:
    """Build the 1F1B schedule (PipeDream-flush, 2006.09503).

    In flight on rank r of p: min(p - r, m) of m microbatches. Bubble: (p - 1)/m of the ideal time.
    """
    # Before rank r gets its first gradient, microbatch 0 passes the p - r - 1 ranks below and one more forward runs here.
    return _warm_up_then_alternate("1f1b", pp, 1, num_microbatches, lambda rank: pp - rank - 1)


def interleaved(pp: int, vpp: int, num_microbatches: int) -> Schedule:
    """Build the interleaved 1F1B schedule (2104.04473, section 2.2), for any number of microbatches.

    Microbatches go through a rank's v chunks in groups of p, the number of ranks. The last group may have fewer.

    Rank r has at most min(m v, 2(p - r - 1) + (v - 1)p + 1) microbatch-chunks in flight. It has exactly so many if m is a multiple
    of p. Bubble: (p - 1)/(v m) of the ideal time. A partial last group makes the ranks wait for up to p - (m mod p) further slots
    per chunk.
    """
    # A group has passed the first v - 1 chunks after (v - 1)p forwards; then microbatch 0 still has to go down to the
    # last rank and its gradient back up, p - r - 1 slots each way.
    return _warm_up_then_alternate(
        "interleaved", pp, vpp, num_microbatches, lambda rank: 2 * (pp - rank - 1) + (vpp - 1) * pp
    )


BUILDERS: Mapping[str, Callable[[int, int, int], Schedule]] = MappingProxyType(
    {
        "gpipe": lambda pp, vpp, num_microbatches: gpipe(pp, num_microbatches),
        "1f1b": lambda pp, vpp, num_microbatches: one_f_one_b(pp, num_microbatches),
        "interleaved": interleaved,
        "zb_h1": lambda pp, vpp, num_microbatches: zb_h1(one_f_one_b(pp, num_microbatches)),
        "zbv": lambda pp, vpp, num_microbatches: zbv(pp, num_microbatches),
        "forward_only": lambda pp, vpp, num_microbatches: forward_only(Placement(pp, vpp), num_microbatches),
    }
)
"""Each schedule's builder by name, called with (pp, vpp, microbatches)."""


def of_step(config: Config, sizes: ParallelSizes) -> Schedule:
    """Build a training step's schedule, or read it from `schedule.file`.

    Raises:
        ScheduleError: the file has a different pp or vpp, or fewer microbatches. If it has more, the first ones are used.
    """
    return of_config(config, sizes.pp, sizes.vpp, batch_plan(config, sizes.dp).num_microbatches)


def of_config(config: Config, pp: int, vpp: int, num_microbatches: int) -> Schedule:
    """Build the configured training schedule for the given sizes, or read it from `schedule.file`.

    Raises:
        ScheduleError: the file has a different pp or vpp, or fewer microbatches. If it has more, the first ones are used.
    """
    file = config.schedule.file
    if file is None:
        return build(config.schedule.name, pp, vpp, num_microbatches)
    text = file.text
    if (text.pp, text.vpp) != (pp, vpp) or text.num_microbatches < num_microbatches:
        raise ScheduleError(
            f"schedule.file = {file} is a schedule of pp {text.pp}, vpp {text.vpp} and {text.num_microbatches} microbatches, and a "
            f"step of pp {pp}, vpp {vpp} and {num_microbatches} was asked for: no row says what its ranks do. Give a file of these "
            "sizes, or schedule.file=null."
        )
    whole = from_rows(text)
    if text.num_microbatches == num_microbatches:
        return whole
    rows = tuple(_existing(row, num_microbatches) for row in whole.actions)
    return replace(whole, num_microbatches=num_microbatches, actions=rows)


def from_rows(text: ScheduleText) -> Schedule:
    """Build a schedule from rows of words, each the text of one action (`Action.parse`)."""
    rows = tuple(tuple(Action.parse(word) for word in row) for row in text.rows)
    placement = Placement(text.pp, text.vpp, text.is_v)
    return Schedule(text.name, placement, text.num_microbatches, text.forward_only, rows)


def title(config: Config) -> str:
    """Return the name of a run's training schedule, followed by its file if there is one."""
    file = config.schedule.file
    return resolve(config.schedule.name, config.parallel.vpp) if file is None else f"{file.text.name}, from {file}"


def build(name: str, pp: int, vpp: int, num_microbatches: int) -> Schedule:
    """Build a schedule by name.

    Args:
        name: a key in `BUILDERS`, or `auto` (see `resolve`).
        pp: pipeline ranks.
        vpp: model chunks per rank.
        num_microbatches: microbatches per step in one pipeline.

    Raises:
        ScheduleError: a size is below 1.
    """
    name = resolve(name, vpp)
    _require_positive(pp=pp, vpp=vpp, microbatches=num_microbatches)
    assert name in BUILDERS and (IS_INTERLEAVED.get(name, True) or vpp == 1), f"{name} with vpp {vpp}"
    assert name not in RUNS_IN_A_V or vpp == 2, f"{name} with vpp {vpp}"
    return BUILDERS[name](pp, vpp, num_microbatches)


def resolve(name: str, vpp: int) -> str:
    """Resolve the schedule name `auto` to 1f1b, or to interleaved if vpp > 1. Other names are returned as given."""
    if name == "auto":
        return "interleaved" if vpp > 1 else "1f1b"
    return name


def _require_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ScheduleError(
                f"{name}={size}: a pipeline needs at least 1. With none there is nothing to run; give a positive number."
            )


def _order(kind: Kind, pp: int, chunks: Sequence[int], num_microbatches: int) -> list[Action]:
    """List one pass's actions, with microbatches in groups of pp.

    Each group goes through all `chunks` in the order given. The last group is filled up with microbatches that do not exist. The
    caller drops their actions.
    """
    return [
        Action(kind, chunk, microbatch)
        for first in range(0, num_microbatches, pp)
        for chunk in chunks
        for microbatch in range(first, first + pp)
    ]


def _warm_up_then_alternate(
    name: str, pp: int, vpp: int, num_microbatches: int, warm_up: Callable[[int], int]
) -> Schedule:
    """Build a schedule from each rank's number of warm-up forwards.

    Rank r runs `warm_up(r)` forwards, then a forward and a backward in turn, then the other backwards. The order is computed for
    whole groups of pp microbatches, then actions on microbatches that do not exist are left out. Alternating over a shorter last
    group would deadlock.
    """
    _require_positive(pp=pp, vpp=vpp, microbatches=num_microbatches)
    forwards = _order(Kind.F, pp, range(vpp), num_microbatches)
    backwards = _order(Kind.B, pp, range(vpp - 1, -1, -1), num_microbatches)
    rows = []
    for rank in range(pp):
        num_first = min(warm_up(rank), len(forwards))
        row = forwards[:num_first]
        for forward, backward in zip(forwards[num_first:], backwards, strict=False):
            row += [forward, backward]
        row += backwards[len(forwards) - num_first :]
        rows.append(_existing(row, num_microbatches))
    return Schedule(name, Placement(pp, vpp), num_microbatches, False, tuple(rows))


def _existing(row: Sequence[Action], num_microbatches: int) -> tuple[Action, ...]:
    return tuple(action for action in row if action.microbatch < num_microbatches)
