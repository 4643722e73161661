"""Rules about how the model and a step are cut over ranks."""

import math
from collections.abc import Iterator
from itertools import chain

from triaxis.engine.config.quantities.plan import partial_batch, product_of_sizes, unfilled_world
from triaxis.engine.config.rules.problem import Problem, Rule, Subject, divisors, numbers
from triaxis.engine.config.schema.layout import IS_INTERLEAVED, RUNS_IN_A_V, ParallelConfig
from triaxis.engine.layout.partition import partition
from triaxis.engine.layout.rank_rules import partial_node, too_many_ranks, tp_across_nodes, uneven_replicas


def layers_fill_stages(subject: Subject) -> Iterator[Problem]:
    num_layers, parallel = subject.config.model.num_layers, subject.config.parallel
    num_stages = parallel.pp * parallel.vpp
    if not isinstance(parallel.layers_per_stage, list) and num_layers < num_stages:
        yield subject.problem(
            "model.num_layers",
            f"must be at least pp x vpp = {parallel.pp} x {parallel.vpp} = {num_stages}: some stage would have no layer and its "
            f"ranks nothing to do",
            {
                "model.num_layers": [num_stages],
                "parallel.pp": numbers(num_layers // parallel.vpp),
                "parallel.vpp": numbers(num_layers // parallel.pp),
            },
        )


def layers_are_dealt_out(subject: Subject) -> Iterator[Problem]:
    num_layers, parallel = subject.config.model.num_layers, subject.config.parallel
    given = parallel.layers_per_stage
    if not isinstance(given, list):
        return
    num_stages = parallel.pp * parallel.vpp
    broken = []
    if len(given) != num_stages:
        broken.append(
            f"must have pp x vpp = {parallel.pp} x {parallel.vpp} = {num_stages} entries, one per stage, not {len(given)}"
        )
    if sum(given) != num_layers:
        broken.append(f"must sum to model.num_layers = {num_layers}, not {sum(given)}")
    if any(entry < 0 for entry in given):
        broken.append("must not hold negative numbers")
    if broken:
        yield subject.problem(
            "parallel.layers_per_stage",
            f"{'; it '.join(broken)}: else layers are dropped, or stages have none",
            {
                "parallel.layers_per_stage": chain(_even_stages(num_layers, parallel), [None]),
                "model.num_layers": [sum(given)],
            },
        )


def _even_stages(num_layers: int, parallel: ParallelConfig) -> Iterator[list[int]]:
    """Yield one list, the layers per stage that `layers_per_stage: null` gives; nothing if there are fewer layers than stages."""
    if parallel.pp * parallel.vpp <= num_layers:
        yield [len(stage.layers) for stage in partition(num_layers, parallel.pp, parallel.vpp)]


def schedule_matches_chunks(subject: Subject) -> Iterator[Problem]:
    yield from schedule_problems(subject.config.schedule.name, subject.config.parallel.vpp)


def schedule_problems(name: str, vpp: int) -> Iterator[Problem]:
    """Yield a problem if a schedule cannot run with `vpp` model chunks per rank."""
    is_interleaved = IS_INTERLEAVED.get(name)
    if is_interleaved is None or (vpp == 2 if name in RUNS_IN_A_V else is_interleaved == (vpp > 1)):
        return
    other = "interleaved" if vpp > 1 else "1f1b"
    if name in RUNS_IN_A_V:
        rule = f"places two model chunks per rank in a V, but parallel.vpp = {vpp}: a stage would have no rank, or a rank no stage"
    elif is_interleaved:
        rule = "interleaves the model chunks of a rank, but parallel.vpp = 1: there is nothing to interleave"
    else:
        rule = f"runs one model chunk per rank, but parallel.vpp = {vpp}: the other chunks would never run"
    yield Problem(
        "schedule.name",
        name,
        rule,
        {"schedule.name": [other, "auto"], "parallel.vpp": [2 if is_interleaved else 1]},
    )


def schedule_file_fits(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each reason why a schedule file does not fit the run.

    It has other sizes than the run, or not one row for each rank.
    """
    config, dp = subject.config, subject.dp
    file = config.schedule.file
    if file is None:
        return
    text, parallel, train = file.text, config.parallel, config.train
    for name, given in (("pp", text.pp), ("vpp", text.vpp)):
        if getattr(parallel, name) != given:
            yield subject.problem(
                f"parallel.{name}",
                f"must be {given}, the {name} of schedule.file {file}: no row of it says what the ranks of another layout do",
                {f"parallel.{name}": [given], "schedule.file": [None]},
            )
    if len(text.rows) != text.pp:
        yield subject.problem(
            "schedule.file",
            f"has {len(text.rows)} rows for its pp={text.pp}: a row per rank. Ranks without a row would leave the others waiting",
            {"schedule.file": [None]},
        )
    # A batch that is not a whole number of microbatches is reported by its own rule.
    if (
        dp is None
        or partial_batch(train, dp)
        or text.num_microbatches * train.micro_batch_size * dp == train.global_batch_size
    ):
        return
    yield subject.problem(
        "train.global_batch_size",
        f"is {train.global_batch_size // (train.micro_batch_size * dp)} microbatches of {train.micro_batch_size} x dp {dp}, and "
        f"schedule.file {file} is a step of {text.num_microbatches}: the others would not be computed",
        {
            "train.global_batch_size": [text.num_microbatches * train.micro_batch_size * dp],
            "train.micro_batch_size": [max(1, train.global_batch_size // (text.num_microbatches * dp))],
            "schedule.file": [None],
        },
    )


def axes_fill_world(subject: Subject) -> Iterator[Problem]:
    parallel, world_size = subject.config.parallel, subject.world_size
    if world_size is None or subject.dp is not None:
        return
    replica = parallel.tp * parallel.pp * parallel.cp
    num_replicas = max(1, round(world_size / replica)) if parallel.dp is None else parallel.dp
    product, rule = unfilled_world(parallel, world_size)
    yield Problem(
        "parallel",
        product,
        rule,
        {
            "parallel.dp": [world_size // replica, None] if parallel.dp is not None else [],
            "parallel.tp": divisors(world_size, parallel.tp),
            "parallel.pp": divisors(world_size, parallel.pp),
            "parallel.cp": divisors(world_size, parallel.cp) if parallel.cp > 1 else [],
        },
        f"Or start {num_replicas * replica} ranks.",
    )


def nodes_are_whole(subject: Subject) -> Iterator[Problem]:
    parallel, dp = subject.config.parallel, subject.dp
    per_node = subject.ranks_per_node or subject.config.runtime.ranks_per_node
    if per_node is None or dp is None:
        return
    world_size = parallel.tp * parallel.pp * parallel.cp * dp
    if rule := partial_node(world_size, per_node):
        yield Problem(
            "parallel",
            f"{product_of_sizes(parallel, dp)} = {world_size} ranks",
            rule,
            {"parallel.dp": numbers(dp), "parallel.pp": numbers(parallel.pp), "parallel.tp": numbers(parallel.tp)},
            "Or give another number of ranks per node.",
        )
    elif not parallel.allow_tp_across_nodes and (rule := tp_across_nodes(parallel.tp, world_size, per_node)):
        yield subject.problem(
            "parallel.tp",
            rule,
            {"parallel.tp": divisors(per_node, parallel.tp)},
            "Or set parallel.allow_tp_across_nodes=true to accept that.",
        )


def replicas_are_even(subject: Subject) -> Iterator[Problem]:
    parallel, dp = subject.config.parallel, subject.dp
    if dp is None:
        return
    # 0 if experts do not fit the ranks, which is an error of its own.
    expert_dp = dp * parallel.cp * parallel.tp // (parallel.ep * parallel.etp)
    if rule := uneven_replicas(dp, expert_dp or dp, parallel.dp_replicas):
        fits = math.gcd(dp, expert_dp or dp)
        yield subject.problem(
            "parallel.dp_replicas", rule, {"parallel.dp_replicas": divisors(fits, parallel.dp_replicas)}
        )


def ranks_can_be_listed(subject: Subject) -> Iterator[Problem]:
    parallel = subject.config.parallel
    world_size = parallel.tp * parallel.pp * parallel.cp * (subject.dp or 1)
    if rule := too_many_ranks(world_size):
        yield Problem(
            "parallel",
            product_of_sizes(parallel, subject.dp or 1),
            rule,
            {} if parallel.dp is None else {"parallel.dp": divisors(parallel.dp, parallel.dp)},
            "Make the sizes smaller.",
        )


LAYOUT_RULES: tuple[Rule, ...] = (
    layers_fill_stages,
    layers_are_dealt_out,
    schedule_matches_chunks,
    schedule_file_fits,
    axes_fill_world,
    replicas_are_even,
    nodes_are_whole,
    ranks_can_be_listed,
)
