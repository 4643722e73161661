"""`triaxis config` checks a configuration before anything starts, without a GPU, a process group or torch.

print     YAML < environment < overrides  ->  the resolved tree, with the meaning of every field
explain   a field or section              ->  type, legal values, default, rule on resume and meaning
check     the same, and the cluster       ->  every problem at once, or the derived values
params    the same                        ->  every parameter, its shape and group (`optimizer.groups`)
mup       the same, and a base width      ->  the config with the fields of muP
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.context_parallel import gathers_keys, method_line
from triaxis.engine.config.quantities.extension_costs import with_costs
from triaxis.engine.config.quantities.plan import balance_line, batch_plan, parallel_sizes, stages_of
from triaxis.engine.config.quantities.run_phases import at_phase, run_phases
from triaxis.engine.config.schema.dotted import with_fields
from triaxis.engine.config.tree import Config
from triaxis.engine.config.write import to_yaml
from triaxis.engine.data.datasets import open_datasets
from triaxis.engine.data.document_statistics import measure_documents
from triaxis.engine.errors import counted
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.forwards import of_forward
from triaxis.engine.pipeline.programs import Programs
from triaxis.engine.storage.redaction import tree_without_secrets
from triaxis.engine.telemetry.outlets.banner import cp_imbalance_line
from triaxis.engine.telemetry.record.parameters import num_active
from triaxis.launch.config_reference import chosen, entries, to_markdown
from triaxis.launch.footprint.own_costs import OwnCostsMeter
from triaxis.launch.pictures.tables import aligned
from triaxis.launch.start.command_line import CONFIG, CommandParser, add_world_size, check_counts, print_json, refuse
from triaxis.models.mup import mup_fields
from triaxis.models.parameter_groups import GroupedParameter, grouped_parameters, groups_have_parameters
from triaxis.models.predict.fit import Devices, memory_line, memory_rule, uses_gpu, uses_nccl
from triaxis.models.predict.rank_memory import GB, can_keep, predict, resolve_recompute
from triaxis.models.run_rules import RULES_OF_A_RUN
from triaxis.models.specs import num_parameters

MOST_EXECUTED = 16
"""Most pipeline ranks for which `check` executes a named schedule; a larger pipeline is represented by one of this size."""

PRINT_EXAMPLES = """examples:
  triaxis config print configs/gpt_tiny.yaml
  TP=4 triaxis config print configs/gpt_tiny.yaml train.steps=20 > mine.yaml
"""
EXPLAIN_EXAMPLES = """examples:
  triaxis config explain train.micro_batch_size
  triaxis config explain model.moe
"""
CHECK_EXAMPLES = """examples:
  triaxis config check configs/gpt_tiny.yaml
  triaxis config check configs/llama3_8b.yaml --gpus 128 --ranks-per-node 8 --gpu-memory 80 parallel.tp=4
"""
PARAMS_EXAMPLES = """examples:
  triaxis config params configs/gpt_tiny.yaml
  triaxis config params configs/llama3_8b.yaml 'optimizer.groups=[{match: "embedding.*", weight_decay: 0.0}]'
"""
MUP_EXAMPLES = """examples:
  triaxis config mup configs/gpt_125m.yaml --base-hidden-size 256 model.position=rope > wide.yaml
