"""The chosen layout is legal, it fits, no smaller model-parallel size does, and none of its size recomputes less."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.rules.check import problems
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.fp8 import Fp8Config
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.launch.tuning.choose_layout import (
    MARGIN,
    MOST_BUBBLE,
    TOKENS_OF_A_MICROBATCH,
    choose_layout,
    four_digits,
    legal_layouts,
    stage_without_recomputation,
)
from triaxis.launch.tuning.machine import Machine, written_machine
from triaxis.models.predict.communicators import communicator_bytes
from triaxis.models.predict.rank_memory import GB, predict, resolve_recompute
from triaxis.models.predict.recompute_choice import candidates

pytestmark = pytest.mark.distributed

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
WEIGHT = {"none": 0, "selective": 1, "full": 2}


@st.composite
def runs(draw: st.DrawFn) -> Config:
    """A GPT of many shapes, whose heads and layers divide by little or by much."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    kv_heads = draw(st.sampled_from([number for number in (1, 2, 3, 4, 6, 8) if heads % number == 0]))
    model = {
        "num_layers": draw(st.integers(1, 9)),
        "hidden_size": heads * draw(st.sampled_from([8, 32])),
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": draw(st.sampled_from([24, 96, 128])),
        "seq_length": draw(st.sampled_from([24, 256, 1024])),
        "vocab_size": draw(st.sampled_from([257, 5000])),
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": "none",
    }
    train = {"steps": 10, "global_batch_size": draw(st.integers(1, 100))}
    data = {"train": "corpus"}
    return Config.model_validate({"model": model, "train": train, "data": data})


@st.composite
def machines(draw: st.DrawFn, config: Config) -> Machine:
    """A machine of one node or several, which has at most twice the memory that the run needs on one rank."""
    num_nodes, per_node = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (1, 6), (1, 8), (2, 8), (3, 4)]))
    alone = config.model_copy(update={"parallel": config.parallel.model_copy(update={"dp": 1})})
    most = predict(alone, parallel_sizes(alone), nccl=False).fullest.total
    is_gpu = draw(st.booleans())
    communicators = draw(st.sampled_from([0, 200 * 10**6, 900 * 10**6])) if is_gpu else 0
    return Machine(num_nodes, per_node, int(most * draw(st.floats(0.1, 2.0))) + communicators, is_gpu, "a machine")


def layouts(config: Config, machine: Machine) -> dict[int, list[Config]]:
    """Every legal layout by its model-parallel size, tp a divisor of a node's ranks."""
    found: dict[int, list[Config]] = {}
    for tp in (tp for tp in range(1, 9) if machine.ranks_per_node % tp == 0):
        for pp in (pp for pp in range(1, machine.num_ranks + 1) if machine.num_ranks % (tp * pp) == 0):
            dp = machine.num_ranks // (tp * pp)
            batch = max(pp, four_digits(config.train.global_batch_size / dp)) * dp
            for cut in (True, False) if tp > 1 else (False,):
                tree = config.model_dump()
                tree["parallel"] |= {"tp": tp, "pp": pp, "dp": dp, "sequence_parallel": cut}
                tree["train"]["global_batch_size"] = batch
                trial = Config.model_validate(tree)
                if not problems(trial, machine.num_ranks, machine.ranks_per_node):
                    found.setdefault(tp * pp, []).append(trial)
                    break
    return found


def lightest(trial: Config, machine: Machine) -> str | None:
    """The least recomputation with which every rank fits, a megabyte left over; None where nothing is enough."""
    sizes = parallel_sizes(trial)
    connections = max(communicator_bytes(sizes, trial.model.kv_heads)) if machine.is_gpu else 0
    for choice in candidates(trial, sizes):
        ranks = predict(trial.model_copy(update={"recompute": choice}), sizes, nccl=False).ranks
        if max(rank.total for rank in ranks) + connections <= machine.memory_bytes * (1 - MARGIN) - 10**6:
            return str(choice.granularity)
    return None


