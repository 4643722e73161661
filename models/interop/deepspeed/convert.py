"""Read a DeepSpeed configuration as values for a planned run, and say what was left out.

    ds_config.json -> entries -> batches, ZeRO stage, precision, optimizer, schedule -> {section: {field: (value, origin)}}

The file has no model, no layout and no data. `auto` leaves a value open, as the Hugging Face Trainer would fill it in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError, brief, shown
from triaxis.models.interop.deepspeed.keys import CONTAINERS, LEFT_OUT, REFUSED, WITHOUT_EFFECT, entries, is_on
from triaxis.models.interop.deepspeed.schedule import Decay, DeepSpeedRates, rate_notes

Fields = dict[str, dict[str, tuple[Any, str]]]
"""Section -> field -> (value, where it comes from)."""

BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
STAGE, CLIPPING, SUMS = "zero_optimization.stage", "gradient_clipping", "data_types.grad_accum_dtype"
RULE = "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x GPUs"
ADAMS = ("Adam", "AdamW")


@dataclass(frozen=True, slots=True)
class DeepSpeedRun:
    """What a DeepSpeed configuration decides about a run.

    Attributes:
        fields: values under our names, each with the key that it comes from.
        notes: sentences on what was left out, what the file leaves open (`auto`), and how our learning rates differ from
            DeepSpeed's.
    """

    fields: Fields
    notes: Sequence[str]


@dataclass
class _Keys:
    """A file's entries by dotted name, and what reading them found.

    `missing` and `left_out` map a key without a counterpart here to the reason. Keys in `missing` would change training, and are
    refused unless the user ignores them. Keys in `left_out` are only noted.
    """

    entries: dict[str, Any]
    read: set[str] = field(default_factory=set)
    auto: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    fields: Fields = field(default_factory=dict)

    def value(self, name: str, default: Any = None) -> Any:
        """Return a key's value; None if it is `auto`, and `default` if the key is absent."""
        self.read.add(name)
        value = self.entries.get(name)
        if value == "auto":
            if name not in self.auto:
                self.auto.append(name)
            return None
        return default if value is None else value

    def number(self, name: str, default: Any = None, *, is_count: bool = False) -> Any:
        """Return a key's number; None if it is `auto`, `default` if it is absent.

        A value that is no number (with `is_count`: no integer >= 1) becomes a problem, and gives None.
        """
        value = self.value(name, default)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
        if is_number and not is_count:
            return value
        if is_number and value == int(value) >= 1:
            return int(value)
        rule = "a whole number, at least 1" if is_count else "a number"
        self.problems.append(
            f"{name} = {shown(value)}: must be {rule}; the run could not be planned with it. Correct it."
        )
        return None

    def switch(self, name: str) -> bool | None:
        """Return a key's boolean, by default False; None if it is `auto`."""
        value = self.value(name, default=False)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{name} = {shown(value)}: must be true or false; it switches a feature. Correct it.")
        return None if value is None else value is True

    def put(self, ours: str, value: Any, name: str) -> None:
        """Record `value`, unless it is None, for our field `ours`. Its origin `name` is a DeepSpeed key or a phrase."""
        if value is not None:
            section, key = ours.split(".")
            origin = name if " " in name or name in self.entries else f"DeepSpeed's default of {name}"
            self.fields.setdefault(section, {})[key] = (value, origin)


