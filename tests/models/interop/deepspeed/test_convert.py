"""DeepSpeed's configurations as values of ours: a realistic one per stage, rates by its formulas, and what is refused."""

from math import cos, log, pi
from typing import Any

import pytest

from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.errors import ConfigError
from triaxis.engine.optimizer.lr import learning_rate
from triaxis.models.interop.deepspeed.convert import DeepSpeedRun, from_deepspeed
from triaxis.models.interop.deepspeed.keys import is_deepspeed

ADAM = {"type": "Adam", "params": {"lr": 3e-4}}
STAGE_0 = {"train_batch_size": 32, "optimizer": ADAM, "gradient_clipping": 0, "flops_profiler": {"enabled": True}}
STAGE_1 = {
    "train_micro_batch_size_per_gpu": 2,
    "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 4, "loss_scale": 0},
    "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 5e8},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 4, "warmup_type": "linear"},
    },
}
STAGE_2 = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "bfloat16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "bf16"},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 4, "total_num_steps": 10, "cos_min_ratio": 0.1, "warmup_type": "linear"},
    },
}
STAGE_3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9, "offload_param": {"device": "none"}},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}


def read(keys: dict[str, Any], num_gpus: int = 8, ignored: tuple[str, ...] = ()) -> DeepSpeedRun:
    assert is_deepspeed(keys)
    return from_deepspeed(keys, num_gpus, "ds.json", ignored)


def values(run: DeepSpeedRun) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, own in run.fields.items() for key, (value, _) in own.items()}


def problems(keys: dict[str, Any], *ignored: str, num_gpus: int = 8) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(keys, num_gpus, ignored)
    return caught.value.problems


def flat(**sections: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, own in sections.items() for key, value in own.items()}


ADAM_DEFAULTS = {"name": "adamw", "lr": 3e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
EXPECTED = {
    0: flat(
        train={"global_batch_size": 32, "micro_batch_size": 4},
        parallel={"zero": 1},
        precision={"dtype": "fp32"},
        optimizer=ADAM_DEFAULTS | {"clip_grad": None},
    ),
    1: flat(
        train={"global_batch_size": 16, "micro_batch_size": 2},
        parallel={"zero": 1},
        precision={
            "dtype": "fp16",
            "loss_scale": {"initial": 4096.0, "window": 500, "hysteresis": 4, "minimum": 1},
        },
        optimizer=ADAM_DEFAULTS
        | {"lr": 2e-3, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "clip_grad": 1.0}
        | {"lr_schedule": "constant", "warmup_steps": 4, "min_lr": 0.0},
    ),
    2: flat(
        train={"global_batch_size": 64, "micro_batch_size": 2, "steps": 10},
        parallel={"zero": 2},
        precision={"dtype": "bf16", "gradients": "bf16"},
        optimizer=ADAM_DEFAULTS
        | {"lr": 1e-3, "weight_decay": 0.01, "clip_grad": 1.0, "offload": "cpu"}
        | {"lr_schedule": "cosine", "warmup_steps": 4, "decay_steps": 10, "min_lr": 1e-4},
    ),
    3: flat(parallel={"zero": 3}, optimizer={"name": "adamw", "lr_schedule": "linear", "min_lr": 0.0}),
}


@pytest.mark.parametrize("stage", EXPECTED)
def test_a_configuration_of_each_stage(stage: int) -> None:
    run = read((STAGE_0, STAGE_1, STAGE_2, STAGE_3)[stage])
    assert values(run) == EXPECTED[stage]
    said = {
        0: ["Without effect here (logging and profiling): flops_profiler."],
        1: ["zero_optimization.overlap_comm, zero_optimization.reduce_bucket_size", "Norms and biases are not decayed"],
        2: ["step 1 is 0 in DeepSpeed"],
        3: ["Open (auto), and chosen here: train_batch_size, ", "scheduler.params.total_num_steps", "bf16.enabled"],
    }
    text = "\n".join(run.notes)
    assert all(words in text for words in said[stage]), text
    assert "offload_param" not in text, "it is off"
    origin = run.fields["train"]["micro_batch_size"][1] if stage != 3 else "from the other batch sizes and 8 GPUs"
    assert origin == ("train_micro_batch_size_per_gpu" if stage == 1 else "from the other batch sizes and 8 GPUs")


def test_state_on_nvme_stays_on_the_gpus() -> None:
    run = read({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}}})
    assert "optimizer.offload" not in values(run)
    assert any("offload_optimizer: 'nvme': only host memory is built" in note for note in run.notes), run.notes


