"""A model with parts of the user's own: the same in every layout, and its loss the one that plain torch computes."""

from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks
from tests.models.gpt.own_parts import Smoothed, plain_smoothed
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes, rank_grid
from triaxis.engine.data.loader import Batches
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.errors import ConfigError, DataError, ModelError
from triaxis.engine.head.vocabulary import VocabularyLogits
from triaxis.engine.train import build
from triaxis.launch.rank.batches import open_batches
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.inference.generate import Decoder
from triaxis.models.interop.own_parts import refuse_own_parts
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.specs import block_specs, layer_specs, num_parameters

PARTS = Path(__file__).with_name("own_parts.py")
MODEL = [
    f"model.extension={PARTS}",
    *("data.synthetic=true", "data.train=[]", "model.num_layers=2", "model.hidden_size=16", "model.ffn_hidden_size=24"),
    *("model.seq_length=8", "model.vocab_size=21", "model.vocab_multiple=8", "train.global_batch_size=4"),
    *("train.micro_batch_size=2", "precision.dtype=float64", "parallel.dp=1"),
]
ONE = ["parallel.tp=1", "parallel.pp=1", "parallel.vpp=1", "parallel.sequence_parallel=false"]


def steps(
    rank: int, world: int, words: list[str], parts: Path = PARTS
) -> tuple[list[tuple[float, float, float]], dict[str, torch.Tensor]]:
    """Loss, norm and weight of two steps, and the whole gradients of the extension's parameters."""
    words = [f"model.extension={parts}", *MODEL[1:], *words]
    config = load_config("gpt_tiny", words, world_size=world, ranks_per_node=world)
    sizes, model = parallel_sizes(config, world), config.model
    grid = rank_grid(config, sizes, world)
    topology = Topology(grid, rank, torch.device("cpu"), kv_heads=model.kv_heads, has_experts=False)
    engine = build(resolve_recompute(config, sizes), topology, build_chunks)
    source = SyntheticDataset(1, model.vocab_size, model.seq_length, 0.3)
    batches = open_batches(config, topology, source)
    found = [engine.train_step(batches.next_step(), 1e-2) for _ in range(2)]
    batches.close()
    return [(one.loss, one.grad_norm, float(one.num_tokens)) for one in found], {
        name: parameter.weight().detach().clone() for name, parameter in engine.parameters.items()
    }


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((2, 2), marks=pytest.mark.slow)], ids=["cp", "tp cp sp"])
def test_another_kind_of_layer_is_the_same_with_parts_of_rows(sizes: tuple[int, int]) -> None:
    """Linear attention, whose ranks exchange states over cp."""
    (tp, cp), linear = sizes, PARTS.with_name("own_linear_attention.py")
    ((alone, whole),) = run_ranks(steps, 1, 1, ONE, linear)
    layout = [f"parallel.tp={tp}", *ONE[1:3], f"parallel.cp={cp}", f"parallel.sequence_parallel={tp > 1}".lower()]
    found = run_ranks(steps, tp * cp, tp * cp, layout, linear)
    assert all(one == found[0][0] for one, _ in found)
    torch.testing.assert_close(torch.tensor(found[0][0]), torch.tensor(alone), rtol=1e-12, atol=0)
    assert {name for name in whole if name.endswith(("gate.weight", "rate"))} < found[0][1].keys()


@pytest.mark.distributed
def test_every_part_is_the_same_in_a_layout() -> None:
    ((alone, whole),) = run_ranks(steps, 1, 1, ONE)
    layout = [*ONE[1:3], "parallel.tp=2", "parallel.sequence_parallel=true"]
    (one, first), (other, _) = run_ranks(steps, 2, 2, layout)
    assert one == other
    torch.testing.assert_close(torch.tensor(one), torch.tensor(alone), rtol=1e-12, atol=0)
    assert 0 < alone[0][2] < 1, "the weights of a whole batch may be less than one label"
    for name, held in first.items():
        if held.shape == whole[name].shape:
            torch.testing.assert_close(held, whole[name], rtol=1e-11, atol=1e-13)
    assert {name.rpartition(".")[2] for name in first} >= {"bias", "temperature", "inner_scale", "scale"}


def test_the_loss_is_that_of_whole_logits() -> None:
    config = load_config("gpt_tiny", [*MODEL, *ONE], world_size=1, ranks_per_node=1)
    ((lost, _),) = run_ranks(plain_loss, 1, [*MODEL, *ONE])
    assert lost < 1e-12 and config.model.own.loss is not None


