"""Convert Megatron-LM's batch, optimizer and precision arguments to config sections.

Arguments are on the left, the config sections built from them on the right. (..) is the module that converts them:

--train-iters, or --train-samples          train: {steps}, or {tokens}
--lr-decay-style, --lr-warmup-samples ..   optimizer: {lr_schedule, warmup_tokens, ..}           (../schedule.py)
--lr, --adam-beta2 ..                      optimizer                                             (../config.py)
--bf16, --fp16, --loss-scale-window ..     precision
--fp8-format, --fp8-recipe ..              precision.fp8
"""

from typing import Any

from triaxis.engine.config.names.megatron_arguments import taken_over
from triaxis.models.interop.megatron.command_line.parse import Parsed
from triaxis.models.interop.megatron.config import training_sections

Fields = dict[str, Any]


def training_fields(parsed: Parsed, notes: list[str]) -> dict[str, Fields]:
    """Build train, optimizer, precision and eval sections, or {} if there are problems.

    Problems are added to `parsed`, notes for the user to `notes`.
    """
    args = parsed.args
    if not (args["train_iters"] or args["train_samples"]):
        parsed.problems.append("--train-iters or --train-samples is missing: the run would have no end.")
    batch, samples = args["global_batch_size"], args["train_samples"]
    if batch is not None and batch < 1:
        parsed.problems.append(f"--global-batch-size {batch}: must be at least 1.")
    if parsed.problems:
        return {}
    try:
        sections, more = training_sections(args)
    except TypeError as error:
        parsed.problems.append(f"{error}.")
        return {}
    train, optimizer = sections["train"], sections["optimizer"]
    if samples:
        train["tokens"] = samples // batch * batch * (args["seq_length"] or 0)
    if args["lr_warmup_init"]:
        parsed.lacks("lr-warmup-init", "the warm-up begins at 0")
    given = next((name for name in ("lr_decay_iters", "lr_decay_samples") if args[name]), None)
    if args["lr_decay_style"] == "WSD" and given and args[given] != args[given.replace("lr_decay", "train")]:
        parsed.lacks(given.replace("_", "-"), "WSD falls at the end of the run, not before it")
    if args["ddp_bucket_size"]:
        optimizer["bucket_bytes"] = args["ddp_bucket_size"] * (2 if args["grad_reduce_in_bf16"] else 4)
    if args["eval_interval"] and args["eval_iters"]:
        sections["eval"] = taken_over(args, "eval")
    if args["eod_mask_loss"] and not args["calculate_per_token_loss"]:
        more.append(
            "the loss of a step is a mean over tokens here, as with --calculate-per-token-loss; without it Megatron-LM takes the "
            "mean of microbatches, whose tokens differ in number with --eod-mask-loss"
        )
    if args["fp16"]:
        more.append(
            "the learning rate follows the samples, also those of steps that fp16 skips; Megatron-LM's schedule waits in such steps"
        )
    notes += more
    sections["precision"] |= _precision(parsed, args)
    return sections


def _precision(parsed: Parsed, args: Fields) -> Fields:
    """Build the `precision` fields other than dtype."""
    fields: Fields = {}
    if args["grad_reduce_in_bf16"]:
        fields["gradients"] = "bf16"
    dtypes = {args["exp_avg_dtype"], args["exp_avg_sq_dtype"]}
    if dtypes == {"bf16"}:
        fields["moments"] = "bf16"
    elif dtypes != {"fp32"}:
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            if args[name] != "fp32":
                parsed.lacks(name.replace("_", "-"), "moments are both in fp32, or both in bf16")
    return fields | _fp8(parsed, args)


_FP8_FORMATS = {"tensorwise": ("hybrid", "e4m3"), "blockwise": ("e4m3",), "mxfp8": ("e4m3",)}
"""Our recipe -> Megatron-LM formats it supports; the first is what `precision.fp8.format=auto` selects."""


def _fp8(parsed: Parsed, args: Fields) -> Fields:
    """Build the `fp8` section, empty without --fp8-format.

    It is empty too if the recipe or format is not built. `parsed.missing` then says why.
    """
    asked, recipe = args["fp8_format"], args["fp8_recipe"]
    if asked is None:
        return {}
    wanted = _FP8_FORMATS.get(recipe)
    if wanted is None:
        parsed.lacks("fp8-format", f"--fp8-recipe {recipe} is not built: {', '.join(_FP8_FORMATS)} are")
        return {}
    if asked not in wanted:
        parsed.lacks("fp8-format", f"{asked} is not built for --fp8-recipe {recipe}, whose format here is {wanted[0]}")
        return {}
    ends = (args["num_layers_at_start_in_bf16"], args["num_layers_at_end_in_bf16"])
    fp8 = {"recipe": recipe, "bf16_layers": list(ends) if args["first_last_layers_bf16"] else [0, 0]}
    return {"fp8": fp8 if asked == wanted[0] else fp8 | {"format": asked}}
