"""Our layouts against Megatron-Core's and Hugging Face's models: loss, every gradient, three updates; and differences are seen.

Bugs of our one process are planted in the oracle: a difference is the same from both sides. Bugs of layouts are those of
`planted.py`.
"""

from pathlib import Path

import pytest

from tests.lacking import need_package
from tests.verify import planted
from tests.verify.loader_bugs import (
    documents_end_one_token_late,
    each_sample_begins_one_token_early,
    the_last_label_of_a_row_is_its_first_token,
    the_last_label_of_a_row_is_not_counted,
)
from tests.verify.oracles import COMPARED, MODELS, ONLY_MEGATRON, ONLY_TRANSFORMERS, asked, verdicts
from triaxis.launch.verify.oracle import ORACLES

pytestmark = pytest.mark.distributed

TP2_PP2 = ("parallel.tp=2", "parallel.pp=2", "parallel.dp=1")
TP2_SP = ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.dp=1")
ONE = ("parallel.dp=1",)

CASES = [("megatron-core", name) for name in MODELS if name not in ONLY_TRANSFORMERS]
CASES += [("transformers", name) for name in MODELS if name not in ONLY_MEGATRON]


def needs(oracle: str) -> None:
    """Give up where the package is not installed."""
    need_package({"megatron-core": "megatron.core"}.get(oracle, oracle), f"pip install '{ORACLES[oracle][0]}'")


def assert_equal(
    references: Path, oracle: str, name: str, *, layout: tuple[str, ...] | None, dtype: str, num_layouts: int
) -> None:
    needs(oracle)
    found = verdicts(asked(oracle, name, layout=layout, dtype=dtype), references)
    assert len(found) == num_layouts
    for sizes, verdict in found.items():
        assert verdict.equal, f"{sizes}: {verdict.differences[:3]}"
        assert list(verdict.largest) == COMPARED, sizes
        assert verdict.largest["start"][0] == 0.0


@pytest.mark.parametrize("dtype", ["float64", pytest.param("fp32", marks=pytest.mark.slow)])
def test_gpt_in_tensor_and_pipeline_parallel_trains_as_in_megatron_core(dtype: str, references: Path) -> None:
    assert_equal(references, "megatron-core", "gpt2", layout=TP2_PP2, dtype=dtype, num_layouts=2)


def test_llama_with_sequence_parallelism_trains_as_in_transformers(references: Path) -> None:
    assert_equal(references, "transformers", "llama", layout=TP2_SP, dtype="float64", num_layouts=2)


@pytest.mark.slow
def test_experts_train_as_in_transformers(references: Path) -> None:
    assert_equal(references, "transformers", "mixtral", layout=TP2_SP, dtype="float64", num_layouts=2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "fp32"])
@pytest.mark.parametrize(("oracle", "name"), CASES, ids=[f"{oracle}-{name}" for oracle, name in CASES])
def test_every_family_in_every_way_of_cutting(oracle: str, name: str, dtype: str, references: Path) -> None:
    assert_equal(references, oracle, name, layout=None, dtype=dtype, num_layouts=4)


WITHIN = {"attention": "within"}
FROM_ZERO = {"attention": "within", "positions": "document", "count_document_starts": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("oracle", "name", "data"),
    [
        ("transformers", "llama", WITHIN),
        ("transformers", "gpt2", WITHIN),
        ("transformers", "gpt2", FROM_ZERO),
        ("transformers", "llama", {"positions": "document"}),
        ("megatron-core", "llama", FROM_ZERO),
        ("megatron-core", "gpt2", WITHIN),
    ],
)
def test_documents_are_the_oracles_own(oracle: str, name: str, data: dict[str, object], references: Path) -> None:
    needs(oracle)
    for sizes, verdict in verdicts(asked(oracle, name, layout=TP2_PP2, data=data), references).items():
        assert verdict.equal, f"{sizes}: {verdict.differences[:3]}"


@pytest.mark.slow
def test_a_document_that_ends_late_is_our_loaders(references: Path) -> None:
    needs("transformers")
    one = asked("transformers", "llama", layout=ONE, data=WITHIN)
    (verdict,) = verdicts(one, references, our_plant=documents_end_one_token_late).values()
    assert {one.what for one in verdict.differences} == {"samples"}
    assert verdict.largest["loss"][0] > 1e-6, "the samples differ and the loss does not"


# Differences -------------------------------------------------------------------------------------------------------------


def another_rope_base() -> None:
    """An export that loses a field: 5000 becomes the family's own default."""
    from triaxis.launch.verify.oracles import hugging_face

    plain = hugging_face.to_hugging_face

    def without_base(*args, **kwargs):
        keys, notes = plain(*args, **kwargs)
        return {name: value for name, value in keys.items() if name != "rope_theta"}, notes

    hugging_face.to_hugging_face = without_base