@settings(max_examples=15)
@given(st.data())
def test_a_layout_is_legal_and_fits_and_is_the_smallest_that_does(data: st.DataObject) -> None:
    config = data.draw(runs())
    machine = data.draw(machines(config))
    by_size = layouts(config, machine)
    try:
        chosen = choose_layout(config, machine)
    except ConfigError as error:
        assert "memory = " in str(error) and "It lacks" in str(error)
        assert not any(lightest(trial, machine) for trials in by_size.values() for trial in trials)
        return
    final, sizes = chosen.config, chosen.sizes
    assert problems(final, machine.num_ranks, machine.ranks_per_node) == []
    assert sizes == parallel_sizes(final) and sizes.world_size == machine.num_ranks
    resolved = resolve_recompute(final, sizes)
    assert resolved.recompute == chosen.recompute
    held = predict(resolved, sizes, nccl=machine.is_gpu)
    assert held == chosen.prediction and held.fullest.total <= machine.memory_bytes * (1 - MARGIN)
    budget_gb = final.recompute.memory_gb
    assert budget_gb is not None
    assert budget_gb * GB + held.fullest.communicators <= machine.memory_bytes * (1 - MARGIN) + 1
    one_sample = with_value(final, "train.micro_batch_size", 1)
    of_one, of_all = (
        choice.model_copy(update={"head_tokens": None})
        for choice in (resolve_recompute(one_sample, sizes).recompute, chosen.recompute)
    )
    assert of_one == of_all, "larger microbatches recompute more; only the head's pieces follow from their size"
    size = sizes.tp * sizes.pp
    assert not any(lightest(trial, machine) for small in by_size if small < size for trial in by_size[small])
    # `lightest` leaves a megabyte over, so it may recompute more than the chosen layout, never less.
    same = [kind for trial in by_size[size] if (kind := lightest(trial, machine)) is not None]
    assert all(WEIGHT[chosen.recompute.granularity] <= WEIGHT[kind] for kind in same)
    micro = final.train.micro_batch_size
    assert micro == 1 or micro * final.model.seq_length <= TOKENS_OF_A_MICROBATCH
    num_microbatches = final.train.global_batch_size // (micro * sizes.dp)
    assert num_microbatches >= sizes.pp and (micro == 1 or sizes.pp - 1 <= MOST_BUBBLE * num_microbatches)
    found = stage_without_recomputation(chosen, machine)
    if size == 1 and chosen.recompute.granularity == "none":
        assert found is None
        return
    (alone,) = by_size[1]
    stages = {zero: with_value(alone, "parallel.zero", zero) for zero in (2, 3)}
    each = {zero: predict(trial, parallel_sizes(trial), nccl=machine.is_gpu) for zero, trial in stages.items()}
    fitting = [(zero, one.fullest) for zero, one in each.items() if one.fullest.total <= chosen.usable_bytes]
    assert found == next(iter(fitting), None)


def run(name: str) -> Config:
    """A shipped config in no layout."""
    sizes = ("parallel.tp=1", "parallel.pp=1", "parallel.vpp=1", "parallel.ep=1", "parallel.sequence_parallel=false")
    return load_config(CONFIGS / f"{name}.yaml", [*sizes, "train.micro_batch_size=1"], {})


@pytest.mark.parametrize(
    ("name", "machine", "layout", "recompute"),
    [
        ("gpt_125m", "8x80GB", "tp=1 pp=1 vpp=1 dp=8", "none"),
        ("llama3_8b", "8x141GB", "tp=1 pp=1 vpp=1 dp=8", "none"),
        ("llama3_8b", "64x80GB", "tp=1 pp=1 vpp=1 dp=64", "selective"),
        ("llama3_70b", "64x40GB", "tp=8 pp=4 vpp=1 dp=2", "full"),
        ("olmoe_1b_7b", "8x80GB", "tp=1 pp=1 vpp=1 dp=8", "none"),
        ("qwen3_30b_a3b", "16x80GB", "tp=1 pp=1 vpp=1 dp=16 ep=8", "selective"),
        pytest.param("qwen3_30b_a3b", "8x80GB", "tp=4 pp=1 vpp=1 dp=2 ep=8", "full", marks=pytest.mark.slow),
        ("mixtral_8x7b", "16x80GB", "tp=1 pp=2 vpp=1 dp=8 ep=8", "selective"),
    ],
)
def test_the_layouts_of_known_models(name: str, machine: str, layout: str, recompute: str) -> None:
    chosen = choose_layout(run(name), written_machine(machine))
    assert (str(chosen.sizes), chosen.recompute.granularity) == (layout, recompute)
    assert chosen.config.parallel.sequence_parallel == (chosen.sizes.tp > 1)
    assert chosen.config.kernels.dispatch == ("all_to_all" if chosen.sizes.ep > 1 else "auto")


