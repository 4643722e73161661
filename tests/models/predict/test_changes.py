"""Changes that save memory are legal, save what they say, and fit where they are asked to."""

import pytest

from tests.models.predict.test_activation_memory import GPT, LLAMA, config_of
from tests.models.predict.test_fit import CONFIGS, ONE_NODE, llama, refused
from tests.models.predict.test_rank_memory import deeper
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.rules.check import problems
from triaxis.engine.config.rules.problem import Subject
from triaxis.engine.config.schema.dotted import with_value
from triaxis.models.predict.changes import Proposal, fitting_changes, savings
from triaxis.models.predict.fit import Devices, memory_rule
from triaxis.models.predict.rank_memory import GB, predict, predicted_memory, resolve_recompute


def first_key(proposal: Proposal) -> str:
    """The changed field that saves the memory; the others are adjusted to it."""
    return proposal.changes[0][0]


def test_savings_are_legal_and_save_what_they_say() -> None:
    config = deeper(
        config_of(LLAMA, tp=2, attention="explicit"),
        model={"num_layers": 8},
        parallel={"dp": 4},
        train={"global_batch_size": 32},
        offload={"min_bytes": 1},
    )
    sizes = parallel_sizes(config)
    found = list(savings(config, 0, nccl=False))
    assert [first_key(saving) for saving in found[:11]] == [
        "kernels.attention",
        "precision.masters",
        "recompute",
        "recompute",
        "parallel.sequence_parallel",
        "parallel.zero",
        "parallel.zero",
        "offload.num_layers",
        "offload.num_layers",
        "train.micro_batch_size",
        "recompute",
    ]
    assert str(found[2]) == "'recompute={granularity: selective, modules: [activation, norm]}'"
    assert str(found[3]) == "'recompute={granularity: selective, modules: [activation, attention, mlp, norm]}'"
    assert str(found[4]) == "parallel.sequence_parallel=true"
    nearest = ["parallel.tp=4 parallel.dp=2", "parallel.pp=4 parallel.dp=2", "parallel.cp=2 parallel.dp=2"]
    assert [str(saving) for saving in found[11:17:2]] == nearest, "with the same number of ranks"
    cut = [f"{saving} parallel.sequence_parallel=true" for saving in found[11::2]]
    assert [str(saving) for saving in found[12::2]] == cut
    for saving in found:
        assert saving.memory.ranks[0].total < predicted_memory(config, sizes, 0, nccl=False).total
        changed = config
        for key, value in saving.changes:
            changed = with_value(changed, key, value)
        assert problems(changed, 16) == []
        predicted = predict(changed, parallel_sizes(changed), nccl=False)
        assert (predicted.ranks[0].total, predicted.fullest.total) == (
            saving.memory.ranks[0].total,
            saving.memory.fullest.total,
        )


