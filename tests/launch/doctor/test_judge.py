"""Who is out of line, from facts and rates that are made up: the odd one is named, whoever it is, and nobody else."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.launch.doctor.judge import judge, worst
from triaxis.launch.doctor.phases import node_paths
from triaxis.launch.doctor.records import (
    Examination,
    Finding,
    GroupRate,
    Level,
    LimitFacts,
    Needs,
    NetworkFacts,
    NodeClock,
    RankFacts,
    RootFacts,
)

GB = 1e9
PER_NODE = 2


def rank_of(rank: int) -> RankFacts:
    node = rank // PER_NODE
    return RankFacts(
        rank=rank,
        node=node,
        host=f"host{node}",
        equal={"torch": "2.13", "driver": "580.1"},
        alike={"kernel": "6.1"},
        network=NetworkFacts("eth0", f"10.0.0.{node}", 10_000, ("eth0", 10_000), (f"10.0.0.{node}", "127.0.0.1")),
        roots=(RootFacts("runtime.runs_dir", "runs", True, True, "", 10**12),),
        corpora={"data/a.bin": 100},
        gpu=f"uuid{rank}",
        peers=tuple(
            f"uuid{other}" for other in range(rank // PER_NODE * PER_NODE, rank // PER_NODE * PER_NODE + PER_NODE)
        ),
        links=links_of(node) if rank % PER_NODE == 0 else {},
        clock=NodeClock(0.001, 0.002) if rank % PER_NODE == 0 else None,
        limits=LimitFacts(None, 16 * 2**30, has_infiniband=True),
    )


def links_of(node: int, link: str = "NV18") -> dict[str, dict[str, str]]:
    ranks = range(node * PER_NODE, (node + 1) * PER_NODE)
    return {f"uuid{one}": {f"uuid{other}": link for other in ranks if other != one} for one in ranks}


def paths_of(num_nodes: int, slow_sender: int | None = None, slow_receiver: int | None = None) -> tuple[GroupRate, ...]:
    """Between nodes; a slow end has a tenth."""
    found = []
    for phase in node_paths(PER_NODE, num_nodes * PER_NODE):
        for pair in phase:
            is_slow = pair[0] // PER_NODE == slow_sender or pair[1] // PER_NODE == slow_receiver
            rate = (0.1 if is_slow else 1.0) * GB
            found.append(GroupRate("world", "send", 1000, 0, pair, 1000 / rate, rate))
    return tuple(found)


def groups_of(rates: Sequence[float], axis: str = "tp") -> tuple[GroupRate, ...]:
    """One group a node."""
    return tuple(
        GroupRate(axis, "all_reduce", 1000, 4, (node * PER_NODE, node * PER_NODE + 1), 1000 / rate, rate)
        for node, rate in enumerate(rates)
    )


def cluster(num_nodes: int) -> Examination:
    num_ranks = num_nodes * PER_NODE
    return Examination(
        needs=Needs("nccl", 10**9, 3, ("runtime.runs_dir",), "runtime.runs_dir"),
        facts=tuple(rank_of(rank) for rank in range(num_ranks)),
        groups=groups_of([10 * GB] * num_nodes),
        paths=paths_of(num_nodes),
        tp_groups=tuple((rank, rank + 1) for rank in range(0, num_ranks, PER_NODE)),
    )


def with_node(seen: Examination, node: int, **changes: object) -> Examination:
    facts = tuple(replace(one, **changes) if one.node == node else one for one in seen.facts)  # type: ignore[arg-type]
    return replace(seen, facts=facts)


def found(seen: Examination, check: str, level: Level = Level.FAIL) -> list[Finding]:
    return [one for one in judge(seen) if one.check == check and one.level is level]


def named(seen: Examination, check: str, level: Level = Level.FAIL) -> set[str]:
    return {host for one in found(seen, check, level) for host in one.hosts}


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 7])
def test_nodes_that_are_alike_are_all_right(num_nodes: int) -> None:
    findings = judge(cluster(num_nodes))
    assert worst(findings) is Level.OK, findings
    checks = {"places", "versions", "gpus", "limits", "listeners", "folders", "disk", "data", "bandwidth"}
    assert {one.check for one in findings} == (checks | {"interfaces", "clocks", "links"} if num_nodes > 1 else checks)


NODES = st.integers(3, 9).flatmap(lambda count: st.tuples(st.just(count), st.integers(0, count - 1)))


@settings(deadline=None, max_examples=40)
@given(at=NODES, what=st.sampled_from(["torch", "driver"]))
def test_a_node_with_another_version_is_named(at: tuple[int, int], what: str) -> None:
    num_nodes, odd = at
    equal = {"torch": "2.13", "driver": "580.1"} | {what: "0.1"}
    seen = with_node(cluster(num_nodes), odd, equal=equal)
    assert named(seen, "versions") == {f"host{odd}"}
    (finding,) = found(seen, "versions")
    assert f"{what}: 0.1 on host{odd}" in finding.text
    assert worst(judge(seen)) is Level.FAIL


def test_of_two_nodes_that_differ_the_second_is_named_and_both_values_are_said() -> None:
    (finding,) = found(with_node(cluster(2), 0, equal={"torch": "2.9", "driver": "580.1"}), "versions")
    assert finding.hosts == ("host1",)
    assert "2.13 on host1; 2.9 elsewhere" in finding.text


def test_what_may_differ_is_a_warning_and_an_unset_variable_a_difference() -> None:
    seen = with_node(cluster(3), 1, alike={"kernel": "6.1", "NCCL_DEBUG": "INFO"})
    assert named(seen, "versions", Level.WARN) == {"host1"}
    assert worst(judge(seen)) is Level.WARN


def test_what_only_the_first_rank_of_a_node_says_is_compared_among_those() -> None:
    seen = cluster(3)
    links = {0: "1 x NV18", 2: "1 x NV18", 4: "1 x SYS"}
    facts = [
        replace(one, equal=dict(one.equal) | {"GPU links": links[one.rank]}) if one.rank in links else one
        for one in seen.facts
    ]
    assert named(replace(seen, facts=tuple(facts)), "versions") == {"host2"}


@settings(deadline=None, max_examples=60)
@given(at=NODES, part=st.floats(0.01, 0.4), scale=st.floats(1e3, 1e12), noise=st.lists(st.floats(0.9, 1.1), min_size=9))
def test_a_slow_group_names_its_host_whatever_the_unit(
    at: tuple[int, int], part: float, scale: float, noise: list[float]
) -> None:
    num_nodes, odd = at
    # At most 0.4 x 1.1, of a median that is at least 0.9: less than half.
    rates = [scale * noise[node] * (part if node == odd else 1.0) for node in range(num_nodes)]
    seen = replace(cluster(num_nodes), groups=groups_of(rates))
    assert named(seen, "bandwidth") == {f"host{odd}"}
    assert f"ranks {odd * PER_NODE} {odd * PER_NODE + 1} (host{odd})" in found(seen, "bandwidth")[0].text


@settings(deadline=None, max_examples=60)
@given(rates=st.lists(st.floats(0.6, 1.1), min_size=2, max_size=9))
def test_groups_that_are_about_equal_are_not_named(rates: list[float]) -> None:
    seen = replace(cluster(len(rates)), groups=groups_of([rate * GB for rate in rates]))
    assert not found(seen, "bandwidth")


@settings(deadline=None, max_examples=30)
@given(order=st.permutations(range(5)))
def test_the_order_of_groups_and_paths_does_not_matter(order: list[int]) -> None:
    rates = [GB, GB, 0.1 * GB, GB, GB]
    seen = replace(cluster(5), groups=tuple(groups_of(rates)[one] for one in order), paths=paths_of(5, slow_sender=4))
    again = replace(seen, paths=tuple(reversed(seen.paths)))
    for one in (seen, again):
        assert named(one, "bandwidth") == {"host2"}
        assert named(one, "links") == {"host4"}


def test_a_host_with_a_fast_group_is_not_to_blame_for_a_slow_one() -> None:
    """Groups across two hosts each: host 1 is in both slow ones, hosts 0 and 2 in fast ones too."""
    pairs = [(0, 2, 0.1), (2, 4, 0.1), (1, 5, 1.0)]
    groups = tuple(
        GroupRate("dp", "all_gather", 10, 1, (one, other), 1.0, rate * GB) for one, other, rate in (*pairs, (5, 1, 1.0))
    )
    assert named(replace(cluster(3), groups=groups), "bandwidth") == {"host1"}


def test_different_things_are_not_compared() -> None:
    slow_but_alone = GroupRate("dp", "all_reduce", 1000, 1, (0, 2), 1.0, 0.01 * GB)
    seen = cluster(2)
    assert not found(replace(seen, groups=(*seen.groups, slow_but_alone)), "bandwidth")


def test_ranks_of_gloo_in_one_node_share_its_processors_so_a_slow_group_is_a_warning() -> None:
    seen = replace(cluster(3), groups=groups_of([GB, GB, 0.1 * GB]))
    on_gloo = replace(seen, needs=replace(seen.needs, backend="gloo"))
    assert named(on_gloo, "bandwidth", Level.WARN) == {"host2"}
    assert not found(on_gloo, "bandwidth")


@settings(deadline=None, max_examples=60)
@given(at=NODES, sends=st.booleans(), receives=st.booleans())
def test_a_host_whose_link_is_slow_is_named_and_its_neighbours_are_not(
    at: tuple[int, int], sends: bool, receives: bool
) -> None:
    num_nodes, odd = at
    seen = replace(cluster(num_nodes), paths=paths_of(num_nodes, odd if sends else None, odd if receives else None))
    assert named(seen, "links") == ({f"host{odd}"} if sends or receives else set())
    verbs = {one.text.split()[1] for one in found(seen, "links")}
    assert verbs == {verb for verb, is_slow in (("sends", sends), ("receives", receives)) if is_slow}


@pytest.mark.parametrize(("one", "other"), list(permutations(range(2))))
def test_between_two_hosts_the_direction_is_named(one: int, other: int) -> None:
    findings = found(replace(cluster(2), paths=paths_of(2, slow_sender=one)), "links")
    assert len(findings) == PER_NODE
    assert all(finding.text.startswith(f"host{one} -> host{other}") for finding in findings)


def test_a_bad_cable_between_two_of_many_is_named_by_both_ends() -> None:
    paths = tuple(replace(path, bytes_per_second=0.1 * GB) if path.ranks == (2, 4) else path for path in paths_of(5))
    (finding,) = found(replace(cluster(5), paths=paths), "links")
    assert finding.hosts == ("host1", "host2")


def test_a_network_that_is_slow_everywhere_is_seen_beside_what_the_interface_says() -> None:
    seen = cluster(3)
    slow = replace(
        seen,
        needs=replace(seen.needs, backend="gloo"),
        paths=tuple(replace(path, bytes_per_second=path.bytes_per_second / 100) for path in seen.paths),
    )
    assert found(slow, "links", Level.WARN)
    assert worst(judge(slow)) is Level.WARN


def test_clocks() -> None:
    for offset, precision, level in (
        (0.4, 0.0, Level.OK),
        (-2.0, 0.1, Level.WARN),
        (0.6, 0.2, Level.OK),
        (100.0, 1.0, Level.FAIL),
    ):
        seen = with_node(cluster(3), 1, clock=NodeClock(offset, precision))
        assert worst(judge(seen)) is level
        if level is not Level.OK:
            assert named(seen, "clocks", level) == {"host1"}


def test_folders() -> None:
    root = RootFacts("runtime.runs_dir", "runs", True, True, "", 10**12)
    assert named(with_node(cluster(3), 2, roots=(replace(root, sees_rank_0=False),)), "folders") == {"host2"}
    assert named(with_node(cluster(3), 2, roots=(replace(root, seen_by_rank_0=False),)), "folders") == {"host2"}
    full = with_node(cluster(3), 2, roots=(replace(root, problem="No space left on device", sees_rank_0=False),))
    (finding,) = found(full, "folders")
    assert "No space left" in finding.text
    cache = RootFacts("data.cache_dir", "cache", False, False, "", 10**12)
    assert not found(with_node(cluster(3), 2, roots=(root, cache)), "folders"), "each node builds its own"


@pytest.mark.parametrize(
    ("free", "kept", "level"),
    [(10**12, 3, Level.OK), (3 * 10**9, 3, Level.WARN), (10**8, 3, Level.FAIL), (10**12, None, Level.WARN)],
)
def test_disk(free: int, kept: int | None, level: Level) -> None:
    seen = with_node(cluster(2), 1, roots=(RootFacts("runtime.runs_dir", "runs", True, True, "", free),))
    seen = replace(seen, needs=replace(seen.needs, kept_saves=kept))
    assert worst(judge(seen)) is level


def test_data() -> None:
    assert named(with_node(cluster(3), 1, corpora={"data/a.bin": None}), "data") == {"host1"}
    assert named(with_node(cluster(3), 1, corpora={"data/a.bin": 99}), "data") == {"host1"}


def test_interfaces_and_listeners() -> None:
    network = rank_of(0).network
    inside = replace(network, interface="lo", address="127.0.0.1", listening=("127.0.0.1",))
    assert named(with_node(cluster(2), 1, network=inside), "interfaces") == {"host1"}
    slower = replace(network, mbits=1000, fastest=("ib0", 200_000))
    (finding,) = found(with_node(cluster(2), 0, network=slower), "interfaces", Level.WARN)
    assert "ib0 is faster (200,000 Mbit/s)" in finding.text
    assert finding.hosts == ("host0",)
    wide = replace(network, listening=("10.0.0.0", "::"))
    (finding,) = found(with_node(cluster(2), 0, network=wide), "listeners", Level.WARN)
    assert finding.hosts == ("host0",)
    assert "on ::" in finding.text


def test_places() -> None:
    seen = cluster(2)
    split = replace(seen, facts=(replace(seen.facts[0], host="elsewhere"), *seen.facts[1:]))
    assert named(split, "places") == {"elsewhere", "host0"}
    assert named(with_node(seen, 1, host="host0"), "places", Level.WARN) == {"host0"}


def test_gpus() -> None:
    apart = with_node(cluster(2), 1, links=links_of(1, "SYS"))
    assert not found(apart, "gpus"), "a node without NVLink is another node, not a wrong order"
    wide = {"uuid2": {"uuid3": "SYS", "uuid9": "NV18"}, "uuid3": {"uuid2": "SYS"}}
    (finding,) = found(with_node(cluster(2), 1, links=wide), "gpus")
    assert finding.hosts == ("host1",)
    assert "ranks 2 and 3" in finding.text
    assert named(with_node(cluster(2), 1, peers=()), "gpus", Level.WARN) == {"host1"}


def test_facts_survive_their_way_as_json() -> None:
    for one in cluster(2).facts:
        assert RankFacts.from_json(json.loads(json.dumps(asdict(one)))) == one
    for path in paths_of(3):
        assert GroupRate.from_json(json.loads(json.dumps(asdict(path)))) == path


@settings(deadline=None, max_examples=60)
@given(num_nodes=st.integers(1, 12), per_node=st.integers(1, 4))
def test_in_a_phase_nobody_is_in_two_pairs_and_each_rank_meets_both_neighbours(num_nodes: int, per_node: int) -> None:
    phases = node_paths(per_node, num_nodes * per_node)
    pairs = [pair for phase in phases for pair in phase]
    for phase in phases:
        ranks = [rank for pair in phase for rank in pair]
        assert len(ranks) == len(set(ranks))
    wanted = {
        (node * per_node + local, (node + step) % num_nodes * per_node + local)
        for node in range(num_nodes)
        for local in range(per_node)
        for step in (1, -1)
        if num_nodes > 1
    }
    assert set(pairs) == wanted
    assert len(pairs) == len(wanted)
