"""Compares facts of all ranks through their store, before the ranks communicate.

The store works even if no process group can be created. If a rank's facts differ, the others would wait for calls that this rank
never makes. The steps:

    every rank     writes its facts
    rank 0         reads all ranks' facts, judges them, writes the verdict
    every rank     reads the verdict, and raises a bad one once all ranks have read it
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from triaxis.engine.errors import PeerLostError, TopologyError

Facts = dict[str, object]
"""Facts about one rank, in JSON's types."""

ALL_HAVE_READ = timedelta(seconds=5)
"""How long a rank waits, after a bad verdict, for the others to read it too."""

RANK_0_FIRST_SECONDS = 1.0
"""How much later than rank 0 the others raise: rank 0 prints the error, and a launcher ends all ranks when the first one ends."""


@contextmanager
def naming_the_silent(store: dist.Store, rank: int, keys: Mapping[int, str], ranks_per_node: int = 0) -> Iterator[None]:
    """Turn a store timeout in the `with` block into an error that names silent ranks.

    Args:
        store: store that the block waits on.
        rank: this rank.
        keys: key that each rank writes to the store before or in the block, by rank.
        ranks_per_node: node size, so that the error can name nodes; 0: unknown.

    Raises:
        PeerLostError: names the ranks whose key is missing, or rank 0 if none is.
    """
    start_seconds = time.monotonic()
    try:
        yield
    except dist.DistStoreError as error:
        silent = [other for other, key in keys.items() if not store.check([key])] or [0]
        waited_seconds = time.monotonic() - start_seconds
        nodes = sorted({other // ranks_per_node for other in silent}) if ranks_per_node else []
        where = f" (node {', '.join(map(str, nodes))})" if nodes else ""
        if rank:
            time.sleep(RANK_0_FIRST_SECONDS)
        raise PeerLostError(
            f"{name_ranks(silent)}{where} did not answer within {waited_seconds:,.0f} s while ranks joined: no step "
            "can begin without all. A process there is stopped (`ps` shows its state as T), hangs in an import, a driver or a file "
            "system, or its node is gone. Look there, and type the same command again."
        ) from error


def compare_facts(
    store: dist.Store,
    rank: int,
    world_size: int,
    facts: Mapping[str, object],
    judge: Callable[[Sequence[Facts]], str | None],
    ranks_per_node: int = 0,
) -> None:
    """Compare the facts of all ranks.

    Every rank calls this function.

    Args:
        store: store that all ranks reach; each comparison needs a store section of its own.
        facts: this rank's facts, in JSON's types.
        judge: function (facts in rank order) -> what is wrong with them, or None. It runs on rank 0 only.
        ranks_per_node: node size, so that an error can name nodes; 0: unknown.

    Raises:
        TopologyError: raised on every rank, with the text that `judge` returned.
        PeerLostError: a rank does not answer in time, see `naming_the_silent`.
    """
    keys = {other: f"facts/{other}" for other in range(world_size)}
    with naming_the_silent(store, rank, keys, ranks_per_node):
        store.set(keys[rank], json.dumps(dict(facts)))
        if rank == 0:
            every = [json.loads(store.get(key)) for key in keys.values()]
            store.set("verdict", json.dumps(judge(every)))
        _raise_together(store, rank, world_size)


def compare_details(
    store: dist.Store,
    rank: int,
    world_size: int,
    digest: str,
    details: Callable[[], Facts],
    judge: Callable[[Facts, Facts, int], str],
    ranks_per_node: int = 0,
) -> None:
    """Compare details that are too long to send from every rank.

    Every rank calls this function and sends a digest. If the digests differ, rank 0 and the first rank with another digest send
    their details.

    Args:
        store: store that all ranks reach; each comparison needs a store section of its own.
        digest: digest of this rank's details.
        details: function () -> the details, in JSON's types.
        judge: function (rank 0's details, the other rank's details, the other rank) -> what is wrong. It runs on rank 0 only.
        ranks_per_node: node size, so that an error can name nodes; 0: unknown.

    Raises:
        TopologyError: raised on every rank, with the text that `judge` returned.
        PeerLostError: a rank does not answer in time, see `naming_the_silent`.
    """
    keys = {other: f"digest/{other}" for other in range(world_size)}
    with naming_the_silent(store, rank, keys, ranks_per_node):
        store.set(keys[rank], digest)
        if rank == 0:
            others = (store.get(keys[other]).decode() for other in range(1, world_size))
            store.set(
                "asked", str(next((other for other, theirs in enumerate(others, start=1) if theirs != digest), 0))
            )
        asked = int(store.get("asked"))
    if asked == 0:
        return
    if rank == asked:
        store.set("details", json.dumps(details()))
    with naming_the_silent(store, rank, {asked: "details"}, ranks_per_node):
        if rank == 0:
            store.set("verdict", json.dumps(judge(details(), json.loads(store.get("details")), asked)))
        _raise_together(store, rank, world_size)


def _raise_together(store: dist.Store, rank: int, world_size: int) -> None:
    """Read rank 0's verdict. If it is bad, wait at most `ALL_HAVE_READ` until all ranks have read it, and raise."""
    problem = json.loads(store.get("verdict"))
    if problem is None:
        return
    # The store goes away with rank 0 or with the launcher; that adds nothing to the verdict.
    with suppress(RuntimeError):
        if store.add("have_read", 1) == world_size:
            store.set("all_have_read", "")
        store.wait(["all_have_read"], ALL_HAVE_READ)
    if rank:
        time.sleep(RANK_0_FIRST_SECONDS)
    raise TopologyError(problem)


def rank_0_says(text: str, key: str) -> str:
    """Return rank 0's text on every rank.

    The text goes through the default group's store. A process without a default group returns its own text.

    Args:
        key: key in the store, a new one for each call.

    Raises:
        PeerLostError: rank 0 does not answer in time, see `naming_the_silent`.
    """
    if not dist.is_initialized():
        return text
    store = run_store("rank_0")
    if dist.get_rank() == 0:
        store.set(key, text)
    with naming_the_silent(store, dist.get_rank(), {0: key}):
        return str(store.get(key).decode())


def run_store(name: str) -> dist.Store:
    """Open the section `name` in the default group's store, which all ranks reach."""
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


def is_alone() -> bool:
    """Whether this process runs without other ranks. True under `triaxis footprint` too, which fakes the others."""
    return not dist.is_initialized() or dist.get_backend() == "fake"


def compare_group_counts() -> None:
    """Check that all ranks have created equally many process groups so far.

    Every rank in the default group calls this function before it creates groups. A process that is alone passes. torch derives a
    group's name from this number. With different numbers, ranks would wait for each other under different names, until the
    timeout.

    Raises:
        TopologyError: raised on every rank, naming the ranks that differ.
    """
    if is_alone():
        return
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    comparison = dist.PrefixStore(f"group_counts/{store.add(f'group_counts/{rank}', 1)}", store)
    facts = {"num_groups": len(dist.distributed_c10d._world.pg_names)}
    compare_facts(comparison, rank, dist.get_world_size(), facts, judge_group_counts)


def judge_group_counts(every: Sequence[Facts]) -> str | None:
    """Describe which ranks have how many process groups, or return None if all agree.

    The fact `num_groups` counts torch's default group too.
    """
    counts = grouped(every, lambda facts: str(facts["num_groups"]))
    if len(counts) == 1:
        return None
    lines = [
        f"  {name_ranks(ranks)}: {count}" for count, ranks in sorted(counts.items(), key=lambda item: int(item[0]))
    ]
    return "\n".join(
        (
            "process groups made before the topology differ in number, torch's default group included:",
            *lines,
            "torch derives a group's name from that number, so the ranks would wait for each other under different names. "
            "Make groups of a subset of the ranks after the Topology, or call torch.distributed.new_group on all ranks.",
        )
    )


def grouped(every: Sequence[Facts], key: Callable[[Facts], str]) -> dict[str, list[int]]:
    """Group ranks, in rank order, by what `key` returns for their facts."""
    groups: dict[str, list[int]] = {}
    for rank, facts in enumerate(every):
        groups.setdefault(key(facts), []).append(rank)
    return groups


def name_ranks(ranks: Iterable[int]) -> str:
    """Write ascending ranks as `rank 3`, `ranks 0 to 7` or `ranks 0 to 3 and 6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    text = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return f"rank {text}" if text.isdigit() else f"ranks {text}"