"""


def add_arguments(parser: CommandParser) -> None:
    parser.renamed = {"from-hf": "`triaxis new --from`", "from-megatron": "`triaxis new --from`"}
    summary = "print the resolved configuration, each field with its meaning"
    parser.add_verb("print", summary, "CONFIG [section.key=value ...]", PRINT_EXAMPLES).takes(CONFIG, "the file")
    summary = "explain a field, or every field of a section: type, legal values, default, rule on resume, meaning"
    explain = parser.add_verb("explain", summary, "[FIELD] [--markdown]", EXPLAIN_EXAMPLES)
    explain.add_argument("field", nargs="?", metavar="FIELD", help="such as train.steps, or a section (default: all)")
    explain.add_argument("--markdown", action="store_true", help="print tables, as in docs/config.md")
    summary = "report every problem of a configuration at once, or the values that follow from it"
    words = "CONFIG [--gpus N] [--ranks-per-node N] [--gpu-memory GB] [section.key=value ...]"
    check = parser.add_verb("check", summary, words, CHECK_EXAMPLES)
    check.takes(CONFIG, "the file")
    add_world_size(check, "ranks of the run (default: what the config says)")
    check.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="ranks on a node (default: what the config says)"
    )
    check.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GB",
        help="memory of a GPU in 10^9 bytes: a run that is predicted to need more is a problem too",
    )
    summary = "list every parameter: its name, shape, learning-rate factor, weight decay and group"
    parser.add_verb("params", summary, "CONFIG [section.key=value ...]", PARAMS_EXAMPLES).takes(CONFIG, "the file")
    summary = "print a config with the fields of muP, so that the rates of a narrower model hold for it"
    words = "CONFIG --base-hidden-size N [--base-head-dim N] [section.key=value ...]"
    mup = parser.add_verb("mup", summary, words, MUP_EXAMPLES)
    mup.takes(CONFIG, "the file, of the width that is trained, with lr and init_std of the base")
    mup.add_argument("--base-hidden-size", type=int, required=True, metavar="N", help="width of the model they are of")
    mup.add_argument("--base-head-dim", type=int, metavar="N", help="size of its heads (default: the same)")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action, such as `print` or `check`. A ConfigError lists all problems."""
    if args.verb == "print":
        config = load_config(args.config, args.overrides, os.environ)
        print(to_yaml(config, describe=True), end="")
        print_json(args, tree_without_secrets(config.model_dump(mode="json")))
        return 0
    if args.verb == "explain":
        found = entries() if args.field is None else chosen(args.field)
        print(to_markdown(found) if args.markdown else "\n".join(map(str, found)), end="")
        print_json(args, [asdict(one) for one in found])
        return 0
    if args.verb == "mup":
        config = load_config(args.config, args.overrides, os.environ)
        given = with_fields(config, mup_fields(config, args.base_hidden_size, args.base_head_dim))
        print(
            f"# With the fields of muP, from hidden_size {args.base_hidden_size}: lr, init_std and weight_decay are its own."
        )
        print(to_yaml(given), end="")
        print_json(args, given.model_dump(mode="json"))
        return 0
    if args.verb == "params":
        rows = _parameters(load_config(args.config, args.overrides, os.environ, more_rules=[groups_have_parameters]))
        print("\n".join(aligned(rows, left=range(len(rows[0])))))
        print_json(args, [dict(zip(rows[0], row, strict=True)) for row in rows[1:]])
        return 0
    check_counts(world_size=args.world_size, ranks_per_node=args.ranks_per_node)
    if args.gpu_memory is not None and not 0 < args.gpu_memory < float("inf"):
        refuse(
            [
                f"--gpu-memory {args.gpu_memory:g}: must be a number of GB above 0: with it, nothing or everything would fit."
            ]
        )
    devices = None if args.gpu_memory is None else Devices(int(args.gpu_memory * GB))
    config = load_config(
        args.config,
        args.overrides,
        os.environ,
        world_size=args.world_size,
        ranks_per_node=args.ranks_per_node,
        more_rules=[*RULES_OF_A_RUN, *([] if devices is None else [memory_rule(devices)])],
    )
    print(f"{args.config}: ok")
    shown: list[tuple[str, str]] = []
    phases: list[dict[str, object]] = []
    for phase in run_phases(config):
        config = at_phase(config, phase.name) if config.phases else config
        derived = _derived(config, args.world_size, args.ranks_per_node, devices)
        if phase.name:
            print(
                f"phase {phase.name}: tokens {phase.first_token:,} to {phase.end_token:,}, steps to {phase.end_step:,}"
            )
        for name, value in derived:
            if (name, value) not in shown:
                print(f"  {name:<11}{value}")
        shown += derived
        phases.append({"phase": phase.name, "values": [{"name": name, "value": value} for name, value in derived]})
    print_json(args, {"config": str(args.config), "phases": phases})
    return 0


def _parameters(config: Config) -> list[tuple[str, ...]]:
    """Return the rows of a parameter table, the header first. Consecutive layers with equal parameters share rows."""
    rows: list[tuple[str, ...]] = [("parameter", "shape", "lr x", "decay", "group")]
    for layers, name, one in _by_layers(grouped_parameters(config)):
        rule, group = one.rule, "" if one.number is None else config.optimizer.groups[one.number]["match"]
        kept = "frozen" if one.is_frozen else "not trained"
        update = (kept, "") if rule is None else (f"{rule.lr_factor:g}", f"{rule.weight_decay:g}")
        shape = " x ".join(map(str, one.spec.shape))
        rows.append((name.replace("layers.N.", f"layers.{layers}."), shape, *update, group))
    return rows


def _by_layers(found: Sequence[GroupedParameter]) -> Iterator[tuple[str, str, GroupedParameter]]:
    """Yield (layers, name, first layer's parameter) in forward order, once for consecutive equal layers.

    `layers` is a range such as 0-31, one number, or "" for a parameter outside the layers. In the name, N replaces the number.
    """
    alike: list[tuple[list[str], list[tuple[str, GroupedParameter]]]] = []
    for layer, parameters in groupby(found, key=_layer_of):
        named = [(one.spec.name.replace(f"layers.{layer}.", "layers.N.", 1), one) for one in parameters]
        if alike and layer and _facts(named) == _facts(alike[-1][1]):
            alike[-1][0].append(layer)
        else:
            alike.append(([layer], named))
    for numbers, named in alike:
        text = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else numbers[0]
        for name, one in named:
            yield text, name, one


def _layer_of(one: GroupedParameter) -> str:
    return one.spec.name.split(".")[1] if one.spec.name.startswith("layers.") else ""


