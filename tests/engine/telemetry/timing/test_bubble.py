"""Waits in a pipeline by their causes: on runs made up event by event, with messages that are late where a test says so."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.layout.rank_grid import Coordinates
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action, Kind, Schedule
from triaxis.engine.pipeline.simulate import Costs, simulate
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.timing.bubble import Attribution, num_actions
from triaxis.engine.telemetry.timing.marks import Activity
from triaxis.engine.telemetry.timing.time_split import PARTS, StepTally, TimeSplit


@dataclass(frozen=True)
class Call:
    op: str
    axis: str
    purpose: str = ""


PART = StepPart.FORWARD_BACKWARD
RECEIVE = Call("recv", "pp_forward")
TP = Call("all_reduce", "tp", "mlp forward")
CP = Call("all_gather", "cp", "keys and values forward")
STEP = Call("all_reduce", "world", "step")
Doings = list[tuple[Activity, float]]


@dataclass
class Run:
    """Some pipelines side by side (dp), each stage on `cp` x `tp` ranks; in the middle of every action those of tp meet, then all.

    Attributes:
        begins: by pp rank, what it does before its first action.
        durations: by replica, pp rank and action.
        delays: of every message from one pp rank to another, by peer; none where a link is missing.
        latency: of the meeting at the end of the step.
    """

    schedule: Schedule
    tp: int
    begins: Sequence[float]
    durations: Sequence[Sequence[Sequence[float]]]
    delays: Mapping[tuple[int, int], Sequence[float]]
    latency: float = 0.0
    cp: int = 1

    @property
    def peers(self) -> int:
        return self.cp * self.tp

    def places(self) -> list[Coordinates]:
        """Ranks in the order of the grid: pp, dp, cp, tp."""
        pp, dp = self.schedule.placement.pp, len(self.durations)
        return [
            Coordinates(stage, replica, *divmod(peer, self.tp))
            for stage in range(pp)
            for replica in range(dp)
            for peer in range(self.peers)
        ]

    def step(self) -> tuple[list[Doings], list[float]]:
        """What each rank does, and when the last rank of each replica's pipeline is through."""
        walks = [self._walk(durations) for durations in self.durations]
        spans = [max(now for _, nows in walk for now in nows) for walk in walks]
        ranks = []
        for place in self.places():
            activities, nows = walks[place.dp][place.pp]
            peer = place.cp * self.tp + place.tp
            done = activities[peer]
            done.append((Activity(StepPart.OPTIMIZER, wait=STEP), max(spans) - nows[peer] + self.latency))
            done.append((Activity(StepPart.OPTIMIZER), 0.25 * (1 + place.pp)))
            ranks.append(done)
        return ranks, spans

    def _walk(self, durations: Sequence[Sequence[float]]) -> list[tuple[list[Doings], list[float]]]:
        """By pp rank: what its peers do, and when each is through with its last action."""
        placement, peers = self.schedule.placement, range(self.peers)
        stages = [([[(Activity(StepPart.DATA), begin)] for _ in peers], [begin] * self.peers) for begin in self.begins]
        made: dict[tuple[int, Kind, int], list[float]] = {}
        done = [0] * placement.pp
        while done != [len(row) for row in self.schedule.actions]:
            before = list(done)
            for rank, row in enumerate(self.schedule.actions):
                for action in row[done[rank] :]:
                    stage = placement.stage_of(rank, action.chunk)
                    source = self.schedule.input_of(stage, action)
                    activities, nows = stages[rank]
                    ready = list(nows)
                    if source is not None:
                        if source not in made:
                            break
                        late = self.delays.get((placement.rank_of(source.stage), rank), [0.0] * self.peers)
                        arrived = made[source]
                        ready = [max(nows[peer], arrived[peer] + late[peer]) for peer in peers]
                    half = durations[rank][done[rank]] / 2
                    first = [peer - peer % self.tp for peer in peers]
                    met = [max(ready[at : at + self.tp]) for at in first]
                    for peer in peers:
                        if ready[peer] > nows[peer]:
                            activities[peer].append((Activity(PART, action, RECEIVE), ready[peer] - nows[peer]))
                        activities[peer].append((Activity(PART, action), half))
                        if self.tp > 1:
                            activities[peer].append((Activity(PART, action, TP), met[peer] - ready[peer]))
                        if self.cp > 1:
                            activities[peer].append((Activity(PART, action, CP), max(ready) - met[peer]))
                        activities[peer].append((Activity(PART, action), half))
                        nows[peer] = max(ready) + 2 * half
                    if action.kind is not Kind.W:
                        made[stage, Kind.F if action.kind is Kind.F else Kind.B, action.microbatch] = list(nows)
                    done[rank] += 1
            assert done != before, "the actions wait for each other"
        return stages