@pytest.mark.parametrize(("stage", "kind"), [(1, "constant"), (2, "cosine"), (3, "linear")])
def test_the_rates_are_those_of_deepspeeds_formulas(stage: int, kind: str) -> None:
    """Its schedule moves after a step: the first two steps have the warm-up's first rate. W = 4, T = 10."""
    warm = [0, 0, 1 / 4, 2 / 4, 3 / 4]
    there = {
        "constant": [*warm, 1, 1, 1, 1, 1],
        "linear": [*warm, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6],
        "cosine": [*warm, *(0.1 + 0.9 * (1 + cos(pi * step / 6)) / 2 for step in range(1, 6))],
    }[kind]
    keys = {**(STAGE_0, STAGE_1, STAGE_2, STAGE_3)[stage]}
    if kind == "linear":
        numbers = {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "total_num_steps": 10, "warmup_type": "linear"}
        keys["scheduler"] = {"type": "WarmupDecayLR", "params": numbers}
    own = {name.partition(".")[2]: value for name, value in values(read(keys)).items() if name.startswith("optimizer.")}
    ours = OptimizerConfig.model_validate(own)
    here = [learning_rate(step, 1, ours, 10) / ours.lr for step in range(10)]
    assert here[:4] == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1])
    shift = 1 if kind == "linear" else 0
    assert here[5 : 10 - shift] == pytest.approx(there[5 + shift :]), "the same curve, of linear one step earlier"


def test_a_warm_up_by_the_logarithm_is_refused_or_noted() -> None:
    keys = STAGE_1 | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}}
    assert "the warm-up is linear here, and 'log'" in problems(keys)[0]
    run = read(keys, ignored=("scheduler.params.warmup_type",))
    there, here = 1e-3 * log(21 + 1) / log(100), 1e-3 * 23 / 100
    assert f"step 23 differs most, by {there - here:g}: {there:g} there, {here:g} here" in run.notes[-1]
    assert any(note.startswith("Could not be carried over: scheduler.params.warmup_type") for note in run.notes)


def test_batches_follow_deepspeeds_rule() -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for given, batch, micro in (
        ((64, 2, 4), 64, 2),
        ((64, 2, None), 64, 2),
        ((None, 2, 4), 64, 2),
        ((64, None, 4), 64, 2),
        ((None, 2, None), 16, 2),
        ((64, "auto", "auto"), 64, None),
        (("auto", 2, "auto"), None, 2),
    ):
        found = values(read(dict(zip(names, given, strict=True))))
        assert (found.get("train.global_batch_size"), found.get("train.micro_batch_size")) == (batch, micro)
    for given in ((64, 2, 8), (60, 2, None), (4, None, None), (64, None, 3)):
        [problem] = problems(dict(zip(names, given, strict=True)))
        assert "DeepSpeed's rule is train_batch_size = train_micro" in problem and "--gpus 8x80GB" in problem


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4: must be 0, 1, 2 or 3"),
        ({"zero_optimization": True}, "zero_optimization = True: must be a mapping"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "are both true: DeepSpeed takes one"),
        ({"bf16": {"enabled": 1}}, "bf16.enabled = 1: must be true or false"),
        ({"train_batch_size": 1.5}, "train_batch_size = 1.5: must be a whole number, at least 1"),
        ({"fp16": {"enabled": True, "initial_scale_power": 200}}, "precision.loss_scale.initial"),
        ({"optimizer": {"type": "Lamb"}}, "'Lamb': only Adam and AdamW are read"),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": 0.9}}},
            "optimizer.params.betas = 0.9: must be two numbers",
        ),
        ({"optimizer": {"type": "Adam", "params": {"lr": -1}}}, "optimizer.params.lr: optimizer.lr = -1: "),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
            "weight decay is decoupled",
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1}}},
            "'OneCycle': only WarmupLR and WarmupDecayLR",
        ),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear"}}}, "total_num_steps is missing"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "no counterpart here: ZeRO++'s gathers"),
        ({"zero_optimisation": {}}, "Did you mean zero_optimization"),
        ({"curriculum_learning": {"enabled": True}}, "phases change the sample length"),
    ],
)
def test_what_cannot_be_read_is_refused_with_all_problems(more: dict[str, Any], words: str) -> None:
    found = problems(STAGE_0 | more | {"strange": 1})
    assert len(found) == 2 and any(words in problem for problem in found), found
    assert any(problem.startswith("strange: unknown key; what it does would be lost") for problem in found)


def test_what_is_ignored_is_listed() -> None:
    keys = STAGE_0 | {"strange": 1, "optimizer": {"type": "Lamb", "params": {"lr": 1}}, "amp": {"enabled": False}}
    run = read(keys, ignored=("strange", "optimizer.type"))
    assert not any(name.startswith("optimizer.l") for name in values(run))
    assert "Could not be carried over: strange: unknown (--ignore)." in run.notes
    assert "--ignore zero: not a key of ds.json that could be left out" in problems(STAGE_0, "zero")[0]


def test_a_models_config_json_is_none() -> None:
    assert not is_deepspeed({"model_type": "llama", "fp16": True}) and not is_deepspeed({"hidden_size": 1})
