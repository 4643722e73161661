"""What recomputing costs, in which order it is chosen, and the choice that `auto` makes."""

import re
from itertools import pairwise
from typing import Any

import pytest

from tests.documented import ROOT
from tests.models.predict.test_activation_memory import GPT, LLAMA, config_of, parts
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.rules.check import problems
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.models.predict.layer_terms import block_terms, per_token
from triaxis.models.predict.rank_memory import GB, predicted_memory, resolve_recompute
from triaxis.models.predict.recompute_choice import candidates, prices, worthwhile_parts


def llama_8b(*choices: str) -> Config:
    layout = ("parallel.tp=1", "parallel.dp=1", "parallel.sequence_parallel=false")
    return load_config(ROOT / "configs" / "llama3_8b.yaml", [*layout, *choices], {})


def auto(config: Config, memory_gb: float) -> Config:
    return with_value(config, "recompute", RecomputeConfig(granularity="auto", memory_gb=memory_gb))


def most(config: Config) -> float:
    """Predict what the fullest pipeline rank holds, in GB, without communicators, as the budget of `auto` counts."""
    sizes = parallel_sizes(config)
    return max(predicted_memory(config, sizes, pp).tensors for pp in range(sizes.pp)) / GB


def test_prices_of_a_layer_of_llama_3_8b() -> None:
    """By hand: h 4096, MLP 14336, 32 heads of 128, 8 of keys and values; 2 bytes per element. A rotation in place keeps nothing."""
    config = llama_8b()
    found = {price.part: price for price in prices(config, parallel_sizes(config))}
    assert found["norm"].saved == 2 * 2 * 4096 and found["norm"].per_byte == 2
    assert found["activation"].saved == 2 * 14336 and found["activation"].per_byte == 3
    # An H100: 795 TFLOP/s x 0.905 under constant load, and 3.35 TB/s x 0.9.
    gemm, of_a_byte = 2 * 4096 * 2 * 14336, 239
    assert found["mlp"].saved == 2 * 2 * 14336
    assert found["mlp"].per_byte == pytest.approx(((2 * (4096 + 2 * 14336)) + gemm / of_a_byte) / (4 * 14336))
    assert found["attention"].saved == 4 * 32, "the fused kernel keeps a number per head"
    assert list(found) == ["norm", "activation", "mlp", "attention"]
    # Not for a number per head: a whole layer gives bytes back for less.
    assert worthwhile_parts(config, parallel_sizes(config)) == ["norm", "activation", "mlp"]


def test_what_explicit_attention_keeps_is_worth_its_recomputation() -> None:
    config = config_of(GPT, tp=2, attention="explicit")
    assert "attention" in worthwhile_parts(config, parallel_sizes(config))


@pytest.mark.parametrize(
    "config",
    [
        config_of(LLAMA, tp=2, sp=True),
        config_of({**LLAMA, "qk_norm": True}, tp=2),
        config_of(GPT, tp=2, attention="explicit"),
        config_of(LLAMA, tp=1, attention="explicit", b=1),
        config_of({"position": "learned"}, tp=4, dtype="fp32"),
    ],
    ids=["llama, sp", "qk-norm", "the paper's block", "explicit", "fp32"],
)
def test_candidates_are_legal_and_each_keeps_less(config: Config) -> None:
    sizes = parallel_sizes(config)
    tried = [with_value(config, "recompute", choice) for choice in candidates(config, sizes)]
    assert all(problems(each, sizes.world_size) == [] for each in tried)
    assert tried[0].recompute == RecomputeConfig()
    assert tried[-1].recompute.num_layers == 2, "all layers of every chunk"
    layers = [per_token(block_terms(each, sizes)) for each in tried if each.recompute.granularity != "full"]
    assert all(less < more for more, less in pairwise(layers))
    # What a price says is saved is what the terms say.
    for price in prices(config, sizes):
        again = with_value(config, "recompute", RecomputeConfig.model_validate(parts(price.part)))
        inner = next(each.saved for each in prices(config, sizes) if each.part == "activation")
        expected = price.saved + (inner if price.part == "mlp" else 0)
        assert layers[0] - per_token(block_terms(again, sizes)) == expected, price.part


@pytest.mark.parametrize(
    ("memory_gb", "expected"),
    [(140, "none"), (130, "selective modules=[norm]"), (125, "selective modules=[activation, norm]")],
)
def test_auto_takes_the_first_that_fits(memory_gb: float, expected: str) -> None:
    config = auto(llama_8b("precision.masters=split", "precision.moments=bf16"), memory_gb)
    chosen = resolve_recompute(config, parallel_sizes(config))
    assert str(chosen.recompute) == expected
    assert most(config) == most(chosen) <= memory_gb
    assert config.recompute.granularity == "auto", "a config is data"


def test_whole_layers_are_the_last_resort() -> None:
    config = llama_8b("precision.masters=split", "precision.moments=bf16")
    chosen = resolve_recompute(auto(config, 105), parallel_sizes(config)).recompute
    assert (chosen.granularity, chosen.method) == ("full", "block") and 1 <= chosen.num_layers < 32
    fewer = chosen.model_copy(update={"num_layers": chosen.num_layers - 1})
    if fewer.num_layers:
        assert most(with_value(config, "recompute", fewer)) > 105
    assert problems(with_value(config, "recompute", chosen), 1) == []


