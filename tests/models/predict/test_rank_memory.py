"""The memory of a rank from its configuration, against what its step holds.

The CI tier measures every other kind of thing that a step may do with its activations, in small models of tensors with values.
The slow tier has all of them, combinations, and the configurations of `test_activation_memory.py`, in footprints as users get them.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from tests.documented import ROOT
from tests.harness import run_ranks
from tests.models.predict.test_activation_memory import AHEAD, CI, GPT, KEPT, LLAMA, SLOW, config_of, ends_of_all, parts
from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.head_pieces import head_tokens
from triaxis.engine.config.quantities.plan import batch_plan, parallel_sizes
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Kind
from triaxis.engine.pipeline.lowering import Post, Program, lower
from triaxis.launch.footprint import run
from triaxis.launch.footprint.run import Footprint
from triaxis.models.predict.rank_memory import predict, predicted_memory


def deeper(config: Config, **sections: dict[str, Any]) -> Config:
    tree = config.model_dump()
    return Config.model_validate(tree | {name: tree[name] | fields for name, fields in sections.items()})


ON_HOST = {"num_layers": 1, "min_bytes": 1}
AGAIN = {"granularity": "full", "num_layers": 2}
HEAD_IN_PIECES = {"head_tokens": 100}
MANY = {
    "interleaved": deeper(
        config_of(LLAMA, tp=2),
        parallel={"vpp": 2, "dp": 2},
        train={"global_batch_size": 32},
    ),
    "an uneven group": deeper(
        config_of(LLAMA, tp=2, recompute=AGAIN), model={"num_layers": 6}, train={"global_batch_size": 8}
    ),
    "attention again": deeper(
        config_of(GPT, tp=2, attention="explicit", recompute={"granularity": "selective"}),
        train={"global_batch_size": 16},
    ),
    "parts again, layers on the host": deeper(
        config_of(LLAMA, tp=2, recompute=parts("norm", "rope", "activation", "mlp"), offload=ON_HOST),
        model={"num_layers": 8},
        parallel={"vpp": 2},
        train={"global_batch_size": 16},
    ),
    "all forwards first": deeper(config_of(LLAMA, tp=1), schedule={"name": "gpipe"}, train={"global_batch_size": 8}),
    "weight gradients that wait": deeper(
        config_of(LLAMA, tp=2, sp=True), schedule={"name": "zb_h1"}, train={"global_batch_size": 16}
    ),
    "weight gradients that wait, parts again": deeper(
        config_of(LLAMA, tp=2, recompute=parts("norm", "activation")),
        schedule={"name": "zb_h1"},
        model={"num_layers": 8},
        train={"global_batch_size": 12},
    ),
    "weight gradients that wait, in a V": deeper(
        config_of(LLAMA, tp=2, sp=True),
        schedule={"name": "zbv"},
        model={"num_layers": 8},
        parallel={"vpp": 2},
        train={"global_batch_size": 12},
    ),
    "the head in pieces, sgd averaged": deeper(
        config_of(LLAMA, tp=2, recompute=HEAD_IN_PIECES),
        train={"global_batch_size": 8},
        optimizer={"name": "sgd", "ema": {}},
    ),
    "gradients in slots": deeper(
        config_of(LLAMA, tp=2), parallel={"dp": 4, "zero": 2}, train={"global_batch_size": 32}
    ),
    "state in host memory": deeper(
        config_of(LLAMA, tp=2),
        parallel={"dp": 4, "zero": 2},
        train={"global_batch_size": 32},
        optimizer={"offload": "cpu", "bucket_bytes": 2000},
    ),
    "replicas of the state": deeper(
        config_of(LLAMA, tp=2), parallel={"dp": 4, "dp_replicas": 2, "zero": 3}, train={"global_batch_size": 32}
    ),
    "attention again, weights in slots": deeper(
        config_of(GPT, tp=2, recompute={"granularity": "selective"}),
        parallel={"dp": 4, "zero": 3},
        train={"global_batch_size": 32},
    ),
    "tokens ahead": deeper(
        config_of({**LLAMA, "mtp": {"num_layers": 2}}, tp=2, sp=True),
        schedule={"name": "zb_h1"},
        train={"global_batch_size": 12},
    ),
}


def narrow(config: Config) -> Config:
    """Half as wide."""
    h, f = config.model.hidden_size, config.model.ffn_hidden_size
    return deeper(config, model={"hidden_size": h // 2, "ffn_hidden_size": None if f is None else f // 2})


IN_CI = {name: narrow(config) for name, config in list(MANY.items())[::2]}
MANY_SLOW = {
    "fp16": deeper(
        config_of(LLAMA, tp=2, sp=True), train={"global_batch_size": 8}, precision={"dtype": "fp16", "loss_scale": {}}
    ),
    "groups of layers again": deeper(
        config_of(LLAMA, tp=2, recompute=AGAIN), model={"num_layers": 8}, train={"global_batch_size": 16}
    ),
    "large tensors on the host, all layers": deeper(
        config_of(LLAMA, tp=2, offload={"num_layers": 4, "min_bytes": 100_000}),
        model={"num_layers": 8},
        train={"global_batch_size": 12},
    ),
    "one layer whole, some on the host": deeper(
        config_of(
            LLAMA,
            tp=2,
            recompute={"granularity": "full", "method": "block", "num_layers": 1, "modules": ["norm"]},
            offload={"num_layers": 3, "min_bytes": 1},
        ),
        model={"num_layers": 8},
        train={"global_batch_size": 12},
    ),
    "gathered inputs kept": deeper(config_of(LLAMA, tp=4, sp=True, recompute=KEPT), train={"global_batch_size": 8}),
    "gathered inputs kept, layers again": deeper(
        config_of(LLAMA, tp=2, sp=True, recompute=AGAIN | KEPT),
        model={"num_layers": 8},
        train={"global_batch_size": 16},
    ),
    **{f"{name}, some steps": deeper(config, train={"global_batch_size": 12}) for name, config in AHEAD.items()},
}


def most_kept(config: Config, footprint: Footprint) -> tuple[int, int]:
    """What activations and logits came to at most, at least and at most: their own maxima need not be of the same moment."""
    activations, logits = (footprint.most.get(kind, 0) for kind in ("activations", "logits"))
    if logits and config.schedule.name == "gpipe":
        # A footprint runs one batch again and again, so the mask of microbatches in flight is counted once.
        mask_bytes = config.train.micro_batch_size * config.model.seq_length
        activations += (footprint.num_microbatches - 1) * mask_bytes
    # The backward needs more for a while, when the logits are gone: then the most is at one of two moments, or between.
    grows = config.recompute.granularity == "full" or "attention" in config.recompute.parts or config.offload.num_layers
    grows = grows or config.schedule.defers_weight_gradients
    most = activations + logits
    at_a_time = head_tokens(config)
    if at_a_time and logits:
        # Autograd never sees these logits, so the footprint has them among the temporaries.
        most += at_a_time * 2 * config.model.padded_vocab_size // config.parallel.tp
        return most, most
    return activations if grows else most, most


def ends_with_values(rank: int, configs: dict[str, Config]) -> dict[str, list[Footprint]]:
    """An operator on fake tensors takes longer than on small ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "FakeTensorMode", lambda **_: nullcontext())
        return ends_of_all(rank, configs)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("configs", "measure"),
    [
        pytest.param(IN_CI, ends_with_values, id="ci"),
        pytest.param(CI | SLOW | MANY | MANY_SLOW | AHEAD, ends_of_all, id="rest", marks=pytest.mark.slow),
    ],
)
def test_a_step_holds_what_was_predicted(configs: dict[str, Config], measure: Callable[..., Any]) -> None:
    (found,) = run_ranks(measure, 1, configs, timeout_seconds=600)
    for name, config in configs.items():
        for pp, footprint in enumerate(found[name]):
            memory = predicted_memory(config, parallel_sizes(config), pp)
            state = {"parameters": memory.parameters, "gradients": memory.gradients, "optimizer": memory.optimizer}
            assert state == footprint.state, f"{name}, pp {pp}"
            sent = footprint.most.get("p2p", 0)
            # Too few microbatches never fill the pipeline.
            is_full = batch_plan(config, config.parallel.dp or 1).num_microbatches >= 2 * config.parallel.pp
            assert sent == memory.messages if is_full else sent <= memory.messages, f"{name}, pp {pp}"
            least, most = most_kept(config, footprint)
            assert least <= memory.activations <= most, f"{name}, pp {pp}"


