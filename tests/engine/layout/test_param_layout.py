"""The layout of the flat buffers: every parameter once, equal parts, nothing owned twice, the same on every replica."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.layout.param_layout import layout_parameters
from triaxis.engine.layout.shard_spec import ParamRecord, localize
from triaxis.models.specs import model_specs


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    heads = draw(st.sampled_from([4, 8]))
    return ModelConfig(
        num_layers=draw(st.integers(1, 4)),
        hidden_size=heads * draw(st.sampled_from([2, 4])),
        num_attention_heads=heads,
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
        ffn_hidden_size=draw(st.sampled_from([8, 24])),
        seq_length=draw(st.integers(2, 9)),
        vocab_size=draw(st.integers(5, 70)),
        vocab_multiple=8,
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        activation=draw(st.sampled_from(["gelu", "swiglu"])),
        position=draw(st.sampled_from(["learned", "rope"])),
        bias=draw(st.sampled_from(["all", "qkv", "none"])),
        qk_norm=draw(st.sampled_from([False, True, "all_heads"])),
        tie_embeddings=draw(st.booleans()),
    )


def records_of(model: ModelConfig, tp: int, tp_index: int, sequence_parallel: bool) -> list[ParamRecord]:
    return [
        localize(spec, tp=tp, tp_index=tp_index, sequence_parallel=sequence_parallel) for spec in model_specs(model)
    ]


@settings(max_examples=100, deadline=None)
@given(models(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3, 4]), st.integers(1, 4000), st.booleans())
def test_every_element_has_one_owner(
    model: ModelConfig, tp: int, dp: int, bucket_numel: int, sequence_parallel: bool
) -> None:
    records = records_of(model, tp, 0, sequence_parallel)
    layouts = layout_parameters(records, dp=dp, bucket_numel=bucket_numel)
    placed = [entry.record.name for layout in layouts for bucket in layout.buckets for entry in bucket.entries]
    assert sorted(placed) == sorted(record.name for record in records)
    owned = dict.fromkeys((record.name for record in records), 0)
    for layout in layouts:
        assert layout.buckets[0].start == 0
        assert layout.buckets[-1].stop == layout.numel
        for first, second in zip(layout.buckets, layout.buckets[1:], strict=False):
            assert first.stop == second.start
        for bucket in layout.buckets:
            assert (bucket.stop - bucket.start) % (64 * dp) == 0
            assert 0 <= bucket.stop - bucket.entries[-1].stop < 64 * dp
            parts = [bucket.owned(dp, index) for index in range(dp)]
            assert [part[0] for part in parts[1:]] == [part[1] for part in parts[:-1]]
        for index in range(dp):
            for segment in layout.segments(dp, index):
                owned[segment.record.name] += segment.stop - segment.start
    assert owned == {record.name: record.box_numel for record in records}


@settings(max_examples=50, deadline=None)
@given(models(), st.sampled_from([2, 4, 8]), st.integers(1, 4000), st.booleans())
def test_tensor_parallel_ranks_cut_alike(
    model: ModelConfig, tp: int, bucket_numel: int, sequence_parallel: bool
) -> None:
    """Second sums add the owned parts of replicas: their places must be the same on every tp rank."""
    places = []
    for index in range(tp):
        layouts = layout_parameters(records_of(model, tp, index, sequence_parallel), dp=2, bucket_numel=bucket_numel)
        places.append(
            [
                (layout.key, bucket.start, bucket.stop, entry.record.name, entry.start)
                for layout in layouts
                for bucket in layout.buckets
                for entry in bucket.entries
            ]
        )
    assert all(place == places[0] for place in places)


def test_the_backward_finishes_buckets_in_order_and_shared_gemms_are_adjacent() -> None:
    model = ModelConfig(
        num_layers=2, hidden_size=8, num_attention_heads=4, seq_length=4, vocab_size=16, vocab_multiple=8, bias="qkv"
    )
    layouts = layout_parameters(records_of(model, 2, 0, False), dp=2, bucket_numel=1)
    sharded = next(layout for layout in layouts if str(layout.key) == "sharded")
    names = [entry.record.name for bucket in sharded.buckets for entry in bucket.entries]
    assert names.index("layers.1.mlp.down.weight") < names.index("layers.0.mlp.down.weight")
    for bucket in sharded.buckets:
        for first, second in zip(bucket.entries, bucket.entries[1:], strict=False):
            assert second.record.spec.fused_with_previous
            assert first.stop == second.start
    assert any(len(bucket.entries) == 2 for bucket in sharded.buckets)


@pytest.mark.parametrize(
    ("tied", "dp", "frozen", "is_cut"),
    [(False, 4, False, True), (False, 2, False, False), (True, 4, False, False), (False, 4, True, False)],
)
def test_ends_are_cut_where_one_slot_and_the_owned_parts_are_less_than_both(
    tied: bool, dp: int, frozen: bool, is_cut: bool
) -> None:
    model = ModelConfig(
        num_layers=2, hidden_size=8, num_attention_heads=4, seq_length=4, vocab_size=16, tie_embeddings=tied
    )
    records = records_of(model, 1, 0, False)
    if frozen:
        records[0] = replace(records[0], is_frozen=True)
    layouts = layout_parameters(records, dp=dp, bucket_numel=10**6, zero=3)
    cut = {entry.record.name: layout for layout in layouts for bucket in layout.buckets for entry in bucket.entries}
    ends = cut["embedding.word.weight"]
    assert (ends.key.cut == "parameters") == is_cut
    if is_cut:
        assert [bucket.entries[0].record.name for bucket in ends.buckets] == ["head.weight", "embedding.word.weight"]
        (slot,) = ends.slot_numels()
        assert slot + ends.numel // dp < ends.numel, "fewer elements on a rank than both ends"
