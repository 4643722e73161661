"""The engine over groups that treat the host as NCCL does (`tests/fake_nccl.py`): parity, timeouts, a pipeline's first messages."""

import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fake_nccl import NAME, FakeNccl
from tests.harness import run_ranks
from tests.parity.cases import Case, build_rank
from tests.parity.test_parity import compare
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.runtime import RankEnvironment, Runtime
from triaxis.engine.config.tree import Config

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_a_layout_over_it_equals_the_oracle() -> None:
    compare(
        Case("gpt", tp=2, pp=2, sequence_parallel=True, num_layers=4, global_batch_size=4, backend=NAME), num_steps=2
    )


def timeouts(rank: int, config: Config) -> list[timedelta]:
    """The timeout of each group of a rank that joins as a command's does."""
    import triaxis.launch.rank.join

    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    triaxis.launch.rank.join.start = lambda environment, config: Runtime(torch.device("cpu"))
    with triaxis.launch.rank.join.join(config, RankEnvironment(rank, 4, rank, 4)) as joined:
        groups = [joined.topology.axis(name)._backend.group for name in ("tp", "pp_forward", "pp_backward", "world")]
        return [
            group.timeout if isinstance(group, FakeNccl) else group._get_backend(torch.device("cpu")).options._timeout
            for group in groups
            if group is not None
        ]


@pytest.mark.parametrize("backend", ["gloo", NAME])
def test_every_group_has_the_timeout_of_the_config(backend: str) -> None:
    config = Case("gpt", tp=2, pp=2).config()
    runtime = config.runtime.model_copy(update={"timeout_seconds": 77.0})
    config = config.model_copy(update={"runtime": runtime})
    assert run_ranks(timeouts, 4, config, backend=backend) == [[timedelta(seconds=77)] * 4] * 4


EXCHANGES = Case("moe", cp=2, dp=2, ep=4, cp_method="ulysses", dispatch="all_to_all", backend=NAME)
GATHERS = replace(EXCHANGES, cp_method="all_gather", dispatch="all_gather")


def connections(rank: int, config: Config) -> tuple[dict[str, int], list[int]]:
    """How many ways of each axis a rank has opened when it has joined as a command's does; sizes of its all-to-alls in order."""
    import triaxis.launch.rank.join

    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    triaxis.launch.rank.join.start = lambda environment, config: Runtime(torch.device("cpu"))
    exchange, exchanged = FakeNccl.all_to_all_single, []

    def noted(self: FakeNccl, *args: Any) -> Any:
        exchanged.append(self.size())
        return exchange(self, *args)

    FakeNccl.all_to_all_single = FakeNccl.alltoall_base = noted
    with triaxis.launch.rank.join.join(config, RankEnvironment(rank, 4, rank, 4)) as joined:
        axes = {name: joined.topology.axis(name) for name in ("cp", "dp", "experts")}
        assert not joined.topology.ledger.events
        return {name: axis._backend.group.num_connections for name, axis in axes.items()}, exchanged


def test_all_pairs_that_exchange_are_connected_before_the_first_step() -> None:
    # Experts and dense gradients share the group of all four ranks. All ranks connect in one order.
    pairs = {"cp": 2 * 2, "dp": 2 * 4, "experts": 2 * 4}
    assert run_ranks(connections, 4, EXCHANGES.config(), backend=NAME) == [(pairs, [2, 4])] * 4
    assert run_ranks(connections, 4, GATHERS.config(), backend=NAME) == [(dict.fromkeys(pairs, 0), [])] * 4


FIRST_MESSAGE_SECONDS = 1.0


def one_step(rank: int, case: Case, connects: bool) -> str:
    """Make one step with early receives; the error with which a posted message gives up, "" where the step ends."""
    topology_groups_fail_after(FIRST_MESSAGE_SECONDS)
    if not connects:
        Axis.connect_ring = lambda self, device: None
    engine, batches = build_rank(rank, case)
    engine.train_programs.receive_early()
    try:
        engine.train_step(batches.next_step(), 1e-3)
    except dist.DistBackendError as error:
        return str(error)
    finally:
        batches.close()
    return ""


def topology_groups_fail_after(seconds: float) -> None:
    """Give each group that this process makes a short timeout."""
    new_group = dist.new_group
    dist.new_group = lambda *args, **named: new_group(*args, **named | {"timeout": timedelta(seconds=seconds)})


ONE_MICROBATCH = Case("gpt", pp=2, num_layers=2, global_batch_size=1, backend=NAME)


def test_a_step_of_one_microbatch_hangs_where_the_ring_is_not_connected() -> None:
    """Rank 0 of 1F1B posts the receive of the first gradient before its first forward: rank 1 would have to post the send."""
    said = run_ranks(one_step, 2, ONE_MICROBATCH, False, backend=NAME)
    assert all("no peer within" in text for text in said), said


def test_a_step_of_one_microbatch_runs_where_a_topology_has_connected_the_ring() -> None:
    assert run_ranks(one_step, 2, ONE_MICROBATCH, True, backend=NAME) == ["", ""]
