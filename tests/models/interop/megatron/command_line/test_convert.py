"""Command lines of Megatron-LM as configs: published ones, each argument by itself, and what has no counterpart."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.models.interop.megatron.command_line.changes import (
    BASE,
    BESIDES,
    BF16,
    CHANGES,
    EXPERTS,
    FILLED,
    FP16,
    LATENT,
    OTHERWISE,
    ROPE,
    SAVED,
)
from tests.models.interop.megatron.command_line.published import DEEPSEEK, GPT3, LLAMA3, MIXTRAL, PUBLISHED, Published
from triaxis.engine.config.load import load_config
from triaxis.engine.config.names.foreign_names import FOREIGN_NAMES
from triaxis.engine.config.names.megatron_arguments import ARGUMENTS, READ, REFUSED
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.models.interop.megatron.command_line.convert import from_command_line
from triaxis.models.specs import num_parameters

FLAGS, NO_COUNTERPART = (
    {name: each for name, each in ARGUMENTS.items() if each.group in groups} for groups in (READ, REFUSED)
)


def config_of(line: str, **more: Any) -> Config:
    return Config.model_validate(yaml.safe_load(from_command_line([line], **more)))


def outer(section: str) -> str:
    """Return the section of a kind of layers, or the section itself."""
    return section.rpartition(".")[0] if section.startswith("model.layer_kinds.") else section


@cache
def fields_of(line: str) -> dict[str, Any]:
    return flat(config_of(line).model_dump(mode="json"))


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {
            name: value
            for key, inner in tree.items()
            for name, value in flat(inner, f"{prefix}.{key}".lstrip(".")).items()
        }
    return {prefix: tree}


@pytest.mark.parametrize("name", CHANGES)
def test_an_argument_changes_the_field_that_it_claims_and_no_other(name: str) -> None:
    line, added, changed = CHANGES[name]
    before = fields_of(f"{line} {FILLED.get(name, '')}")
    if name in ("seq-length", "encoder-seq-length"):
        line = line.replace("--max-position-embeddings 32", "--max-position-embeddings 16")
    after = fields_of(f"{line} {added}")
    known = {key: value for key, value in changed.items() if after.get(key) == value}
    assert known == changed, "the values that are claimed"
    differing = {
        key
        for key in before.keys() | after.keys()
        if before.get(key, "no such field") != after.get(key, "no such field")
    }
    beside = {key for key in differing - changed.keys() if not any(one.startswith(f"{key}.") for one in changed)}
    # A section that was null, such as model.mtp, is one now, with its defaults.
    sections = {section for key in changed if (section := key.rpartition(".")[0]).count(".")}
    inner = {section for section in sections if not any(key.startswith(f"{section}.") for key in before)}
    opened = {
        key for key in beside if any(key == each or key.startswith(f"{each}.") for each in inner | {*map(outer, inner)})
    }
    assert beside - opened <= BESIDES.get(name, set())
    assert differing, "the argument changes something"


def test_every_argument_that_is_read_has_a_test() -> None:
    assert set(FLAGS) == CHANGES.keys() | OTHERWISE.keys() and not CHANGES.keys() & OTHERWISE.keys()


def test_the_names_of_a_config_say_the_same() -> None:
    """An argument in a YAML file is refused with the field that it has here; both tables name one field."""
    for name, (_, _, changed) in CHANGES.items():
        ours = FOREIGN_NAMES.get(FLAGS[name].name.replace("-", "_"))
        # A kind of tokenizer says how many tokens there are, or names a file with another argument.
        if ours is not None and name != "tokenizer-type":
            field = ours.split("=")[0].split(" ")[0]
            assert any(key == field or key.startswith(f"{field}.") for key in changed), f"{name}: {ours}, not {changed}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_command_line_is_a_config_of_the_published_size(name: str, tmp_path: Path) -> None:
    published: Published = PUBLISHED[name]
    if published.missing:
        with pytest.raises(ConfigError) as error:
            from_command_line([published.line], published.vocab_size)
        refused = {text.split(":")[0].lstrip("-") for text in error.value.problems}
        assert refused == set(published.missing), "listed, and nothing else is wrong"
    text = from_command_line([published.line], published.vocab_size, published.missing)
    path = tmp_path / "config.yaml"
    path.write_text(text)
    config = load_config(path)
    assert num_parameters(config.model) == published.num_parameters
    assert {field: getattr(config.model, field) for field in published.model} == published.model
    for missing in published.missing:
        assert f"# NO COUNTERPART, left out: --{missing}: " in text


def test_details_of_published_command_lines() -> None:
    gpt = config_of(GPT3, vocab_size=50257, ignored=["step-batch-size-schedule"])
    assert gpt.precision.scaling is not None and gpt.precision.scaling.initial == 2.0**32
    assert (gpt.optimizer.warmup_steps, gpt.optimizer.decay_steps, gpt.train.steps) == (430, 430_000, 500_000)
    assert (gpt.model.hidden_dropout, gpt.model.attention_dropout, gpt.kernels.attention) == (0.1, 0.1, "explicit")
    assert (gpt.model.vocab_multiple, gpt.checkpoint.dir, gpt.checkpoint.load) == (1024, "ckpt", None)
    llama = config_of(LLAMA3, vocab_size=128256, ignored=["fp8-format", "decoupled-lr"])
    assert not llama.parallel.sequence_parallel, "Megatron-LM disables it where tp is 1"
    assert llama.train.tokens == 1953125000 // 128 * 128 * 8192 and llama.optimizer.warmup_tokens == 3906252 * 8192
    assert llama.optimizer.decay_steps == round(1949218748 / 128)
    mixtral = config_of(MIXTRAL, vocab_size=32000, ignored=["moe-aux-loss-coeff", "no-load-optim"])
    assert (mixtral.parallel.ep, mixtral.parallel.etp, mixtral.optimizer.beta2) == (8, 1, 0.999)
    assert mixtral.model.moe is not None and mixtral.model.moe.normalize and mixtral.optimizer.weight_decay == 0.1
    lite = config_of(DEEPSEEK)
    assert lite.model.moe is not None and lite.model.moe.balance.sequence_loss == 1e-3
    assert (lite.model.moe.shared_experts, lite.model.moe.normalize) == (2, False)
    scaling = lite.model.rope_scaling
    assert scaling is not None and (scaling.type, scaling.factor, scaling.mscale) == ("yarn", 40.0, 0.707)


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        (f"{ROPE} --use-rope-scaling", {"model.rope_scaling.type": "llama3", "model.rope_scaling.factor": 8.0}),
        (FP16, {"precision.dtype": "fp16", "precision.loss_scale.initial": 2.0**32}),
        (
            f"{BF16} --fp8-format e4m3 --fp8-recipe tensorwise",
            {"precision.fp8.recipe": "tensorwise", "precision.fp8.format": "e4m3"},
        ),
        (
            f"{BF16} --fp8-format e4m3 --fp8-recipe mxfp8 --num-layers-at-start-in-bf16 2",
            {"precision.fp8.recipe": "mxfp8", "precision.fp8.bf16_layers": [0, 0]},
        ),
        (LATENT, {"model.mla.kv_lora_rank": 32, "model.mla.v_head_dim": 128, "model.rope_scaling": None}),
        (
            f"{LATENT} --rotary-scaling-factor 40",
            {"model.rope_scaling.type": "yarn", "model.rope_scaling.factor": 40.0},
        ),
        (f"{LATENT} --rotary-scaling-factor 40 --rope-type rope", {"model.rope_scaling": None}),
        (f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel", {"parallel.etp": 2}),
        (BASE, {"precision.dtype": "fp32", "optimizer.lr_schedule": "linear", "optimizer.weight_decay": 0.01}),
        (f"{BASE} --swiglu", {"model.ffn_hidden_size": 128}),
        (f"{SAVED} --load ckpt", {"checkpoint.load": None, "checkpoint.keep_last": None, "checkpoint.async": False}),
    ],
)
def test_values_that_follow(line: str, fields: dict[str, Any]) -> None:
    config = flat(config_of(line).model_dump(mode="json"))
    assert {key: config[key] for key in fields} == fields


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (BASE.replace("embeddings 32", "embeddings 64"), "max-position-embeddings"),
        (f"{BASE} --load elsewhere", "load"),
        (f"{BASE} --optimizer muon", "optimizer"),
        (f"{BASE} --rope-type yarn", "rope-type"),
        (LATENT.replace("--qk-layernorm", ""), "multi-latent-attention"),
        (f"{EXPERTS} --moe-aux-loss-coeff 1e-2", "moe-aux-loss-coeff"),
        (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn", "moe-router-load-balancing-type"),
        (f"{EXPERTS} --moe-shared-expert-intermediate-size 100", "moe-shared-expert-intermediate-size"),
        (f"{EXPERTS} --moe-router-score-function sqrtsoftplus", "moe-router-score-function"),
        (
            f"{EXPERTS[:-1]}8 --moe-router-topk 3 --moe-router-num-groups 2 --moe-router-group-topk 1",
            "moe-router-num-groups",
        ),
        (f"{EXPERTS} --no-rope-freq 2", "no-rope-freq"),
        (f"{BF16} --exp-avg-dtype fp8", "exp-avg-dtype"),
        (f"{BF16} --fp8-format hybrid", "fp8-format"),
        (f"{BF16} --fp8-format hybrid --fp8-recipe mxfp8", "fp8-format"),
        (f"{BASE} --lr-warmup-iters 10 --lr-warmup-init 1e-5", "lr-warmup-init"),
        (
            f"{BASE} --lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-decay-style linear --lr-decay-iters 50",
            "lr-decay-iters",
        ),
    ],
)
def test_what_has_no_counterpart_is_in_the_list(line: str, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_command_line([line])
    (problem,) = error.value.problems
    assert problem.startswith(f"--{name}: no counterpart here: ") and problem.endswith(f"--ignore {name}.")
    assert f"# NO COUNTERPART, left out: --{name}: " in " ".join(
        from_command_line([line], ignored=[name]).replace("\n#  ", "").splitlines()
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{BASE} --lr-wsd-decay-style steps", "--lr-wsd-decay-style steps: must be one of linear, cosine, exp"),
        (f"{BASE} --lr-warmup-fraction nan", "lr_warmup_fraction = nan: must be a number below 2^63."),
    ],
)
def test_a_schedule_that_is_none_is_refused(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_command_line([line])
    assert said in str(error.value)


def test_rates_that_differ_from_megatrons_are_in_the_head() -> None:
    """The warm-up is one step ahead here; the published run of Llama 3 has one of a part of a step, and a decay, too."""
    assert "learning rate" not in from_command_line([BASE])
    head = from_command_line([f"{BASE} --lr-warmup-iters 10"]).replace("\n#  ", "")
    assert (
        "# Note: the learning rate of step 1 is 0 in Megatron-LM and 0.0001 here; of 100 steps, step 1 differs most"
        in head
    )
    assert "; the rates are equal from step 11 on." in head
    text = from_command_line([LLAMA3], 128256, ["fp8-format", "decoupled-lr"])
    assert "of 15,258,789 steps, step 1 differs most" in text.replace("\n#  ", "")


def test_every_argument_without_counterpart_is_in_the_list() -> None:
    values = {"switch": "", "str": " 7", "any": " 7 8"}
    line = " ".join([BASE, *(f"--{name}{values[missing.kind]}" for name, missing in NO_COUNTERPART.items())])
    with pytest.raises(ConfigError) as error:
        from_command_line([line])
    assert {problem.split(":")[0].removeprefix("--") for problem in error.value.problems} == NO_COUNTERPART.keys()
    text = from_command_line([line], ignored=list(NO_COUNTERPART))
    assert config_of(BASE) == Config.model_validate(yaml.safe_load(text)), "left out, and nothing else changes"
    assert all(f"# NO COUNTERPART, left out: --{name}:" in text for name in NO_COUNTERPART)


def test_values_that_switch_nothing_on_have_counterparts() -> None:
    line = " ".join(
        f"--{name} {[*missing.accepted][-1]}" for name, missing in NO_COUNTERPART.items() if missing.accepted
    )
    assert from_command_line([BASE]) == from_command_line([f"{BASE} {line}"])


def test_what_is_chosen_for_a_reason_is_in_the_head() -> None:
    def head(line: str, **more: Any) -> str:
        return from_command_line([line], **more).replace("\n#  ", "")

    assert "Note" not in head(BASE)
    assert "v.json is read if its name ends in vocab.json" in head(f"{BASE} --vocab-file v.json --merge-file m.txt")
    assert "# Note: kernels.attention is explicit" in head(BASE.replace("--attention-dropout 0", ""))
    assert "Megatron-LM's schedule waits in such steps" in head(FP16)
    text = head(
        f"{BASE} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --optimizer-cpu-offload --use-flash-attn"
    )
    assert "# Note: --use-megatron-fsdp is not taken over; what does so here is parallel.zero=3." in text
    assert "--data-parallel-sharding-strategy is not taken over; what does so here is parallel.zero." in text
    assert "is optimizer.offload=cpu." in text and text.count("not taken over") == 3


def test_an_ignored_argument_is_listed_once() -> None:
    line = f"{BASE} --log-throughput --strange $X --split 1 2 --timing-log-level $LEVEL"
    text = from_command_line([line], ignored=["log-throughput", "strange", "split", "--timing-log-level"])
    heads = [row for row in text.splitlines() if row.startswith("#")][1:]
    assert heads == [
        "# NOT READ, left out: --split.",
        "# UNKNOWN, left out: --strange.",
        "# NOT READ, left out: --timing-log-level.",
        "# Without effect here (logging): log-throughput.",
    ]
    assert config_of(BASE) == Config.model_validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("layout", "is_legal"),
    [
        ("Ettt|tttttL", True),
        ("ttttE|ttttL", False),
        ("Etttt|tttt", False),
        ("EEtttt|ttttL", False),
        ("Ettt|mtttttL", False),
    ],
)
def test_a_layout_has_every_part_in_its_place(layout: str, is_legal: bool) -> None:
    line = f"{BASE} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout {layout}"
    if is_legal:
        assert config_of(line).parallel.layers_per_stage == [3, 5]
        return
    with pytest.raises(ConfigError, match="must be E, 8 t, 0 m and L, in this order, in n x 2 stages"):
        from_command_line([line])


def test_layers_of_tokens_ahead_are_in_the_last_stage() -> None:
    line = f"{ROPE} --mtp-num-layers 1 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
    assert config_of(f"{line} Ettttt|tttmL").parallel.layers_per_stage == [5, 3]
    with pytest.raises(ConfigError, match="one stage, the last"):
        from_command_line([f"{line} Ett|ttt|tttm|L"])