def from_deepspeed(keys: Mapping[str, Any], num_gpus: int, source: str, ignored: Sequence[str] = ()) -> DeepSpeedRun:
    """Convert a DeepSpeed configuration.

    Args:
        keys: content of the file.
        num_gpus: ranks of the run, for the batch rule.
        source: file name, for messages.
        ignored: keys to leave out: unknown ones, or ones without a counterpart that would change training.

    Raises:
        ConfigError: keys are malformed, contradict each other, are unknown or have no counterpart.
    """
    found = _Keys(dict(entries(keys)))
    _batches(found, num_gpus)
    stage = found.number(STAGE, 0)
    if stage not in (None, 0, 1, 2, 3):
        found.problems.append(f"{STAGE} = {shown(stage)}: must be 0, 1, 2 or 3; no other stage exists. Correct it.")
    elif stage is not None:
        found.put("parallel.zero", max(1, int(stage)), f"{STAGE} = {stage}")
    _offload(found)
    _precision(found)
    found.put("optimizer.clip_grad", found.number(CLIPPING, 1.0), CLIPPING)
    if found.fields.get("optimizer", {}).get("clip_grad", (None,))[0] == 0:
        found.fields["optimizer"]["clip_grad"] = (None, f"{CLIPPING} = 0")
    lr = _optimizer(found)
    _schedule(found, lr)
    without_effect = _others(found, ignored)
    found.problems += [
        f"{name}: no counterpart here: {why}. Remove it, or leave it out: --ignore {name}."
        for name, why in found.missing.items()
        if name not in ignored
    ]
    found.problems += [
        f"--ignore {name}: not a key of {source} that could be left out. Remove it."
        for name in ignored
        if name not in found.missing and name not in found.entries.keys() - found.read
    ]
    found.problems += _broken(found.fields)
    if found.problems:
        raise ConfigError(found.problems, source)
    notes = [f"From {source}, a DeepSpeed configuration; defaults of its version 0.19 are written out."]
    notes += [f"Could not be carried over: {name}: {why}." for name, why in (found.missing | found.left_out).items()]
    if found.auto:
        notes.append(f"Open (auto), and chosen here: {', '.join(found.auto)}.")
    notes += [f"Without effect here ({topic}): {', '.join(names)}." for topic, names in without_effect.items()]
    return DeepSpeedRun(found.fields, [*notes, *(f"{note[0].upper()}{note[1:]}." for note in found.notes)])


def _batches(found: _Keys, num_gpus: int) -> None:
    """Fill in the batch size that DeepSpeed would derive from the others."""
    num_problems = len(found.problems)
    batch, micro, accumulation = (found.number(name, is_count=True) for name in BATCHES)
    if len(found.problems) > num_problems:
        return
    if not found.auto:
        if accumulation is None and (batch is None) != (micro is None):
            accumulation = 1
        elif batch is None and micro is None:
            found.notes.append("neither train_batch_size nor train_micro_batch_size_per_gpu is given: chosen here")
    given = ", ".join(
        f"{name} = {value}" for name, value in zip(BATCHES, (batch, micro, accumulation), strict=True) if value
    )
    if [batch, micro, accumulation].count(None) <= 1:
        batch = batch or micro * accumulation * num_gpus
        micro = micro or batch // (accumulation * num_gpus)
        accumulation = accumulation or batch // (micro * num_gpus)
        if batch != micro * accumulation * num_gpus or not micro:
            found.problems.append(
                f"{given} with {num_gpus} GPUs: DeepSpeed's rule is {RULE}, in whole numbers, and {batch} is not {micro} x "
                f"{accumulation} x {num_gpus}; a step would train on other samples. Correct one of them, or give the GPUs that the "
                "file is for, such as --gpus 8x80GB."
            )
            return
    for ours, name, value in (("global_batch_size", BATCHES[0], batch), ("micro_batch_size", BATCHES[1], micro)):
        is_given = isinstance(found.entries.get(name), int)
        found.put(f"train.{ours}", value, name if is_given else f"from the other batch sizes and {num_gpus} GPUs")


def _offload(found: _Keys) -> None:
    """Read whether host memory holds the optimizer's state; NVMe is left out."""
    name = "zero_optimization.offload_optimizer"
    asked = found.value(name, {})
    device = asked.get("device", "none") if isinstance(asked, Mapping) else asked
    if found.switch("zero_optimization.cpu_offload"):
        name, device = "zero_optimization.cpu_offload", "cpu"
    if device == "cpu":
        found.put("optimizer.offload", "cpu", name)
    elif device not in (None, "none"):
        found.left_out[name] = (
            f"{shown(device)}: only host memory is built (optimizer.offload=cpu), and the state stays on the GPUs"
        )