def test_savings_that_would_not_fit_a_device_are_left_out() -> None:
    config = deeper(config_of(LLAMA, tp=1), parallel={"dp": 4}, train={"global_batch_size": 32})
    found = list(savings(config, 1, nccl=False))
    most = sorted(saving.memory.fullest.total for saving in found)[len(found) // 2]
    kept = [saving for saving in found if saving.memory.fullest.total <= most]
    assert 0 < len(kept) < len(found)
    assert list(savings(config, 1, nccl=False, most_bytes=most)) == kept


def test_a_head_in_pieces_is_offered_where_the_head_is_and_stays_what_it_was() -> None:
    config = deeper(config_of(LLAMA, tp=2), model={"seq_length": 8192}, recompute={"head_tokens": None})
    assert [first_key(saving) for saving in savings(config, 0)].count("recompute.head_tokens") == 0
    (offered,) = [saving for saving in savings(config, 1) if first_key(saving) == "recompute.head_tokens"]
    assert str(offered) == "recompute.head_tokens=2048"
    pieces = deeper(config, recompute={"head_tokens": 100})
    others = [saving for saving in savings(pieces, 1) if first_key(saving) == "recompute"]
    assert others and all("head_tokens: 100" in str(saving) for saving in others)
    auto = deeper(pieces, recompute={"granularity": "auto", "memory_gb": 1000.0})
    assert (
        resolve_recompute(auto, parallel_sizes(auto)).recompute
        == resolve_recompute(pieces, parallel_sizes(pieces)).recompute
    )


def test_gathering_again_is_offered_where_gathered_inputs_are_kept() -> None:
    config = config_of(LLAMA, tp=4, sp=True, recompute={"gathered_inputs": "keep"})
    offered = next(savings(config, 0))
    assert str(offered) == "recompute.gathered_inputs=regather"
    regather = with_value(config, "recompute.gathered_inputs", "regather")
    assert offered.memory.ranks[0].total == predicted_memory(regather, parallel_sizes(config), 0).total
    again = [saving for saving in savings(config, 0) if first_key(saving) == "recompute"]
    assert again and all("gathered_inputs: keep" in str(saving) and "norm" not in str(saving) for saving in again)
    for other in (regather, config_of(LLAMA, tp=4, recompute={"gathered_inputs": "keep"})):
        assert all(first_key(saving) != "recompute.gathered_inputs" for saving in savings(other, 0))


def test_what_is_not_legal_is_not_offered() -> None:
    dropout = config_of(GPT, tp=8, attention="explicit")
    keys = [first_key(saving) for saving in savings(dropout, 0)]
    assert "kernels.attention" not in keys, "the fused kernel has no such dropout"
    assert "parallel.tp" not in keys, "there are 8 heads"
    assert "parallel.pp" not in keys, "no dp is left to give"


@pytest.mark.parametrize(
    ("name", "overrides", "gigabytes"),
    [
        ("llama3_8b", ONE_NODE, 80),
        ("gpt_175b", ("parallel.pp=16", "parallel.dp=8", "parallel.vpp=1"), 18),
    ],
)
def test_proposals_are_legal_and_fit(name: str, overrides: tuple[str, ...], gigabytes: float) -> None:
    config, most = load_config(CONFIGS / f"{name}.yaml", overrides, {}), int(gigabytes * GB)
    sizes = parallel_sizes(config)
    rule = memory_rule(Devices(most))
    assert problems(config, sizes.world_size, 8, [rule])
    found = list(fitting_changes(Subject(config, sizes.world_size, 8), most, nccl=True))
    assert found
    for fitting in found:
        changed = config
        for key, value in fitting.changes:
            changed = with_value(changed, key, value)
        assert problems(changed, sizes.world_size, 8, [rule]) == [], str(fitting)
        assert predict(changed, parallel_sizes(changed)).fullest.total == fitting.memory.fullest.total <= most


def test_changes_are_put_together_where_one_is_not_enough_and_none_is_made_up() -> None:
    overrides = (*ONE_NODE, "train.micro_batch_size=4", "train.global_batch_size=32")
    config = llama(*overrides)
    (found,) = fitting_changes(Subject(config, 8, 8), 40 * GB, nccl=True)
    assert len(found.changes) > 1 and found.memory.fullest.total <= 40 * GB
    (text,) = refused(*overrides, gigabytes=1)
    assert "No legal layout of these ranks fits" in text


def test_a_run_with_context_parallelism_or_experts_is_answered_with_larger_layouts_too() -> None:
    long = load_config(CONFIGS / "llama3_8b_128k.yaml", ["parallel.dp=8"], {})
    subject = Subject(long, parallel_sizes(long).world_size, 8)
    assert long.parallel.cp > 1 and any(
        first_key(one) == "parallel.tp" for one in fitting_changes(subject, 50 * GB, nccl=True)
    )
    experts = load_config(CONFIGS / "moe_tiny.yaml", ["parallel.ep=1"], {})
    assert "parallel.ep=2" in [str(one) for one in savings(experts, 0)]