def split_of(schedule: Schedule, places: Sequence[Coordinates], steps: Sequence[Sequence[Doings]]) -> TimeSplit:
    """The split of some steps, each of what every rank does and for how long."""
    tallies = [StepTally() for _ in places]
    for number, ranks in enumerate(steps, start=2):
        for tally, activities in zip(tallies, ranks, strict=True):
            times = np.cumsum([100.0 * number, *(seconds for _, seconds in activities)]).tolist()
            tally.add(number, [activity for activity, _ in activities], times)
    rows = np.array([tally.numbers(num_actions(schedule)) for tally in tallies])
    return Attribution(schedule, places).work_out(rows, 2, 1 + len(steps))


durations = st.floats(0.5, 2.0)


@st.composite
def pipelines(draw: st.DrawFn) -> Schedule:
    pp, vpp = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    return schedules.build(
        "1f1b" if vpp == 1 else "interleaved", pp, vpp, draw(st.integers(1, 4)) * (pp if vpp > 1 else 1)
    )


@st.composite
def runs(draw: st.DrawFn, schedule: Schedule) -> Run:
    """Messages without delay; each action takes its own time, and each rank begins when it wants to."""
    pp = schedule.placement.pp

    def some(number: int) -> list[float]:
        return draw(st.lists(durations, min_size=number, max_size=number))

    replicas = [[some(len(row)) for row in schedule.actions] for _ in range(draw(st.integers(1, 2)))]
    begins = some(pp) if draw(st.booleans()) else [0.125] * pp
    return Run(
        schedule, draw(st.integers(1, 2)), begins, replicas, {}, draw(st.floats(0, 0.25)), draw(st.integers(1, 2))
    )


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_what_late_messages_cost_is_exposed_pp_and_the_bubble_stays(data: st.DataObject) -> None:
    """One link, or all of them, is slow in two steps, for each tensor- and context-parallel rank differently."""
    schedule = data.draw(pipelines())
    pp = schedule.placement.pp
    prompt = data.draw(runs(schedule))
    links = [(rank, (rank + 1) % pp) for rank in range(pp)] + [((rank + 1) % pp, rank) for rank in range(pp)]
    slow = data.draw(st.sampled_from([*([link] for link in links), links]))
    delay = st.lists(st.floats(0, 5), min_size=prompt.peers, max_size=prompt.peers)
    late = replace(prompt, delays={link: data.draw(delay) for link in slow})

    (prompt_step, spans), (late_step, late_spans) = prompt.step(), late.step()
    before = split_of(schedule, prompt.places(), [prompt_step])
    after = split_of(schedule, prompt.places(), [late_step])
    for rank, place in enumerate(prompt.places()):
        grown = late_spans[place.dp] - spans[place.dp]
        assert before.ranks[rank]["exposed_pp"] == pytest.approx(0.0, abs=1e-9)
        assert after.ranks[rank]["exposed_pp"] == pytest.approx(grown, abs=1e-9)
        for part in ("compute", "exposed_tp", "exposed_cp", "bubble", "optimizer", "data"):
            assert after.ranks[rank][part] == pytest.approx(before.ranks[rank][part], abs=1e-9), part
    both = split_of(schedule, prompt.places(), [prompt_step, late_step])
    for part in PARTS:
        assert both.seconds[part] == pytest.approx((before.seconds[part] + after.seconds[part]) / 2, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_whatever_the_ranks_do_the_parts_sum_to_the_step_and_none_is_negative(data: st.DataObject) -> None:
    """The durations are not those of any run: every rank's are its own."""
    schedule = data.draw(pipelines())
    made_up = data.draw(runs(schedule))
    steps, _ = made_up.step()
    seconds = st.one_of(st.just(0.0), st.floats(0, 3))
    steps = [[(activity, data.draw(seconds)) for activity, _ in activities] for activities in steps]
    split = split_of(schedule, made_up.places(), [steps])
    for parts, activities in zip(split.ranks, steps, strict=True):
        assert sum(parts.values()) == pytest.approx(sum(each for _, each in activities), abs=1e-9)
        assert min(parts.values()) >= 0.0
    assert sum(split.seconds.values()) == pytest.approx(split.step_seconds)


@settings(deadline=None, max_examples=15)
@given(data=st.data(), schedule=pipelines())
def test_where_only_the_schedule_waits_the_measured_bubble_is_the_simulated_one(
    data: st.DataObject, schedule: Schedule
) -> None:
    placement = schedule.placement
    stages = st.lists(durations, min_size=placement.num_stages, max_size=placement.num_stages)
    costs = Costs(data.draw(stages), data.draw(stages), (0.0,) * placement.num_stages)
    ideal = simulate(schedule, costs)
    lasting = [[interval.end - interval.start for interval in row] for row in ideal.intervals]
    run = Run(schedule, 1, [0.125] * placement.pp, [lasting], {}, latency=0.0625)
    split = split_of(schedule, run.places(), [run.step()[0]])
    for rank, parts in enumerate(split.ranks):
        assert parts["bubble"] == pytest.approx(ideal.span - ideal.busy(rank), abs=1e-9)
        assert split.schedule_bubbles[rank] == pytest.approx(ideal.span - ideal.busy(rank), abs=1e-9)
        assert parts["other"] == pytest.approx(0.0625, abs=1e-9)


@pytest.mark.parametrize("call", [TP, CP])
def test_waits_inside_an_action_lengthen_it_for_the_schedule_but_are_not_compute(call: Call) -> None:
    """Two ranks, one microbatch: 0F0 on rank 0 takes 1 s and waits 1 s for tp or cp; what rank 1 then waits is the schedule's."""
    schedule = schedules.build("1f1b", 2, 1, 1)
    f0, b0 = Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)
    first = [(Activity(PART, f0), 0.5), (Activity(PART, f0, call), 1.0), (Activity(PART, f0), 0.5)]
    first += [(Activity(PART, b0, RECEIVE), 2.5), (Activity(PART, b0), 1.0)]
    second = [(Activity(PART, f0, RECEIVE), 2.25), (Activity(PART, f0), 1.0), (Activity(PART, b0), 1.0)]
    second += [(Activity(StepPart.OPTIMIZER, wait=STEP), 1.25)]
    split = split_of(schedule, [Coordinates(0, 0, 0, 0), Coordinates(1, 0, 0, 0)], [[first, second]])
    assert [rank["compute"] for rank in split.ranks] == [2.0, 2.0]
    part = "exposed_tp" if call is TP else "exposed_cp"
    assert [rank[part] for rank in split.ranks] == [1.0, 0.0]
    # The schedule: 2 s and 1 s of F, 1 s and 1 s of B. The transfers of 0.25 s each come on top.
    assert split.schedule_bubbles == (2.0, 3.0)
    assert [rank["bubble"] for rank in split.ranks] == [2.0, 3.0]
    assert [rank["exposed_pp"] for rank in split.ranks] == [0.5, 0.5]