def plain_loss(rank: int, words: list[str]) -> tuple[float, int]:
    config = load_config("gpt_tiny", words, world_size=1, ranks_per_node=1)
    sizes = parallel_sizes(config, 1)
    topology = Topology(rank_grid(config, sizes, 1), 0, torch.device("cpu"), kv_heads=4, has_experts=False)
    torch.manual_seed(0)
    z = torch.randn(3, 2, 24, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(21, (3, 2))
    ours = Smoothed.of_logits(None, VocabularyLogits.of(z, topology.axis("tp"), 21), labels)  # type: ignore[arg-type]
    theirs = plain_smoothed(z[..., :21], labels)
    (one,), (other,) = (torch.autograd.grad(each.sum(), z, retain_graph=True) for each in (ours, theirs))
    return float(max((ours - theirs).abs().max(), (one - other).abs().max())), 0


def refusal(rank: int) -> str:
    """What generation says of a model whose attention has no cache."""
    config = load_config("gpt_tiny", [f"model.extension={PARTS.with_name('uncached.py')}", *MODEL[1:], *ONE])
    sizes = parallel_sizes(config, 1)
    topology = Topology(rank_grid(config, sizes, 1), rank, torch.device("cpu"), kv_heads=4, has_experts=False)
    engine = build(resolve_recompute(config, sizes), topology, build_chunks)
    with pytest.raises(ModelError) as caught:
        Decoder(engine, 8)
    return str(caught.value)


@pytest.mark.distributed
def test_generation_names_an_attention_without_a_cache() -> None:
    (said,) = run_ranks(refusal, 1)
    assert "Uncached of model.extension keeps no keys and values" in said and "self.mixer = context.mixer" in said


WRONG = {
    'context.column("layers.0.mlp.down")': "has tp_dim=1 in its specs, and is the weight of a column-parallel layer",
    'context.row("layers.0.attention.q")': "has tp_dim=0 in its specs, and is the weight of a row-parallel layer",
    'context.parameter("layers.0.mlp.uq")': "asks for the parameter layers.0.mlp.uq, which no specs list",
}


def refusals(rank: int) -> dict[str, str]:
    config = load_config("gpt_tiny", [*MODEL[1:], *ONE])
    sizes, said = parallel_sizes(config, 1), {}
    topology = Topology(rank_grid(config, sizes, 1), rank, torch.device("cpu"), kv_heads=4, has_experts=False)
    context = build(resolve_recompute(config, sizes), topology, build_chunks).chunks[0].context  # type: ignore[attr-defined]
    assert context.row("layers.0.mlp.down").name == "layers.0.mlp.down"
    for call in WRONG:
        with pytest.raises(ModelError) as caught:
            eval(call, {"context": context})
        said[call] = str(caught.value)
    return said


@pytest.mark.distributed
def test_matrices_and_parameters_that_the_specs_do_not_have_are_named() -> None:
    (said,) = run_ranks(refusals, 1)
    assert not {call: text for call, text in said.items() if WRONG[call] not in text}


def test_lists_of_parameters_hold_the_parts() -> None:
    config = load_config("gpt_tiny", [*MODEL, *ONE])
    names = {spec.name for spec in layer_specs(config.model, 1)}
    assert {"layers.1.attention.temperature", "layers.1.mlp.scale", "layers.1.mlp.norm.bias"} <= names
    assert {f"layers.1.{spec.name}" for spec in block_specs(config.model, 1)} == names
    ours = load_config("gpt_tiny", [*MODEL[1:], *ONE])
    # Five norms have a bias in place of a weight; two layers have a temperature of 4 heads, scales of 24 and 16.
    assert num_parameters(config.model) == num_parameters(ours.model) + 2 * (4 + 24 + 16)


def test_no_other_software_has_the_parts() -> None:
    config = load_config("gpt_tiny", [*MODEL, *ONE])
    with pytest.raises(ConfigError, match="Tempered in place of our attention and Scaled in place of our mlp"):
        refuse_own_parts(config.model, "transformers")
    refuse_own_parts(load_config("gpt_tiny", [*MODEL[1:], *ONE]).model, "transformers")


def test_parts_may_drop_by_the_keys_that_they_get() -> None:
    with_parts, without = (load_config("gpt_tiny", [*words, *ONE]).model for words in (MODEL, ()))
    assert with_parts.may_drop and not without.may_drop


@pytest.mark.parametrize("weights", [torch.ones(2, 7), torch.full((2, 8), -1.0), torch.full((2, 8), float("nan"))])
def test_weights_that_divide_no_loss_are_refused(weights: torch.Tensor) -> None:
    batches = Batches(
        SyntheticDataset(1, 21, 8),
        global_batch_size=2,
        micro_batch_size=2,
        dp=1,
        dp_rank=0,
        consumed_samples=0,
        device="cpu",
        weigh=lambda tokens, labels, counted: weights,
    )
    with pytest.raises(DataError, match="the extension's loss weights"):
        batches.next_step()
    batches.close()
