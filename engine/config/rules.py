"""The rules that fields must keep with each other, checked all at once before anything starts (no torch here).

    problems(config, world_size=16, ranks_per_node=8)  ->
      ["model.num_attention_heads = 10: must be a multiple of parallel.tp = 4: a rank computes whole heads, and some would
        have none. Nearest legal: model.num_attention_heads = 8 or 12; parallel.tp = 5 or 2."]

A rule is a function that yields a `Problem` for each time it is broken; it reads what it needs and says in its message
what must hold and what would have happened. Types and bounds of single fields are pydantic's (`engine/config/schema.py`).
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from engine.config.activation_rules import ACTIVATION_RULES
from engine.config.checkpoint_rules import CHECKPOINT_RULES
from engine.config.limits import LONGEST_NAME, MOST_MICROBATCHES
from engine.config.model_rules import MODEL_RULES
from engine.config.plan import planned_steps
from engine.config.problems import Problem, Rule, Subject, divisors, find_problems, multiples, numbers
from engine.config.resilience_rules import RESILIENCE_RULES
from engine.config.schema import Config
from engine.layout.partition import partition
from engine.layout.rank_grid import MOST_RANKS


def problems(
    config: Config,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    more_rules: Sequence[Rule] = (),
) -> list[str]:
    """Every broken rule as a readable line; an empty list is a legal config.

    Args:
        config: what to check.
        world_size: ranks of the run, if known; else what the config says, or nothing that depends on it.
        ranks_per_node: if known; else `runtime.ranks_per_node`, or nothing that depends on it.
        more_rules: rules that need more than the configuration, checked after all others.
    """
    return [str(problem) for problem in broken_rules(config, world_size, ranks_per_node, more_rules)]


def broken_rules(
    config: Config,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    more_rules: Sequence[Rule] = (),
) -> list[Problem]:
    """`problems`, as records whose candidates are the legal values that the message names."""
    return find_problems(Subject(config, world_size, ranks_per_node), (*RULES, *more_rules))


def layers_fill_stages(subject: Subject) -> Iterator[Problem]:
    num_layers, parallel = subject.config.model.num_layers, subject.config.parallel
    num_stages = parallel.pp * parallel.vpp
    if parallel.layers_per_stage is None and num_layers < num_stages:
        yield Problem(
            "model.num_layers",
            num_layers,
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
    if given is None:
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
        yield Problem(
            "parallel.layers_per_stage",
            given,
            f"{'; it '.join(broken)}: else layers are dropped, or stages have none",
            {
                "parallel.layers_per_stage": chain(_even_stages(subject.config), [None]),
                "model.num_layers": [sum(given)],
            },
        )


def _even_stages(config: Config) -> Iterator[list[int]]:
    """The layers per stage that the engine would choose, if every stage can have one."""
    pp, vpp = config.parallel.pp, config.parallel.vpp
    if pp * vpp <= config.model.num_layers:
        yield [len(stage.layers) for stage in partition(config.model.num_layers, pp, vpp)]


def schedule_matches_chunks(subject: Subject) -> Iterator[Problem]:
    name, vpp = subject.config.schedule.name, subject.config.parallel.vpp
    if name in ("gpipe", "1f1b") and vpp > 1:
        yield Problem(
            "schedule.name",
            name,
            f"runs one model chunk per rank, but parallel.vpp = {vpp}: the other chunks would never run",
            {"schedule.name": ["interleaved", "auto"], "parallel.vpp": [1]},
        )
    if name == "interleaved" and vpp == 1:
        yield Problem(
            "schedule.name",
            name,
            "interleaves the model chunks of a rank, but parallel.vpp = 1: there is nothing to interleave",
            {"schedule.name": ["1f1b", "auto"], "parallel.vpp": [2]},
        )


def axes_are_built(subject: Subject) -> Iterator[Problem]:
    for name, meaning in (("cp", "context"), ("ep", "expert")):
        size = getattr(subject.config.parallel, name)
        if size > 1:
            yield Problem(
                f"parallel.{name}",
                size,
                f"{meaning} parallelism is known, not built yet: its axis has size 1 only",
                {f"parallel.{name}": [1]},
            )


def dtype_is_built(subject: Subject) -> Iterator[Problem]:
    if subject.config.precision.dtype == "fp16":
        yield Problem(
            "precision.dtype",
            "fp16",
            "fp16 and its dynamic loss scale are known, not built yet: small gradients would become zero",
            {"precision.dtype": ["bf16", "fp32"]},
        )


def axes_fill_world(subject: Subject) -> Iterator[Problem]:
    parallel, world_size = subject.config.parallel, subject.world_size
    if world_size is None or subject.dp is not None:
        return
    replica = parallel.tp * parallel.pp * parallel.cp
    if parallel.dp is None:
        product, rule = f"tp x pp = {parallel.tp} x {parallel.pp}", f"must divide the world size {world_size}"
        advice = f"Or start {max(1, round(world_size / replica)) * replica} ranks."
    else:
        product = f"tp x pp x dp = {parallel.tp} x {parallel.pp} x {parallel.dp}"
        rule = f"is {replica * parallel.dp} and must be the world size {world_size}"
        advice = f"Or start {replica * parallel.dp} ranks."
    yield Problem(
        "parallel",
        product,
        f"{rule}: ranks would be left over, or missing from their groups",
        {
            "parallel.dp": [world_size // replica, None] if parallel.dp is not None else [],
            "parallel.tp": divisors(world_size, parallel.tp),
            "parallel.pp": divisors(world_size, parallel.pp),
        },
        advice,
    )


def nodes_are_whole(subject: Subject) -> Iterator[Problem]:
    """The two rules of `engine.layout.rank_grid.RankGrid` about nodes, with what would be legal."""
    parallel, dp = subject.config.parallel, subject.dp
    per_node = subject.ranks_per_node or subject.config.runtime.ranks_per_node
    if per_node is None or dp is None:
        return
    world_size = parallel.tp * parallel.pp * parallel.cp * dp
    if world_size <= per_node:
        return
    if world_size % per_node:
        yield Problem(
            "parallel",
            f"tp x pp x dp = {parallel.tp} x {parallel.pp} x {dp} = {world_size} ranks",
            f"must fill whole nodes of {per_node} ranks: the last node would be partly used, and its groups misplaced",
            {"parallel.dp": numbers(dp), "parallel.pp": numbers(parallel.pp), "parallel.tp": numbers(parallel.tp)},
            "Or give another number of ranks per node.",
        )
    elif per_node % parallel.tp and not parallel.allow_tp_across_nodes:
        yield Problem(
            "parallel.tp",
            parallel.tp,
            f"must divide the {per_node} ranks of a node: a tensor-parallel group would span two nodes, and its collectives in "
            f"every layer cross the slow network",
            {"parallel.tp": divisors(per_node, parallel.tp)},
            "Or set parallel.allow_tp_across_nodes=true to accept that.",
        )


def batch_is_whole_microbatches(subject: Subject) -> Iterator[Problem]:
    train, dp = subject.config.train, subject.dp
    per_round = train.micro_batch_size * (dp or 1)
    if train.global_batch_size % per_round:
        product = f"micro_batch_size = {train.micro_batch_size}"
        if dp is not None:
            product = f"micro_batch_size x dp = {train.micro_batch_size} x {dp} = {per_round}"
        yield Problem(
            "train.global_batch_size",
            train.global_batch_size,
            f"must be a multiple of {product}: some pipelines would get fewer samples, or samples would be dropped",
            {
                "train.global_batch_size": multiples(per_round, train.global_batch_size),
                "train.micro_batch_size": divisors(train.global_batch_size, train.micro_batch_size),
                "parallel.dp": divisors(train.global_batch_size, dp) if dp is not None else [],
            },
        )


def microbatches_can_be_listed(subject: Subject) -> Iterator[Problem]:
    train, dp = subject.config.train, subject.dp or 1
    num_microbatches = train.global_batch_size // (train.micro_batch_size * dp)
    if num_microbatches > MOST_MICROBATCHES:
        most = MOST_MICROBATCHES * train.micro_batch_size * dp
        yield Problem(
            "train.global_batch_size",
            train.global_batch_size,
            f"makes {num_microbatches:,} microbatches per pipeline and step, and at most {MOST_MICROBATCHES:,} are planned: a "
            "schedule lists each of them, and would not fit in memory",
            {"train.global_batch_size": [most]},
        )


def ranks_can_be_listed(subject: Subject) -> Iterator[Problem]:
    parallel = subject.config.parallel
    world_size = parallel.tp * parallel.pp * parallel.cp * (subject.dp or 1)
    if world_size > MOST_RANKS:
        yield Problem(
            "parallel",
            f"tp x pp x dp = {parallel.tp} x {parallel.pp} x {subject.dp or 1}",
            f"is {world_size:,} ranks, and at most {MOST_RANKS:,} are planned: the groups of so many would not fit in memory",
            {} if parallel.dp is None else {"parallel.dp": divisors(parallel.dp, parallel.dp)},
            "Make the sizes smaller.",
        )


def run_has_one_length(subject: Subject) -> Iterator[Problem]:
    steps, tokens = subject.config.train.steps, subject.config.train.tokens
    if steps is None and tokens is None:
        yield Problem(
            "train.steps",
            None,
            "train.steps or train.tokens must be given: the run would have no end, and the learning rate no schedule",
            advice="Set one of them.",
        )
    if steps is not None and tokens is not None:
        yield Problem(
            "train.steps",
            steps,
            f"train.tokens = {tokens} is given too: both say how long the run is, and one would be ignored",
            {"train.steps": [None], "train.tokens": [None]},
        )


def warmup_ends(subject: Subject) -> Iterator[Problem]:
    optimizer, num_steps = subject.config.optimizer, planned_steps(subject.config)
    if num_steps is not None and optimizer.warmup_steps > num_steps:
        yield Problem(
            "optimizer.warmup_steps",
            optimizer.warmup_steps,
            f"must be at most the {num_steps} steps of the run: it would end before the learning rate reaches its peak",
            {"optimizer.warmup_steps": [num_steps], "train.steps": [optimizer.warmup_steps]},
        )
    if optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
        yield Problem(
            "optimizer.decay_steps",
            optimizer.decay_steps,
            f"must be more than warmup_steps = {optimizer.warmup_steps}: the decay would end before it begins",
            {"optimizer.decay_steps": [optimizer.warmup_steps + 1, None]},
        )


def decay_goes_down(subject: Subject) -> Iterator[Problem]:
    optimizer = subject.config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield Problem(
            "optimizer.min_lr",
            optimizer.min_lr,
            f"must be at most lr = {optimizer.lr:g}: the learning rate would rise at the end",
            {"optimizer.min_lr": [optimizer.lr / 10], "optimizer.lr": [optimizer.min_lr]},
        )
    if optimizer.lr_schedule == "constant" and (optimizer.min_lr > 0 or optimizer.decay_steps is not None):
        yield Problem(
            "optimizer.lr_schedule",
            "constant",
            "never decays: min_lr and decay_steps would have no effect",
            {"optimizer.lr_schedule": ["cosine", "linear"]},
            "Or leave min_lr and decay_steps out.",
        )


def corpora_are_named(subject: Subject) -> Iterator[Problem]:
    data = subject.config.data
    if not data.train and not data.synthetic:
        yield Problem(
            "data.train",
            data.train,
            "must name a corpus: there is nothing to learn from",
            {"data.synthetic": [True]},
            "Set data.train=[[1.0, PREFIX]] to a corpus of `triaxis prepare`.",
        )
    if data.valid is not None and not data.valid:
        yield Problem(
            "data.valid", [], "must name a corpus or be none: no sample to validate on", {"data.valid": [None]}
        )
    for field, corpora in (("data.train", data.train), ("data.valid", data.valid or [])):
        prefixes = [prefix for _, prefix in corpora]
        if not all(weight > 0 for weight, _ in corpora):
            yield Problem(
                field,
                corpora,
                "every weight must be above 0: a corpus without weight gives no sample",
                advice="Leave out a corpus that is not wanted.",
            )
        elif len(set(prefixes)) < len(prefixes):
            yield Problem(
                field,
                corpora,
                "must name each corpus once: a second entry would give the same samples again",
                advice="Name it once, with the sum of its weights.",
            )


def split_has_parts(subject: Subject) -> Iterator[Problem]:
    data, train = subject.config.data, subject.config.train
    if min(data.split) < 0 or data.split[0] == 0:
        yield Problem(
            "data.split",
            data.split,
            "must be three weights of at least 0 for train, valid and test, train above 0: there is nothing to learn from",
            {"data.split": [(0.98, 0.02, 0.0)]},
        )
    elif train.eval_interval is not None and data.valid is None and data.split[1] == 0 and not data.synthetic:
        yield Problem(
            "train.eval_interval",
            train.eval_interval,
            "asks for validation, but data.split gives no document to it and data.valid names no corpus",
            {
                "train.eval_interval": [None],
                "data.split": [(data.split[0] * 0.98, data.split[0] * 0.02, data.split[2])],
            },
        )


def bucket_holds_a_number(subject: Subject) -> Iterator[Problem]:
    element_bytes = 8 if subject.config.precision.dtype == "float64" else 4
    bucket_bytes = subject.config.optimizer.bucket_bytes
    if bucket_bytes < element_bytes:
        yield Problem(
            "optimizer.bucket_bytes",
            bucket_bytes,
            f"must hold at least one main grad of {element_bytes} bytes: no bucket would ever fill",
            {"optimizer.bucket_bytes": [element_bytes, 64 * 2**20]},
        )


def name_is_a_folder(subject: Subject) -> Iterator[Problem]:
    name = subject.config.runtime.name
    if name is not None and (not name.strip() or name in (".", "..") or "/" in name or "\0" in name):
        plain = name.replace("/", "-").replace("\0", "").strip(" .-")
        yield Problem(
            "runtime.name",
            name,
            "must be a plain folder name: the run would be written elsewhere than in runtime.runs_dir",
            {"runtime.name": [plain] if plain else []},
            "Choose a name without slashes.",
        )
    elif name is not None and (len(name) > LONGEST_NAME or not name.isprintable()):
        plain = "".join(letter for letter in name if letter.isprintable())[:LONGEST_NAME].strip(" .-")
        yield Problem(
            "runtime.name",
            name if name.isprintable() else repr(name),
            f"must be one line of at most {LONGEST_NAME} printable characters: no folder could have that name, or no log show it",
            {"runtime.name": [plain] if plain else []},
            "Choose a shorter name of one line.",
        )


def traced_steps_are_in_the_run(subject: Subject) -> Iterator[Problem]:
    telemetry, num_steps = subject.config.telemetry, planned_steps(subject.config)
    for name, traced in (("profile", telemetry.profile), ("timeline", telemetry.timeline)):
        if traced is None or num_steps is None or traced.start + traced.steps - 1 <= num_steps:
            continue
        last = traced.start + traced.steps - 1
        yield Problem(
            f"telemetry.{name}.start",
            traced.start,
            f"asks for a trace of steps {traced.start} to {last}, but the run has {num_steps}: it would never be whole",
            {
                f"telemetry.{name}.start": [num_steps - traced.steps + 1] if traced.steps <= num_steps else [],
                f"telemetry.{name}.steps": [num_steps - traced.start + 1] if traced.start <= num_steps else [],
                "train.steps": [last] if subject.config.train.steps is not None else [],
            },
        )


def profiled_ranks_are_in_the_run(subject: Subject) -> Iterator[Problem]:
    profile = subject.config.telemetry.profile
    if profile is None:
        return
    world_size, dp = subject.world_size, subject.dp
    if world_size is None and dp is not None:
        world_size = subject.config.parallel.tp * subject.config.parallel.pp * dp
    missing = [rank for rank in profile.ranks if rank < 0 or (world_size is not None and rank >= world_size)]
    if missing or not profile.ranks:
        legal = [rank for rank in profile.ranks if rank not in missing]
        yield Problem(
            "telemetry.profile.ranks",
            profile.ranks,
            f"must name ranks of the run{'' if world_size is None else f', 0 to {world_size - 1}'}: nobody would write the trace"
            + (f" of {', '.join(map(str, missing))}" if missing else ""),
            {"telemetry.profile.ranks": [legal or [0]], "telemetry.profile": [None]},
        )


def collectives_reach_the_device(subject: Subject) -> Iterator[Problem]:
    runtime = subject.config.runtime
    if runtime.collectives == "nccl" and runtime.device == "cpu":
        yield Problem(
            "runtime.collectives",
            "nccl",
            "moves tensors of GPUs only, but runtime.device = cpu: the first call would fail on every rank",
            {"runtime.collectives": ["auto", "gloo"], "runtime.device": ["auto", "cuda"]},
        )


def gpu_tools_have_a_gpu(subject: Subject) -> Iterator[Problem]:
    """What is known before anybody looks at the machine; `launch.start.preflight.refuse_without_gpu` asks it."""
    if subject.config.runtime.device == "cpu":
        for field in asks_for_gpu(subject.config):
            yield Problem(
                field,
                True,
                "looks at a GPU, but runtime.device = cpu: it would show nothing",
                {field: [False], "runtime.device": ["auto", "cuda"]},
            )


def asks_for_gpu(config: Config) -> Iterator[str]:
    """The fields that are on and that only a GPU can answer."""
    for name in ("nvtx", "memory_history"):
        if getattr(config.telemetry, name):
            yield f"telemetry.{name}"


RULES: tuple[Rule, ...] = (
    *CHECKPOINT_RULES,
    *RESILIENCE_RULES,
    *MODEL_RULES,
    layers_fill_stages,
    layers_are_dealt_out,
    schedule_matches_chunks,
    axes_are_built,
    dtype_is_built,
    axes_fill_world,
    nodes_are_whole,
    ranks_can_be_listed,
    batch_is_whole_microbatches,
    microbatches_can_be_listed,
    run_has_one_length,
    warmup_ends,
    decay_goes_down,
    *ACTIVATION_RULES,
    corpora_are_named,
    split_has_parts,
    bucket_holds_a_number,
    name_is_a_folder,
    traced_steps_are_in_the_run,
    profiled_ranks_are_in_the_run,
    collectives_reach_the_device,
    gpu_tools_have_a_gpu,
)
"""In the order in which a reader of the file meets the fields."""