def test_every_pipeline_rank_comes_to_the_same_choice() -> None:
    """The first rank keeps most microbatches; its choice is everybody's."""
    config = config_of(LLAMA, tp=2)
    config = with_value(with_value(config, "model.num_layers", 16), "train.global_batch_size", 32)
    sizes = parallel_sizes(config)
    totals = [predicted_memory(config, sizes, pp).tensors for pp in range(2)]
    assert totals[0] > totals[1]
    chosen = resolve_recompute(auto(config, (totals[1] + 1) / GB), sizes)
    assert chosen.recompute.granularity != "none"
    assert [predicted_memory(auto(config, (totals[1] + 1) / GB), sizes, pp) for pp in range(2)] == [
        predicted_memory(chosen, sizes, pp) for pp in range(2)
    ]


def test_what_cannot_fit_is_refused_with_the_predictions() -> None:
    config = auto(llama_8b(), 80)
    with pytest.raises(ConfigError) as refused:
        resolve_recompute(config, parallel_sizes(config))
    text = str(refused.value)
    assert "recompute.memory_gb = 80" in text and "181.8 GB with none" in text
    least = float(re.findall(r"([\d.]+) GB with full", text)[-1])
    assert 144.5 < least < 160
    assert "precision.masters=split" in text and "offload.num_layers" in text


@pytest.mark.parametrize("recompute", [{}, {"granularity": "selective"}, {"granularity": "full"}])
def test_a_choice_that_is_made_stays(recompute: dict[str, Any]) -> None:
    config = config_of(
        LLAMA, tp=2, recompute={**recompute, "gathered_inputs": "keep", "gathered_kv": "regather", "head_tokens": None}
    )
    assert resolve_recompute(config, parallel_sizes(config)) is config


# Gathered inputs --------------------------------------------------------------------------------------------------------


def gathered(choice: str, *, tp: int = 4, sp: bool = True, **recompute: Any) -> Config:
    return config_of(LLAMA, tp=tp, sp=sp, recompute={**recompute, "gathered_inputs": choice})


def chosen(config: Config) -> RecomputeConfig:
    return resolve_recompute(config, parallel_sizes(config)).recompute


def test_what_is_gathered_takes_its_bytes_in_every_layer() -> None:
    """2 w h (1 - 1/t) per token: the inputs of the qkv and up projections."""
    keep, again = (
        per_token(block_terms(gathered(name), parallel_sizes(gathered(name)))) for name in ("keep", "regather")
    )
    assert keep - again == 2 * 2 * 512 * 3 / 4


@pytest.mark.parametrize("granularity", ["none", "full", "auto"])
def test_gathered_inputs_are_kept_where_the_budget_holds_them(granularity: str) -> None:
    fixed = {"granularity": "none" if granularity == "auto" else granularity}
    keep, again = most(gathered("keep", **fixed)), most(gathered("regather", **fixed))
    assert again < keep
    asked = {"granularity": granularity}
    fixed |= {"gathered_kv": "regather", "head_tokens": None}
    assert chosen(gathered("auto", **asked, memory_gb=keep)) == RecomputeConfig(**fixed, gathered_inputs="keep")
    regather = RecomputeConfig(**fixed, gathered_inputs="regather")
    assert chosen(gathered("auto", **asked, memory_gb=keep - 1e-9)) == regather
    assert chosen(gathered("auto", **asked, memory_gb=again)) == regather


def test_gathered_keys_and_values_are_kept_where_the_budget_holds_them_before_gathered_inputs() -> None:
    """2 w g d s / (t c) per token of the row, less the own part; cp's links are slower than tp's."""

    def over_cp(**recompute: Any) -> Config:
        return config_of(LLAMA, tp=2, sp=True, cp=2, recompute=recompute)

    def kept(**recompute: Any) -> float:
        return most(over_cp(**{"gathered_inputs": "regather", "gathered_kv": "regather", **recompute}))

    both = {"gathered_inputs": "keep", "gathered_kv": "keep"}
    for budget, expected in (
        (kept(), ("regather", "regather")),
        (kept(gathered_kv="keep"), ("regather", "keep")),
        (kept(**both) - 1e-9, ("regather", "keep")),
        (kept(**both), ("keep", "keep")),
    ):
        found = chosen(over_cp(memory_gb=budget))
        assert (found.gathered_inputs, found.gathered_kv) == expected
    assert chosen(over_cp()).gathered_kv == "regather"


def test_recomputing_less_comes_before_keeping_what_was_gathered() -> None:
    """The granularity is the one without kept inputs, and with norms made again nobody keeps what they return."""
    budget = most(gathered("regather")) - 1e-9
    found = chosen(gathered("auto", granularity="auto", memory_gb=budget))
    assert found.parts == {"norm"} and found.gathered_inputs == "regather"
    roomy = gathered("auto", granularity="selective", modules=["norm", "rope"], memory_gb=100)
    assert chosen(roomy).gathered_inputs == "regather"
    assert chosen(with_value(roomy, "recompute.modules", ["rope"])).gathered_inputs == "keep"


def test_a_budget_that_holds_neither_is_refused() -> None:
    config = gathered("auto", memory_gb=most(gathered("regather")) - 1e-9)
    with pytest.raises(ConfigError, match=r"is predicted to hold more: .* GB with none"):
        chosen(config)


def test_without_a_budget_or_a_cut_sequence_inputs_are_gathered_as_before() -> None:
    assert chosen(gathered("auto")).gathered_inputs == "regather"
    for uncut in ({"sp": False}, {"tp": 1}):
        assert chosen(gathered("auto", **uncut, granularity="auto", memory_gb=100)).gathered_inputs == "regather"
        assert problems(gathered("auto", **uncut, memory_gb=100), None) != [], "the budget decides nothing"
        keep, again = (gathered(name, **uncut) for name in ("keep", "regather"))
        assert most(keep) == most(again)
    assert problems(gathered("auto", memory_gb=100), None) == []
    assert problems(gathered("keep", memory_gb=100), None) != []