def test_a_rank_that_computes_longer_than_its_peer_has_waited_for_no_message_in_it() -> None:
    """Rank 2 gets its input earlier than rank 3 and takes longer, but stands in no tensor-parallel call: it is slow."""
    schedule = schedules.build("1f1b", 2, 1, 1)
    f0, b0 = Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)
    fed = [(Activity(PART, f0), 1.0), (Activity(PART, b0, RECEIVE), 3.0), (Activity(PART, b0), 1.0)]
    slow, prompt = (
        [(Activity(PART, f0, RECEIVE), wait), (Activity(PART, f0), 3.0 - wait), (Activity(PART, b0), 1.0)]
        for wait in (1.0, 1.5)
    )
    ends = [(Activity(StepPart.OPTIMIZER, wait=STEP), 1.0)]
    places = [Coordinates(pp, 0, 0, tp) for pp in range(2) for tp in range(2)]
    split = split_of(schedule, places, [[fed, fed, slow + ends, prompt + ends]])
    assert [parts["exposed_tp"] for parts in split.ranks] == [0.0] * 4
    assert [parts["compute"] for parts in split.ranks] == [2.0, 2.0, 3.0, 2.5]
    assert all(sum(parts.values()) == 5.0 for parts in split.ranks)


def test_the_sum_over_first_and_last_stage_is_exposed_dp_beyond_the_wait_for_the_stage_that_is_through_last() -> None:
    """Tied embeddings: rank 1 is through 1 s earlier, then both need 0.5 s for the sum and all ranks 0.25 s to agree."""
    schedule = schedules.build("1f1b", 2, 1, 1)
    f0, b0, ends = Action(Kind.F, 0, 0), Action(Kind.B, 0, 0), Call("all_reduce", "ends", "replica gradients")
    agree = (Activity(StepPart.OPTIMIZER, wait=STEP), 0.25)
    first = [(Activity(PART, f0), 1.0), (Activity(PART, b0, RECEIVE), 2.0), (Activity(PART, b0), 1.0)]
    first += [(Activity(PART, None, ends), 0.5), agree]
    last = [(Activity(PART, f0, RECEIVE), 1.0), (Activity(PART, f0), 1.0), (Activity(PART, b0), 1.0)]
    last += [(Activity(PART, None, ends), 1.5), agree]
    split = split_of(schedule, [Coordinates(0, 0, 0, 0), Coordinates(1, 0, 0, 0)], [[first, last]])
    found = [[parts[part] for part in ("compute", "bubble", "exposed_dp", "other")] for parts in split.ranks]
    assert found == [[2.0, 2.0, 0.5, 0.25], [2.0, 2.0, 0.5, 0.25]]


