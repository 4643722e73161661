"""Convert a Megatron-LM command line's layout, data and run arguments to config sections.

    --tensor-model-parallel-size, ..        parallel
    --num-layers-per-virtual-pipeline-stage parallel.vpp: chunks with that many layers on each rank
    --recompute-granularity, ..             recompute
    --data-path 30 A 70 B, --split          data: {train: [{path: A, weight: 30}, ..], split}
    --save, --save-interval                 checkpoint
    --log-interval, --wandb-project ..      telemetry

Sources: `PipelineParallelLayerLayout` and `get_blend_from_list` in Megatron-Core 0.16.
"""

import re
import shlex
from typing import Any

from triaxis.engine.config.names.foreign_names import FOREIGN_VALUES
from triaxis.engine.config.names.megatron_arguments import ARGUMENTS, taken_over
from triaxis.engine.data.corpus.tokenizers import MERGES, VOCAB
from triaxis.engine.program import triaxis
from triaxis.models.interop.megatron.command_line.parse import Parsed, flag

Fields = dict[str, Any]

_PARTS = {**FOREIGN_VALUES["recompute.modules"], "mlp": "mlp"}
"""Megatron-LM's recompute module -> ours, for modules that can be recomputed here too."""

LEGACY_SPLIT = "969, 30, 1"
"""Megatron-LM's default split for --data-path if --split is not given."""


def layout_fields(parsed: Parsed, notes: list[str]) -> dict[str, Fields]:
    """Build the sections parallel, recompute and offload. Problems are added to `parsed`, notes for the user to `notes`."""
    args = parsed.args
    tp, pp = args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]
    parallel = {
        **taken_over(args, "parallel"),
        # Megatron-LM disables it if tp is 1.
        "sequence_parallel": args["sequence_parallel"] and tp > 1,
    }
    methods = {ARGUMENTS["cp-comm-type"].accepted[method] for method in args["cp_comm_type"]}
    if len(methods) == 1 and (method := methods.pop()) != "auto":
        parallel["cp_method"] = method
    if args["num_experts"]:
        parallel["ep"] = args["expert_model_parallel_size"]
        parallel["etp"] = args["expert_tensor_parallel_size"] or tp
    parallel |= _stages(parsed, pp)
    sections = {"parallel": parallel, "recompute": _recompute(parsed, notes)}
    if args["cpu_offloading_num_layers"]:
        sections["offload"] = taken_over(args, "offload")
    return sections


def _stages(parsed: Parsed, pp: int) -> Fields:
    """Build `parallel.vpp`, and `layers_per_stage` if stages differ."""
    args = parsed.args
    num_layers, each = args["num_layers"], args["num_layers_per_virtual_pipeline_stage"]
    if num_layers is None or pp < 1:
        return {"vpp": 1}
    if args["pipeline_model_parallel_layout"] is not None:
        return _listed_stages(parsed, pp)
    more_at_first, more_at_last = (int(args[f"account_for_{end}_in_pipeline_split"]) for end in ("embedding", "loss"))
    slots = num_layers + more_at_first + more_at_last
    vpp = args["num_virtual_stages_per_pipeline_rank"] or 1
    if each is not None:
        if each < 1 or slots % (pp * each):
            parsed.problems.append(
                f"--num-layers-per-virtual-pipeline-stage {each}: {slots} layers over {pp} pipeline ranks are no whole number of "
                f"chunks of {each}."
            )
            return {"vpp": 1}
        vpp = slots // (pp * each)
    first, last = args["decoder_first_pipeline_num_layers"], args["decoder_last_pipeline_num_layers"]
    if first is None and last is None and not (more_at_first or more_at_last):
        return {"vpp": vpp}
    return {"vpp": vpp} | _uneven_stages(parsed, pp, vpp, (more_at_first, more_at_last))


