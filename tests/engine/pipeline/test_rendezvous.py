"""The rules of NCCL: each rejects a planted program of two or three ranks that the others let through."""

from collections.abc import Mapping

import pytest

from triaxis.engine.pipeline.rendezvous import Call, Conflict, MessageEnd, Row, Rules, Step, Stuck, execute

A_TO_B, B_TO_A = MessageEnd(0, 1, "x"), MessageEnd(1, 0, "y")
RING = frozenset({("p", 0, 1), ("p", 1, 0)})


def call(*messages: MessageEnd, on: str = "p") -> Call:
    return Call(on, messages)


def after(*positions: int) -> Step:
    return Step(positions)


def one_f_one_b() -> Mapping[int, Row]:
    """1F1B on two ranks with one microbatch; the first instruction of rank 0 is an early receive of the gradient."""
    return {
        0: [call(MessageEnd(1, 0, "g"), on="backward"), Step(), call(MessageEnd(0, 1, "x"), on="forward"), after(0)],
        1: [call(MessageEnd(0, 1, "x"), on="forward"), after(0), after(), call(MessageEnd(1, 0, "g"), on="backward")],
    }


def test_what_runs_under_the_rules_that_always_hold() -> None:
    assert execute(one_f_one_b(), {}) is None


def test_first_use_holds_the_host() -> None:
    """Rank 0 waits in the receive of the gradient for a rank 1 that waits in the receive of the activation."""
    stuck = execute(one_f_one_b(), {}, Rules(opened=()))
    assert isinstance(stuck, Stuck) and stuck.stopped == ((0, 0), (1, 0))
    opened = {("backward", 1, 0), ("forward", 0, 1)}
    assert execute(one_f_one_b(), {}, Rules(opened=opened)) is None
    assert isinstance(execute(one_f_one_b(), {}, Rules(opened={("forward", 0, 1)})), Stuck)


def test_a_first_use_in_mirrored_calls_goes_on() -> None:
    both = [call(A_TO_B, B_TO_A)]
    assert execute({0: both, 1: both}, {}, Rules(opened=())) is None


def test_a_first_use_in_calls_that_open_different_connections() -> None:
    """Rank 0 opens both directions, rank 1 one of them: the masks of the pair are not mirrored."""
    rows = {0: [call(A_TO_B, B_TO_A)], 1: [call(A_TO_B), call(B_TO_A)]}
    assert execute(rows, {}) is None
    conflict = execute(rows, {}, Rules(opened=()))
    assert isinstance(conflict, Conflict) and conflict.reason == "connections"
    assert {conflict.first, conflict.second} == {(0, 0), (1, 0)}
    assert execute(rows, {}, Rules(opened=RING)) is None


def test_a_step_that_waits_for_the_device_waits_for_early_receives() -> None:
    """Both ranks post a receive that the other sends only after its own step."""
    rows = {
        0: [call(B_TO_A, on="backward"), Step(), call(A_TO_B, on="forward"), after(0)],
        1: [call(A_TO_B, on="forward"), Step(), call(B_TO_A, on="backward"), after(0)],
    }
    assert execute(rows, {}) is None and execute(rows, {}, Rules(one_queue=True)) is None
    stuck = execute(rows, {}, Rules(steps_synchronize=True))
    assert isinstance(stuck, Stuck) and stuck.stopped == ((0, 1), (1, 1))


def test_one_queue_launches_nothing_behind_a_call_that_has_not_started() -> None:
    """Rank 0 has two receives on one channel; the send that would bring the first stands behind the second in its queue."""
    rows = {
        0: [call(MessageEnd(1, 0, "a")), call(MessageEnd(1, 0, "b")), call(MessageEnd(0, 1, "x"), on="q"), after(0, 1)],
        1: [call(MessageEnd(0, 1, "x"), on="q"), after(0), call(MessageEnd(1, 0, "a")), call(MessageEnd(1, 0, "b"))],
    }
    assert execute(rows, {}) is None
    stuck = execute(rows, {}, Rules(one_queue=True))
    assert isinstance(stuck, Stuck) and (0, 1) in stuck.stopped


def test_another_message_than_the_peer_means() -> None:
    conflict = execute({0: [call(A_TO_B)], 1: [call(MessageEnd(0, 1, "z"))]}, {})
    assert conflict == Conflict("content", (1, 0), (0, 0), "z", "x")


@pytest.mark.parametrize(("other", "fails"), [("sum of 8", False), ("sum of 9", True)])
def test_a_collective_is_the_same_at_every_member(other: str, fails: bool) -> None:
    rows = {rank: [Call("dp", collective="sum of 8" if rank else other), after(0)] for rank in range(3)}
    found = execute(rows, {"dp": [0, 1, 2]})
    assert isinstance(found, Conflict) if fails else found is None


def test_a_collective_waits_for_all_members() -> None:
    rows: dict[int, Row] = {0: [Call("dp", collective="sum")], 1: [Call("dp", collective="sum")], 2: []}
    stuck = execute(rows, {"dp": [0, 1, 2]})
    assert isinstance(stuck, Stuck) and not stuck.stopped and [head.place for head in stuck.heads] == [(0, 0), (1, 0)]


def test_a_step_waits_for_the_fact_that_it_needs() -> None:
    rows: dict[int, Row] = {0: [Step(needs="f")], 1: [Step(makes="f")]}
    assert execute(rows, {}) is None
    assert isinstance(execute({0: rows[0]}, {}), Stuck)