def _facts(named: Sequence[tuple[str, GroupedParameter]]) -> list[tuple[object, ...]]:
    return [(name, one.spec.shape, one.number, one.rule, one.is_frozen) for name, one in named]


def _derived(
    config: Config, world_size: int | None, ranks_per_node: int | None, devices: Devices | None
) -> list[tuple[str, str]]:
    """List facts derived from a legal config, as (name, value) lines.

    If a name is empty, its value continues the line above. If neither config nor caller sets dp, facts that need dp are left out.

    Raises:
        ScheduleError: a program would deadlock.
    """
    model, parallel = config.model, config.parallel
    padding = model.padded_vocab_size - model.vocab_size
    used = f", of which a token uses {num_active(model):,}" if model.has_experts else ""
    lines = [
        (
            "model",
            f"{num_parameters(model):,} parameters{used}; vocabulary {model.vocab_size:,} + {padding} of padding",
        ),
        ("stages", _stages(config)),
        ("schedule", schedules.title(config)),
    ]
    if parallel.dp is None and world_size is None:
        replica = parallel.tp * parallel.cp * parallel.pp
        cut = f" cp={parallel.cp}" if parallel.cp > 1 else ""
        chosen_axes = f"tp={parallel.tp}{cut} pp={parallel.pp} vpp={parallel.vpp}"
        lines.append(("layout", f"{chosen_axes}, dp = world size / {replica}: open"))
        lines.append(("", "give --gpus N to see the rest"))
        return lines
    sizes = parallel_sizes(config, world_size)
    per_node = ranks_per_node or config.runtime.ranks_per_node
    grid = RankGrid(sizes, per_node, allow_tp_across_nodes=parallel.allow_tp_across_nodes)
    nodes = "" if per_node is None else f" on {grid.num_nodes:,} x {grid.ranks_per_node}"
    lines.append(("layout", f"{sizes}: {counted(grid.world_size, 'rank')}{nodes}"))
    lines.append(("batch", str(batch_plan(config, sizes.dp))))
    if gathers_keys(config) and config.data.attention == "within":
        lines.append(("imbalance", _cp_imbalance(config, sizes.dp)))
    _check_programs(config, sizes)
    if parallel.cp > 1:
        lines.append(("attention", method_line(config)))
    config = with_costs(config, OwnCostsMeter()(config, sizes))
    if config.model.extension is not None:
        lines += [("extension" if not number else "", line) for number, line in enumerate(config.model.extension.lines)]
    resolved = resolve_recompute(config, sizes)
    chosen = resolved.recompute
    if config.recompute.is_any:
        lines.append(("recompute", str(chosen)))
    if parallel.cuts_sequence and chosen.gathered_inputs == "keep":
        lines.append(("gathered", "inputs of column-parallel layers are kept for the backward"))
    if can_keep(resolved, "gathered_kv") and chosen.gathered_kv == "keep":
        lines.append(("gathered", "keys and values of all cp ranks are kept for the backward"))
    most = devices.memory_bytes if devices is not None and uses_gpu(config) else None
    lines.append(("memory", memory_line(predict(resolved, sizes, nccl=uses_nccl(config)), most)))
    return lines


def _cp_imbalance(config: Config, dp: int) -> str:
    """Describe the unequal attention work across cp ranks, if document lengths are known without opening a corpus."""
    if not config.data.synthetic:
        return "over cp: it follows from the lengths of the corpus' documents; the banner of a run has it"
    model, train = config.model, config.train
    datasets = open_datasets(config.data, model.seq_length, train.seed, vocab_size=model.vocab_size)
    documents = measure_documents(
        datasets.train,
        seq_length=model.seq_length,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        dp=dp,
    )
    return cp_imbalance_line(config, documents)


def _check_programs(config: Config, sizes: ParallelSizes) -> None:
    """Execute the programs for a step and a validation under NCCL's rules, as every rank does before training.

    A large named schedule is replaced by a smaller one with the same pattern, so that the answer takes seconds.

    Raises:
        ScheduleError: a program would deadlock.
    """
    num_microbatches, pp = batch_plan(config, sizes.dp).num_microbatches, sizes.pp
    if config.schedule.file is None:
        pp = min(pp, MOST_EXECUTED)
        # Beyond 4 pp, more microbatches repeat what the ranks do between the pipeline's filling and its emptying.
        num_microbatches = min(num_microbatches, 4 * pp + num_microbatches % pp)
    Programs(schedules.of_config(config, pp, sizes.vpp, num_microbatches))
    Programs(of_forward(replace(sizes, pp=pp), num_microbatches))


def _stages(config: Config) -> str:
    counts = [stage.num_own for stage in stages_of(config)]
    chosen = f"; {balance_line(config)}" if config.parallel.layers_per_stage == "auto" else ""
    each = f"{counts[0]} each" if len(set(counts)) == 1 else " ".join(map(str, counts))
    return f"{counted(config.model.num_layers, 'layer')} over {counted(len(counts), 'stage')}: {each}{chosen}"