def _uneven_stages(parsed: Parsed, pp: int, vpp: int, more: tuple[int, int]) -> Fields:
    """Build `layers_per_stage` for a pipeline whose first or last stage differs.

    `more` is 1 for the embedding and the loss if they count as a layer of the first and the last stage, else 0. The result is {},
    with a problem, if the layers cannot be divided so.
    """
    args = parsed.args
    first, last = args["decoder_first_pipeline_num_layers"], args["decoder_last_pipeline_num_layers"]
    if first is None and last is None:
        each, rest = divmod(args["num_layers"] + sum(more), pp * vpp)
        layers = [each] * (pp * vpp)
        layers[0] -= more[0]
        layers[-1] -= more[1]
        is_whole = rest == 0
    else:
        given = (first or 0) + (last or 0)
        between = pp - (first is not None) - (last is not None)
        each, rest = divmod(args["num_layers"] - given, between) if between else (0, args["num_layers"] - given)
        ranks = [*([] if first is None else [first]), *[each] * between, *([] if last is None else [last])]
        # A rank's layers are split evenly over its chunks; stage = chunk x pp + rank.
        layers = [count // vpp for _ in range(vpp) for count in ranks]
        is_whole = rest == 0 and all(count % vpp == 0 for count in ranks)
    if not is_whole or min(layers) < 0:
        parsed.problems.append(
            f"{args['num_layers']} layers cannot be dealt out to {pp} pipeline ranks with {vpp} chunks each as the arguments of "
            "uneven pipelines say."
        )
        return {}
    return {"layers_per_stage": layers}


def _listed_stages(parsed: Parsed, pp: int) -> Fields:
    """Build `vpp` and `layers_per_stage` from a layout string.

    t is a layer, E the embedding, m a multi-token prediction layer and L the loss. | separates stages; (..)*n and t*n repeat.
    """
    given = parsed.args["pipeline_model_parallel_layout"]
    text = re.sub(r"[\s,]", "", given)
    for repeated in (r"\(([^()]*)\)\*(\d+)", r"([EtmL|])\*(\d+)"):
        text = re.sub(repeated, lambda found: found[1] * min(int(found[2]), 10_000), text)
    stages, num_ahead = [stage.count("t") for stage in text.split("|")], parsed.args["mtp_num_layers"] or 0
    is_whole = re.fullmatch(r"E[t|]*[m|]*L", text) and text.count("m") == num_ahead
    if not is_whole or len(stages) % pp or sum(stages) != parsed.args["num_layers"]:
        parsed.problems.append(
            f"--pipeline-model-parallel-layout {given}: must be E, {parsed.args['num_layers']} t, {num_ahead} m and L, in this "
            f"order, in n x {pp} stages with | between them."
        )
        return {"vpp": 1}
    if re.search(r"m.*\|", text):
        parsed.lacks(
            "pipeline-model-parallel-layout", "layers of tokens ahead (m) and the loss (L) are in one stage, the last"
        )
    return {"vpp": len(stages) // pp, "layers_per_stage": stages}


def _recompute(parsed: Parsed, notes: list[str]) -> Fields:
    args = parsed.args
    granularity = "selective" if args["recompute_activations"] else args["recompute_granularity"]
    if granularity is None:
        return {"granularity": "none"}
    if granularity == "full":
        return {"granularity": "full", "method": "uniform", "num_layers": 1, **taken_over(args, "recompute")}
    modules = args["recompute_modules"] or ["core_attn"]
    parts = [_PARTS[name] for name in modules if name in _PARTS]
    if "mlp" in parts and args["sequence_parallel"] and args["tensor_model_parallel_size"] > 1:
        parts[parts.index("mlp")] = "activation"
    if "attention" in parts and args["context_parallel_size"] > 1:
        # With context parallelism, attention's backward needs the gathered tensors, so recomputing attention saves nothing here.
        parts.remove("attention")
    if len(parts) < len(modules):
        notes.append(
            f"of --recompute-modules {' '.join(modules)}, {', '.join(parts) or 'none'} is recomputed: memory alone differs"
        )
    return {"granularity": granularity, "modules": parts} if parts else {"granularity": "none"}


def run_fields(parsed: Parsed, notes: list[str]) -> dict[str, Fields]:
    """Build data, checkpoint, telemetry, runtime and other run sections.

    Problems are added to `parsed`, notes for the user to `notes`.
    """
    args = parsed.args
    sections = {"data": _data(parsed, notes), "checkpoint": _checkpoint(parsed)}
    sections["telemetry"] = {**taken_over(args, "telemetry"), "tensorboard": bool(args["tensorboard_dir"])}
    if args["wandb_project"]:
        sections["telemetry"]["wandb"] = taken_over(args, "telemetry.wandb")
    if args["check_weight_hash_across_dp_replicas_interval"]:
        sections["resilience"] = taken_over(args, "resilience")
    sections["runtime"] = {
        "timeout_seconds": args["distributed_timeout_minutes"] * 60.0,
        "deterministic": args["deterministic_mode"],
    }
    if args["attention_dropout"]:
        sections["kernels"] = {"attention": "explicit"}
        notes.append(
            "kernels.attention is explicit, which is slower: the dropout masks of fused kernels depend on the layout. With "
            "--attention-dropout 0 they are used"
        )
    for each in (ARGUMENTS[name] for names in parsed.without_effect.values() for name in names):
        # The machine decides about kernels and the backend of collectives.
        if each.ours and not each.ours.startswith(("kernels.", "runtime.")):
            notes.append(f"--{each.name} is not taken over; what does so here is {each.ours}")
    return sections


def _data(parsed: Parsed, notes: list[str]) -> Fields:
    args = parsed.args
    data: Fields = {
        **taken_over(args, "data"),
        "attention": "within" if args["reset_attention_mask"] else "across",
        "positions": "document" if args["reset_position_ids"] else "sample",
        "count_document_starts": not args["eod_mask_loss"],
    }
    if not (args["data_path"] or args["train_data_path"] or args["mock_data"]):
        parsed.problems.append("--data-path or --mock-data is missing: there is nothing to learn from.")
    if args["mock_data"]:
        data["synthetic"] = True
    elif args["train_data_path"]:
        data |= {"train": _blend(parsed, "train_data_path"), "split": [1.0, 0.0, 0.0]}
        if args["valid_data_path"]:
            data["valid"] = _blend(parsed, "valid_data_path")
        elif args["eval_interval"]:
            parsed.problems.append(
                "--eval-interval without --valid-data-path: there is nothing to validate on. Give one, or remove it."
            )
    elif args["data_path"]:
        data |= {"train": _blend(parsed, "data_path"), "split": _split(parsed)}
    if args["vocab_file"] and not args["tokenizer_model"]:
        if args["merge_file"] == args["vocab_file"].removesuffix(VOCAB) + MERGES:
            data["tokenizer"] = args["vocab_file"]
        else:
            notes.append(
                f"data.tokenizer is not set, so text is shown as bytes: {args['vocab_file']} is read if its name ends in {VOCAB}, "
                f"and --merge-file is the same with {MERGES}"
            )
    if not args["mock_data"]:
        notes.append("the samples are those of the corpora, in our order")
    return data


def _blend(parsed: Parsed, name: str) -> list[dict[str, Any]]:
    """Build data sources from the words weight, path, weight, path .., or one path. Other words give [] and a problem."""
    words = parsed.args[name]
    if len(words) == 1:
        return [{"path": words[0]}]
    try:
        if len(words) % 2:
            raise ValueError(words)
        return [{"path": path, "weight": float(weight)} for weight, path in zip(words[::2], words[1::2], strict=True)]
    except ValueError:
        parsed.problems.append(
            f"{flag(name)} {' '.join(words)}: must be a weight before each prefix. Without weights Megatron-LM takes the sizes of "
            "the corpora, which are not read here."
        )
        return []


def _split(parsed: Parsed) -> list[float]:
    text = parsed.args["split"] or LEGACY_SPLIT
    # Like Megatron-LM, read the numbers and ignore what separates them.
    weights = [float(number) for number in re.findall(r"\d+\.?\d*|\.\d+", text)]
    if not 1 <= len(weights) <= 3:
        parsed.problems.append(
            f"--split {text}: must be up to three numbers with commas between them, such as 949,50,1."
        )
        return [1.0, 0.0, 0.0]
    return [*weights, 0.0, 0.0][:3]


def _checkpoint(parsed: Parsed) -> Fields:
    args = parsed.args
    checkpoint: Fields = {"keep_last": None, "async": args["async_save"]}
    if args["save"]:
        if args["save_interval"] is None:
            parsed.problems.append(
                "--save without --save-interval: Megatron-LM needs both. Give the iterations between saves."
            )
        checkpoint |= taken_over(args, "checkpoint")
        if args["save_retain_interval"]:
            checkpoint |= {"keep_last": 1, "keep_every": args["save_retain_interval"]}
    if args["load"] and args["load"] != args["save"]:
        parsed.lacks(
            "load",
            "it holds checkpoints of Megatron-LM. Bring one in, and then give checkpoint.load=imported:  "
            + triaxis(f"import {shlex.quote(args['load'])} imported"),
        )
    return checkpoint
