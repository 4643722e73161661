"""Start one rank: read its config, join the process group, and build the topology."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch

from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.comm.runtime import RankEnvironment, Runtime, start
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.context_parallel import gathers_keys
from triaxis.engine.config.quantities.expert_rows import dispatch_of
from triaxis.engine.config.quantities.extension_costs import Measure, as_ours, with_costs
from triaxis.engine.config.quantities.plan import parallel_sizes, rank_grid
from triaxis.engine.config.quantities.run_phases import at_phase
from triaxis.engine.config.tree import Config
from triaxis.engine.data.run_tokenizer import with_tokenizer
from triaxis.launch.rank.agreement import agree
from triaxis.launch.start.gpu_memory import memory_rules
from triaxis.launch.start.process.parent_death import end_with_parent
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.run_rules import RULES_OF_A_RUN


@dataclass(frozen=True, slots=True)
class Rank:
    """One connected rank of a run.

    Attributes:
        config: configuration as read, for the phase (stretch of the run with its own settings) that is trained now.
        resolved: `config` with every `auto` in recomputation resolved; engines are built from it.
    """

    config: Config
    resolved: Config
    runtime: Runtime
    topology: Topology

    @property
    def number(self) -> int:
        return self.topology.rank


def read_config(argv: Sequence[str], environment: RankEnvironment, *, trains: bool = False) -> Config:
    """Read `[config.yaml, section.key=value ...]`, and check it for the run's number of ranks.

    Args:
        argv: config path and overrides.
        trains: whether the predicted memory must fit; not checked under torchrun, since Triaxis's launcher has checked it.

    Raises:
        ConfigError: all problems at once, before any process group exists.
    """
    return load_config(
        argv[0],
        argv[1:],
        os.environ,
        world_size=environment.world_size,
        ranks_per_node=environment.local_world_size,
        more_rules=[*RULES_OF_A_RUN, *memory_rules(os.environ)]
        if trains and "TORCHELASTIC_RUN_ID" not in os.environ
        else [],
    )


@contextmanager
def join_run(
    words: Sequence[str],
    *,
    trains: bool = False,
    choose_phase: Callable[[Config, RankEnvironment], Config] | None = None,
    before: Callable[[Config], None] = lambda config: None,
    measure: Measure = as_ours,
) -> Iterator[Rank]:
    """Read a worker's configuration from its arguments, and join its run. Raises the errors of `read_config`.

    A rank that torchrun started ends with its launcher. A rank that trains resolves the run's tokenizer (`with_tokenizer`).

    Args:
        words: the worker's arguments: config path, then overrides.
        trains: whether the rank trains; predicted memory must then fit (see `read_config`).
        choose_phase, measure: functions that choose the run's phase and measure an extension's costs (see `join`).
        before: function (configuration) that runs before any rank waits for another; it may take long.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    environment = RankEnvironment.from_variables(os.environ)
    config = read_config(words, environment, trains=trains)
    if trains:
        config, note = with_tokenizer(config)
        if note is not None and environment.rank == 0:
            print(f"note: {note}")
    before(config)
    with join(config, environment, choose_phase, measure) as rank:
        yield rank


def connect_exchanges(config: Config, topology: Topology) -> None:
    """Open the connections between all pairs of ranks that exchange tensors in a step. All ranks call this.

    A pair's first NCCL message blocks the host until the peer makes the mirrored call, which would be inside a step.
    """
    names = []
    if config.parallel.cp > 1 and not gathers_keys(config):
        names.append("cp")
    if config.model.has_experts and dispatch_of(config) == "all_to_all":
        names.append("experts")
    for name in names:
        axis = topology.axis(name).with_ledger(Ledger())
        # With row counts, torch sends and receives. Without them, newer versions have another call, which may connect less.
        rows = [1] * axis.size
        sent = torch.zeros(axis.size, 1, device=topology.device)
        axis.all_to_all_rows(sent, rows, rows, "connect").wait()


@contextmanager
def join(
    config: Config,
    environment: RankEnvironment,
    choose_phase: Callable[[Config, RankEnvironment], Config] | None = None,
    measure: Measure = as_ours,
) -> Iterator[Rank]:
    """Join the process group, compare the ranks (`agree`) and build the topology.

    The group and the topology are closed after success.

    Recomputation that cannot fit in some phase is refused before any rank connects.

    After an exception the process has to end (`triaxis.launch.start.process.ending.run_rank`). The group stays, because destroying
    an NCCL communicator would wait for sends and receives that no peer will match.

    Args:
        choose_phase: function (config, environment) -> config of the phase to train, equal on every rank; None: `config` itself.
        measure: function (config of a phase, sizes) -> measured costs of an extension's parts; called before any rank connects.
    """
    phases = [at_phase(config, phase["name"]) for phase in config.phases] if choose_phase else []
    costs = {}
    for phase in phases or [config]:
        sizes = parallel_sizes(phase, environment.world_size)
        costs[phase.train.phase] = measure(phase, sizes)
        resolve_recompute(with_costs(phase, costs[phase.train.phase]), sizes)
    runtime = start(environment, config.runtime)
    agree(config, environment, trains=choose_phase is not None)
    config = config if choose_phase is None else choose_phase(config, environment)
    sizes = parallel_sizes(config, environment.world_size)
    config = with_costs(config, costs[config.train.phase])
    resolved = resolve_recompute(config, sizes)
    topology = Topology(
        rank_grid(config, sizes, environment.local_world_size),
        environment.rank,
        runtime.device,
        kv_heads=config.model.kv_heads,
        has_experts=config.model.has_experts,
        timeout=timedelta(seconds=config.runtime.timeout_seconds),
    )
    connect_exchanges(config, topology)
    yield Rank(config, resolved, runtime, topology)
    topology.close()
    runtime.close()