@pytest.mark.slow
def test_experts_without_a_layout_are_refused_with_the_nearest_and_how_many_gpus_are_enough() -> None:
    with pytest.raises(ConfigError) as error:
        choose_layout(run("qwen3_30b_a3b"), written_machine("8x64GB"))
    text = str(error.value)
    assert "of the nearest layout, tp=8 pp=1 vpp=1 dp=1 ep=8" in text and "at most 57.6 GB" in text
    assert "--gpus 16x64GB" in text
    chosen = choose_layout(run("qwen3_30b_a3b"), written_machine("16x64GB"))
    assert chosen.sizes.ep > 1 and chosen.prediction.fullest.total <= chosen.usable_bytes


@pytest.mark.parametrize(
    ("name", "machine", "stage"),
    [
        ("llama3_8b", "8x80GB", 3),
        ("llama3_8b", "16x80GB", 2),
        ("llama3_8b", "8x141GB", None),
        ("llama3_8b", "8x40GB", None),
        ("qwen3_30b_a3b", "16x80GB", None),
    ],
)
def test_the_stage_that_would_spare_recomputation_is_named(name: str, machine: str, stage: int | None) -> None:
    """Not where nothing is recomputed, where no stage is enough, or for experts, which stages gather whole."""
    on = written_machine(machine)
    found = stage_without_recomputation(choose_layout(run(name), on), on)
    assert (found and found[0]) == stage


def test_fp8_is_gathered_where_a_layout_has_sequence_parallelism() -> None:
    config = with_value(run("llama3_8b"), "precision.fp8", Fp8Config(gather="fp8"))
    machine = written_machine("8x80GB")
    found = {
        (trial.parallel.tp > 1, trial.precision.fp8.gather)
        for trial in legal_layouts(config, machine)
        if trial.precision.fp8 is not None
    }
    assert found == {(False, "bf16"), (True, "fp8")}


def test_short_samples_share_a_microbatch() -> None:
    chosen = choose_layout(run("gpt_125m"), written_machine("8x80GB"))
    assert (chosen.config.model.seq_length, chosen.config.train.micro_batch_size) == (2048, 4)
    assert choose_layout(run("llama3_8b"), written_machine("8x141GB")).config.train.micro_batch_size == 1


def test_microbatches_do_not_grow_at_the_price_of_recomputation() -> None:
    sizes = {gb: choose_layout(run("gpt_125m"), written_machine(f"8x{gb}GB")) for gb in ("2.5", "3.5", "5")}
    assert [chosen.recompute.granularity for chosen in sizes.values()] == ["none"] * 3
    assert [chosen.config.train.micro_batch_size for chosen in sizes.values()] == [1, 2, 4]


@given(st.floats(0, 10**6))
def test_a_batch_of_four_binary_digits_is_near_and_divides(number: float) -> None:
    rounded = four_digits(number)
    assert abs(rounded - number) <= max(0.5, number / 16)
    assert rounded < 16 or rounded % 2 ** (rounded.bit_length() - 5) == 0


def test_a_model_without_a_layout_is_refused_with_the_nearest_and_how_many_gpus_are_enough() -> None:
    with pytest.raises(ConfigError) as error:
        choose_layout(run("llama3_70b"), written_machine("8x80GB"))
    text = str(error.value)
    assert "tp=8 pp=1 vpp=1 dp=1" in text and "at most 72.0 GB" in text
    assert "--gpus 32x80GB" in text
    choose_layout(run("llama3_70b"), written_machine("32x80GB"))
    with pytest.raises(ConfigError):
        choose_layout(run("llama3_70b"), written_machine("16x80GB"))


def test_a_config_that_no_layout_mends_is_refused_with_all_its_problems() -> None:
    broken = run("gpt_125m").model_copy(deep=True)
    optimizer = broken.optimizer.model_copy(update={"min_lr": 3.0, "bucket_bytes": 1})
    with pytest.raises(ConfigError) as error:
        choose_layout(broken.model_copy(update={"optimizer": optimizer}), written_machine("8x80GB"))
    assert {text.partition(" =")[0] for text in error.value.problems} == {"optimizer.min_lr", "optimizer.bucket_bytes"}


def test_memory_is_that_of_a_gpu_with_a_tenth_left_free() -> None:
    chosen = choose_layout(run("llama3_8b"), written_machine("8x80GB"))
    assert chosen.usable_bytes == 72 * GB
    budget_gb, communicators = chosen.config.recompute.memory_gb, chosen.prediction.fullest.communicators
    assert budget_gb is not None and communicators > 0
    assert 72 * GB - 10**6 < budget_gb * GB + communicators <= 72 * GB, "what is recomputed leaves room for NCCL"