def a_gradient_twice() -> None:
    from triaxis.launch.verify.oracles.megatron_core import MegatronCore

    plain = MegatronCore.gradient
    MegatronCore.gradient = lambda self, name: plain(self, name) * (2 if name.endswith("1.mlp.linear_fc2.bias") else 1)


def no_clipping() -> None:
    from triaxis.launch.verify.oracles import megatron_core

    plain = megatron_core.distributed_optimizer
    megatron_core.distributed_optimizer = lambda gpt, config: plain(gpt, config.model_copy(update={"clip_grad": None}))


def decay_on_norms() -> None:
    import torch

    class Decaying(torch.optim.AdamW):
        def __init__(self, groups, **settings):
            super().__init__([group | {"weight_decay": 0.1} for group in groups], **settings)

    torch.optim.AdamW = Decaying


def query_heads_in_another_order() -> None:
    """Megatron-Core's rows of q, k and v, read as if all heads of q came first."""
    import torch

    from triaxis.launch.verify.oracles.megatron_core import MegatronPair

    plain = MegatronPair.to_theirs

    def by_kind(self, tensors):
        if len(tensors) == 2 and tensors[0].dim() == 3:
            return [torch.cat([one.flatten(0, -2) for one in tensors])]
        return plain(self, tensors)

    MegatronPair.to_theirs = by_kind


@pytest.mark.parametrize(
    ("oracle", "name", "plant", "what", "parameters", "factor"),
    [
        ("transformers", "llama", another_rope_base, "output", ["token_losses", "loss"], None),
        pytest.param(
            *("megatron-core", "gpt2", a_gradient_twice, "gradient", ["layers.1.mlp.down.bias"], 0.5),
            marks=pytest.mark.slow,
        ),
        pytest.param("megatron-core", "gpt2", no_clipping, "master", None, None, marks=pytest.mark.slow),
        pytest.param("transformers", "llama", decay_on_norms, "master", "norm", None, marks=pytest.mark.slow),
        pytest.param(
            "megatron-core", "llama", query_heads_in_another_order, "start", "attention", None, marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: (
        getattr(value, "__name__", None) if callable(value) else value if isinstance(value, str) else None
    ),
)
def test_a_difference_is_seen_and_named(oracle, name, plant, what, parameters, factor, references) -> None:
    needs(oracle)
    (verdict,) = verdicts(asked(oracle, name, layout=ONE), references, plant).values()
    assert not verdict.equal and verdict.cause is not None
    assert verdict.cause.axis is None and "no layout is to blame" in verdict.cause.text
    assert {one.what for one in verdict.differences} == {what}
    names = [one.name for one in verdict.differences]
    if isinstance(parameters, list):
        assert names == parameters
    elif parameters is not None:
        assert names and all(parameters in one for one in names)
    if factor is not None:
        assert verdict.differences[0].factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("plant", "what", "axis", "text"),
    [
        (planted.norm_gradients_are_not_summed_under_sequence_parallelism, "gradient", "tp", "not added over tp"),
        pytest.param(
            planted.rope_counts_from_each_shard,
            "output",
            None,
            "forward of the layout is wrong",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["norm gradients", "rope"],
)
def test_a_bug_of_the_layout_is_told_from_one_of_the_model(plant, what, axis, text, references) -> None:
    needs("transformers")
    one, layout = verdicts(asked("transformers", "llama", layout=TP2_SP), references, layout_plant=plant).values()
    assert one.equal and not layout.equal and layout.cause is not None
    assert {difference.what for difference in layout.differences} == {what}
    if what == "gradient":
        assert all("norm" in difference.name for difference in layout.differences)
    assert layout.cause.axis == axis and text in layout.cause.text


@pytest.mark.parametrize(
    "plant",
    [
        the_last_label_of_a_row_is_its_first_token,
        pytest.param(the_last_label_of_a_row_is_not_counted, marks=pytest.mark.slow),
        pytest.param(each_sample_begins_one_token_early, marks=pytest.mark.slow),
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_bug_of_our_loader_is_on_our_side_alone(plant, references) -> None:
    needs("transformers")
    (verdict,) = verdicts(asked("transformers", "llama", layout=ONE), references, our_plant=plant).values()
    assert {one.what for one in verdict.differences} == {"samples"}
    assert verdict.cause is not None and verdict.cause.axis is None and "our loader" in verdict.cause.text
    assert verdict.largest["loss"][0] > 1e-6, "the samples differ and the loss does not"
