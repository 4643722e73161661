"""Choose how many ranks to start and where, and say why.

    NPROC_PER_NODE given            that many ranks on each node
    parallel.dp given               tp cp pp dp ranks
    dp open, GPUs                   as many ranks as fit the GPUs: dp is the largest that divides the batch
    dp open, no GPU                 tp cp pp ranks on the CPU (gloo)

More ranks than GPUs on a node are refused, unless gloo lets ranks share a GPU. The layout is never changed. Only an open dp is
filled in.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triaxis.engine.config.rules.check import is_legal
from triaxis.engine.config.rules.problem import Rule, divisors
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.layout import ParallelConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.device.gpus import CUDA, GLOO, Gpus, backend_of, device_type
from triaxis.engine.errors import TopologyError, counted
from triaxis.launch.start.variables import check_numbers


class TooFewGpusError(TopologyError):
    """A layout needs more ranks on a node than there are GPUs.

    Attributes:
        needs: the numbers of needed and available GPUs, in words.
        smaller: a layout that fits the GPUs; None: there is none.
    """

    def __init__(self, text: str, needs: str, smaller: ParallelConfig | None) -> None:
        super().__init__(text)
        self.needs, self.smaller = needs, smaller


@dataclass(frozen=True, slots=True)
class World:
    """The number of a run's ranks, and their nodes and device. `reason` says where the number comes from."""

    num_nodes: int
    ranks_per_node: int
    device: str
    backend: str
    reason: str

    @property
    def size(self) -> int:
        return self.num_nodes * self.ranks_per_node


def decide(config: Config, gpus: Gpus, variables: Mapping[str, str], more_rules: Sequence[Rule] = ()) -> World:
    """Choose the number of ranks.

    Args:
        gpus: this node's GPUs; all nodes are assumed to be alike.
        variables: environment; NNODES and NPROC_PER_NODE are read.
        more_rules: extra rules for the layouts that an error proposes.

    Raises:
        TopologyError: the layout does not fit the nodes or the GPUs, or torch cannot use the GPUs that are there.
    """
    parallel = config.parallel
    model_ranks = parallel.tp * parallel.pp * parallel.cp
    check_numbers(variables)
    num_nodes = int(variables.get("NNODES") or 1)
    device = device_type(config.runtime, gpus)
    backend = backend_of(config.runtime, device, gpus.note)
    num_gpus = gpus.count if device == CUDA else 0

    if given := int(variables.get("NPROC_PER_NODE") or 0):
        ranks, why = num_nodes * given, "NPROC_PER_NODE"
    elif parallel.dp is not None:
        product = "tp x cp x pp x dp" if parallel.cp > 1 else "tp x pp x dp"
        ranks, why = model_ranks * parallel.dp, f"{product} of the layout"
    elif num_gpus:
        dp = _largest_dp(config, num_nodes * num_gpus // model_ranks, model_ranks, num_nodes)
        ranks, why = model_ranks * dp, "dp was left open: as many GPUs as fit"
    else:
        ranks, why = model_ranks, "dp was left open: one replica"

    ranks_per_node, rest = divmod(ranks, num_nodes)
    if rest:
        raise TopologyError(
            f"{counted(ranks, 'rank')} ({why}) cannot be divided evenly over NNODES={num_nodes}: torchrun would wait "
            f"for ranks that never come. Choose sizes whose product is a multiple of {num_nodes}."
        )
    if not num_gpus:
        return World(num_nodes, ranks_per_node, device, backend, f"{why}; {gpus.note or 'no GPU is used'}")
    if ranks_per_node > num_gpus and backend != GLOO:
        raise _too_few(config, ranks_per_node, num_gpus, num_nodes, more_rules)
    idle = num_gpus - ranks_per_node
    note = f"; {idle} of {num_gpus} GPUs per node stay idle" if idle > 0 else ""
    if idle < 0:
        note = f"; {ranks_per_node} ranks share {counted(num_gpus, 'GPU')} on each node"
    return World(num_nodes, ranks_per_node, device, backend, why + note)


def _largest_dp(config: Config, most: int, model_ranks: int, num_nodes: int) -> int:
    """Find the largest dp up to `most` that divides a step's microbatches; 1 if there is none.

    The dp x `model_ranks` ranks must also divide evenly over the nodes.
    """
    num_microbatches = config.train.global_batch_size // config.train.micro_batch_size
    fitting = (dp for dp in divisors(num_microbatches, most) if dp <= most and dp * model_ranks % num_nodes == 0)
    return next(fitting, 1)


def _smaller(config: Config, num_gpus: int, num_nodes: int, more_rules: Sequence[Rule]) -> ParallelConfig | None:
    """Find the legal layout with the fewest ranks per replica; None if there is none.

    tp and pp are powers of two, cp and vpp are 1. Among equals, pp is the smallest.
    """
    num_ranks = num_gpus * num_nodes
    for exponent in range(num_ranks.bit_length()):
        model_ranks = 2**exponent
        dp = _largest_dp(config, num_ranks // model_ranks, model_ranks, num_nodes)
        for pp in (2**smaller for smaller in range(exponent + 1)):
            tp = model_ranks // pp
            etp = 1 if config.parallel.etp == 1 else tp
            ep = math.gcd(config.parallel.ep, tp * dp // etp)
            replicas = math.gcd(config.parallel.dp_replicas, dp, tp * dp // (ep * etp))
            sizes = {"tp": tp, "cp": 1, "pp": pp, "vpp": 1, "dp": dp, "dp_replicas": replicas, "ep": ep, "etp": etp}
            parallel = config.parallel.model_copy(update=sizes)
            ranks_per_node, rest = divmod(model_ranks * dp, num_nodes)
            changed = config.model_copy(update={"parallel": parallel})
            if not rest and is_legal(changed, model_ranks * dp, ranks_per_node, more_rules):
                return parallel
    return None


def _too_few(
    config: Config, ranks_per_node: int, num_gpus: int, num_nodes: int, more_rules: Sequence[Rule]
) -> TooFewGpusError:
    parallel = config.parallel
    context = f" cp={parallel.cp}" if parallel.cp > 1 else ""
    layout = f"tp={parallel.tp}{context} pp={parallel.pp} dp={parallel.dp or 1}"
    choices = []
    if smaller := _smaller(config, num_gpus, num_nodes, more_rules):
        names = ["tp", "pp", "vpp", "dp", *(["cp"] if context else []), *(["ep", "etp"] if config.model.moe else [])]
        names += ["dp_replicas"] if parallel.dp_replicas > 1 else []
        words = " ".join(f"parallel.{name}={getattr(smaller, name)}" for name in names)
        choices.append(f"{words}   in place of its layout: a smaller one")
    choices.append("runtime.device=cpu   trains on the CPU")
    shared = with_value(config, "runtime.collectives", "gloo")
    if is_legal(shared, ranks_per_node * num_nodes, ranks_per_node, more_rules):
        choices.append("runtime.collectives=gloo   lets ranks share a GPU, slowly, to try the layout")
    needs = f"{layout} needs {ranks_per_node} GPUs per node and this node shows {num_gpus}"
    text = (
        f"{needs}. Two ranks on one GPU would deadlock in NCCL, and Triaxis never changes a layout by itself. "
        "Add one of these to the same command:\n" + "\n".join(f"  {choice}" for choice in choices)
    )
    return TooFewGpusError(text, needs, smaller)