def _precision(found: _Keys) -> None:
    bf16, fp16 = found.switch("bf16.enabled"), found.switch("fp16.enabled")
    if bf16 and fp16:
        found.problems.append(
            "bf16.enabled and fp16.enabled are both true: DeepSpeed takes one; a run has one dtype. Switch one off."
        )
    names = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "loss_scale")
    if not fp16:
        found.read |= {f"fp16.{name}" for name in (*names, "consecutive_hysteresis", "fp16_master_weights_and_grads")}
    if bf16 or fp16:
        found.put("precision.dtype", "bf16" if bf16 else "fp16", f"{'bf16' if bf16 else 'fp16'}.enabled")
    elif bf16 is False and fp16 is False:
        found.put("precision.dtype", "fp32", "neither bf16.enabled nor fp16.enabled")
    if fp16:
        power, window, hysteresis, minimum, static = (
            found.number(f"fp16.{name}", default) for name, default in zip(names, (16, 1000, 2, 1, 0), strict=True)
        )
        # A power beyond this is out of the field's range, which is reported with its name.
        initial = None if power is None else 2.0 ** max(-99, min(99, power))
        scale = {"initial": initial, "window": window, "hysteresis": hysteresis, "minimum": minimum}
        scale = {"static": static} if static else {key: value for key, value in scale.items() if value is not None}
        found.put("precision.loss_scale", scale, "loss scale of fp16")
    sums = found.value(SUMS)
    if sums in ("bf16", "bfloat16") and bf16:
        found.put("precision.gradients", "bf16", SUMS)
    elif sums is None and (bf16 or fp16):
        found.notes.append(
            f"gradients are summed in fp32; DeepSpeed does so with {SUMS} = fp32, and else in the run's dtype"
        )
    elif sums not in (None, "fp32", "float32"):
        found.missing[SUMS] = f"{shown(sums)} is not built for this run: sums are in fp32, or in bf16 for a bf16 run"


def _type_of(found: _Keys, section: str, known: Sequence[str], without: str) -> str | None:
    """Read the type of the optimizer or scheduler; None if the file has none that is read here.

    `without` is the note for a file without one.
    """
    name = found.value(f"{section}.type")
    if (same := next((each for each in known if each.lower() == str(name).lower()), None)) is not None:
        return same
    found.read |= {key for key in found.entries if key.startswith(f"{section}.params.")}
    if name is None:
        found.notes.append(f"the file has no {section}: {without}")
    else:
        found.missing[f"{section}.type"] = (
            f"{shown(name)}: only {' and '.join(known)} are read, another one trains another model"
        )
    return None


def _optimizer(found: _Keys) -> float | None:
    """Read the optimizer; return its learning rate if it is known."""
    params = "optimizer.params."
    name = _type_of(found, "optimizer", ADAMS, "AdamW with the values below is chosen here")
    if name is None:
        return None
    lr, eps = found.number(f"{params}lr", 1e-3), found.number(f"{params}eps", 1e-8)
    # torch's AdamW decays by default, DeepSpeed's FusedAdam does not.
    decay = found.number(f"{params}weight_decay", 0.01 if found.entries.get(f"{params}torch_adam") is True else 0.0)
    betas = found.value(f"{params}betas", [0.9, 0.999])
    if betas is not None and not (isinstance(betas, list) and len(betas) == 2):
        found.problems.append(f"{params}betas = {shown(betas)}: must be two numbers; Adam has two moments. Correct it.")
        betas = None
    if found.value(f"{params}adam_w_mode", default=True) is False and name == "Adam" and decay:
        found.missing[f"{params}adam_w_mode"] = "weight decay is decoupled (AdamW), not added to the gradient"
    if found.value(f"{params}bias_correction", default=True) is False:
        found.missing[f"{params}bias_correction"] = "moments are always corrected for their start from zero"
    found.put("optimizer.name", "adamw", "optimizer.type")
    for ours, key, value in (("lr", "lr", lr), ("weight_decay", "weight_decay", decay), ("eps", "eps", eps)):
        found.put(f"optimizer.{ours}", value, f"{params}{key}")
    for ours, value in zip(("beta1", "beta2"), betas or (None, None), strict=True):
        found.put(f"optimizer.{ours}", value, f"{params}betas")
    if decay:
        found.notes.append("norms and biases are not decayed; in DeepSpeed the script decides it")
    return float(lr) if lr is not None else None