def most_messages(program: Program, pp: int) -> int:
    """Walk a pipeline rank's instructions; a send is gone at the next post, a receive when its gradient was used or, as an
    activation, belongs to the stage."""
    received: set[tuple[str, int, int]] = set()
    most = 0
    for instruction in program.instructions[pp]:
        if isinstance(instruction, Post):
            arriving = [each for each in instruction.transfers if each.destination == pp]
            received |= {(each.direction, each.stage, each.microbatch) for each in arriving}
            most = max(most, len(received) + len(instruction.transfers) - len(arriving))
        else:
            stage = program.schedule.placement.stage_of(pp, instruction.chunk)
            direction = "forward" if instruction.kind is Kind.F else "backward"
            received.discard((direction, stage, instruction.microbatch))
    return most


@pytest.mark.parametrize("pp", [2, 3, 5])
@pytest.mark.parametrize(("name", "vpp"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_messages_are_those_of_the_lowered_programs(name: str, vpp: int, pp: int) -> None:
    sizes = ParallelSizes(pp=pp, vpp=vpp, is_v=name == "zbv")
    config = deeper(
        config_of(LLAMA, tp=1),
        model={"num_layers": pp * vpp},
        parallel={"pp": pp, "vpp": vpp},
        schedule={"name": name},
        train={"global_batch_size": 2 * 2 * pp},
    )
    one = config.model.seq_length * config.train.micro_batch_size * config.model.hidden_size * 2
    program = lower(schedules.build(name, pp, vpp, 2 * pp))
    counted = [rank.messages / one for rank in predict(config, sizes).ranks]
    assert counted == [most_messages(program, index) for index in range(pp)]
    few = lower(schedules.build(name, pp, vpp, pp))
    assert all(most_messages(few, index) <= counted[index] for index in range(pp))


def buffers_of_a_step(rank: int, case: Case) -> tuple[int, int]:
    """Bytes in host buffers after a step, and what was predicted."""
    engine, batches = build_rank(rank, case)
    engine.train_step(batches.next_step(), 1e-3)
    batches.close()
    host = engine.chunks[0].saved.host
    assert host is not None
    held = host.pool.num_bytes
    topology = engine.topology
    return held, predicted_memory(engine.config, topology.sizes, topology.coordinates.pp).host


@pytest.mark.distributed
def test_host_memory_is_what_was_predicted() -> None:
    case = Case("llama", pp=2, vpp=2, offload=1, recompute=("selective", "uniform", 1), modules=("norm", "rope"))
    for held, predicted in run_ranks(buffers_of_a_step, 2, case):
        assert held == predicted > 0


ONE_CARD_BYTES = 141e9
ON_ONE_CARD = ("tp=1", "dp=1", "sequence_parallel=false")
NARROW = ("precision.masters=split", "precision.moments=bf16")


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ((), 181.8e9),
        (("model.seq_length=4096", *NARROW), 115.2e9),
        (NARROW, 133.6e9),
        ((*NARROW, "recompute.head_tokens=null"), 135.2e9),
        ((*NARROW, "recompute.granularity=full"), 99.6e9),
        ((*NARROW, "precision.gradients=bf16"), 117.5e9),
        ((*NARROW, "recompute={granularity: selective, modules: [norm, activation]}"), 121.8e9),
        ((*NARROW, "recompute={granularity: auto, memory_gb: 120}"), 106.7e9),
        ((*NARROW, "offload.num_layers=31"), 98.7e9),
    ],
    ids=[
        "as it is",
        "4096 tokens, narrow state",
        "narrow state",
        "the head whole",
        "recomputed",
        "gradients too",
        "cheap parts",
        "auto",
        "offload",
    ],
)
def test_an_8b_model_on_one_card(choices: tuple[str, ...], expected: float) -> None:
    """With narrow state weights, gradients and optimizer of 8.03e9 parameters are 12 bytes each, 96.4 GB."""
    layout = [f"parallel.{each}" for each in ON_ONE_CARD]
    config = load_config(ROOT / "configs" / "llama3_8b.yaml", [*layout, *choices], {})
    memory = predicted_memory(config, parallel_sizes(config), 0)
    assert memory.total == pytest.approx(expected, rel=1e-3)
    assert (memory.total < ONE_CARD_BYTES) == bool(choices)
    state = memory.total - memory.activations
    num_bytes = 10 if "precision.gradients=bf16" in choices else 12 if choices else 18
    assert state == pytest.approx(8.0303e9 * num_bytes, rel=1e-3)