def test_at_the_end_only_what_a_rank_waits_beyond_the_others_is_for_the_stage_that_is_through_last() -> None:
    """Rank 1 is through 1 s earlier, reduces gradients for 0.5 s, and waits 0.5 s more than rank 0, for whom it takes 0.25 s."""
    schedule = schedules.build("1f1b", 2, 1, 1)
    f0, b0, reduce = Action(Kind.F, 0, 0), Action(Kind.B, 0, 0), Call("reduce_scatter", "dp", "gradients")
    first = [(Activity(PART, f0), 1.0), (Activity(PART, b0, RECEIVE), 2.0), (Activity(PART, b0), 1.0)]
    first += [(Activity(StepPart.OPTIMIZER, wait=STEP), 0.25)]
    last = [(Activity(PART, f0, RECEIVE), 1.0), (Activity(PART, f0), 1.0), (Activity(PART, b0), 1.0)]
    last += [(Activity(PART, None, reduce), 0.5), (Activity(StepPart.OPTIMIZER, wait=STEP), 0.75)]
    split = split_of(schedule, [Coordinates(0, 0, 0, 0), Coordinates(1, 0, 0, 0)], [[first, last]])
    found = [[parts[part] for part in ("bubble", "exposed_pp", "exposed_dp", "other")] for parts in split.ranks]
    assert found == [[2.0, 0.0, 0.0, 0.25], [1.5, 0.0, 0.5, 0.25]]