def _schedule(found: _Keys, lr: float | None) -> None:
    """Read the schedule, and note where its rates differ from ours."""
    params = "scheduler.params."
    kinds: Mapping[str, Decay] = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    name = _type_of(found, "scheduler", list(kinds), "warm-up and decay are chosen here")
    if name is None:
        return
    kind, is_cosine = kinds[name], name == "WarmupCosineLR"
    low_name = f"{params}{'warmup_min_ratio' if is_cosine else 'warmup_min_lr'}"
    low, warmup = found.number(low_name, 0.0), found.number(f"{params}warmup_num_steps", 1000, is_count=True)
    total = None if kind == "constant" else found.number(f"{params}total_num_steps", is_count=True)
    if kind != "constant" and found.entries.get(f"{params}total_num_steps") is None:
        found.problems.append(f"{params}total_num_steps is missing: {name} would not know its end. Give it, or auto.")
    shape = found.value(f"{params}warmup_type", "log")
    if shape not in (None, "linear"):
        found.missing[f"{params}warmup_type"] = (
            f"the warm-up is linear here, and {shown(shape)} in the file, or by default"
        )
    if low:
        found.missing[low_name] = "the warm-up begins at 0"
    if (
        not is_cosine
        and (peak := found.number(f"{params}warmup_max_lr", None if kind == "constant" else 1e-3)) is not None
    ):
        lr = float(peak)
        found.put("optimizer.lr", lr, f"{params}warmup_max_lr")
    warmup = None if warmup is None else max(2, warmup)
    found.put("optimizer.lr_schedule", kind, "scheduler.type")
    found.put("optimizer.warmup_steps", warmup, f"{params}warmup_num_steps")
    found.put("optimizer.decay_steps", total, f"{params}total_num_steps")
    found.put("train.steps", total, f"{params}total_num_steps")
    floor, origin = low, low_name
    if is_cosine:
        origin, share = f"{params}cos_min_ratio", found.number(f"{params}cos_min_ratio", 1e-4)
        floor = None if lr is None or share is None else float(f"{lr * share:.12g}")
        if share is not None and lr is None:
            found.left_out[origin] = "the peak that it is a share of is open: a tenth is chosen here"
    found.put("optimizer.min_lr", 0.0 if kind == "constant" else floor, origin)
    if not found.problems and None not in (lr, warmup, floor, low) and (total or kind == "constant"):
        there = DeepSpeedRates(kind, lr or 0.0, low, floor or 0.0, warmup or 2, total or 0, is_log=shape != "linear")
        found.notes += rate_notes(there)


def _others(found: _Keys, ignored: Sequence[str]) -> dict[str, list[str]]:
    """Add keys that were not read to `left_out` or `missing` (see `_Keys`), or to `problems`.

    Return the keys that change nothing here, such as those for logging, by topic.
    """
    without_effect: dict[str, list[str]] = {}
    known = {*found.read, *WITHOUT_EFFECT, *LEFT_OUT, *REFUSED}
    for name in sorted(found.entries.keys() - found.read):
        if name in WITHOUT_EFFECT:
            without_effect.setdefault(WITHOUT_EFFECT[name], []).append(name)
        elif name in LEFT_OUT or name in REFUSED:
            if is_on(found.entries[name]):
                table, why = (found.left_out, LEFT_OUT) if name in LEFT_OUT else (found.missing, REFUSED)
                table[name] = why[name]
        elif name in CONTAINERS:
            found.problems.append(
                f"{name} = {shown(found.entries[name])}: must be a mapping; its keys could not be read."
            )
        elif name in ignored:
            found.missing[name] = "unknown (--ignore)"
        else:
            near = get_close_matches(name, known, n=1, cutoff=0.75)
            meant = f" Did you mean {near[0]}?" if near else ""
            way = f"Remove it, or leave it out: --ignore {brief(name)}."
            found.problems.append(f"{brief(name)}: unknown key; what it does would be lost.{meant} {way}")
    return without_effect


def _broken(fields: Fields) -> list[str]:
    """List values that our config fields refuse, as problems that start with the DeepSpeed key."""
    found = []
    for section, own in fields.items():
        kind = Config.section_type(section)
        assert kind is not None, "a section of the configuration"
        whole = {"global_batch_size": 1} if section == "train" else {}
        try:
            kind.model_validate(whole | {key: value for key, (value, _) in own.items()})
        except ValidationError as error:
            found += [
                f"{own[str(detail['loc'][0])][1]}: {section}.{'.'.join(map(str, detail['loc']))} = {shown(detail['input'])}: "
                f"{detail['msg']}; the run could not be planned with it. Correct it."
                for detail in error.errors(include_url=False)
            ]
    return found
