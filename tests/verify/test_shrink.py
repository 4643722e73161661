"""A shrunk configuration is legal, small, and keeps the relations between sizes from which layout bugs come."""

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.config import Config
from engine.config_rules import problems
from engine.pipeline.partition import partition
from engine.verify.shrink import shrink


@st.composite
def configs(draw: st.DrawFn) -> Config:
    tp, pp, vpp, dp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4, 8), (1, 2, 4), (1, 2, 3), (1, 2, 3)))
    vpp = vpp if pp > 1 else 1
    kv_heads = draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 8]))
    while heads % tp:
        heads *= 2
    stages = pp * vpp
    layers = draw(st.integers(stages, 4 * stages))
    layers_per_stage = None
    if draw(st.booleans()):
        layers_per_stage = [draw(st.integers(1, 9)) for _ in range(stages)]
        layers = sum(layers_per_stage)
    multiple = draw(st.sampled_from([8, 64, 128]))
    micro = draw(st.integers(1, 4))
    num_microbatches = pp * draw(st.integers(1, 9)) if vpp > 1 else draw(st.integers(1, 20))
    return Config.model_validate(
        {
            "model": {
                "num_layers": layers,
                "hidden_size": 64 * heads * draw(st.sampled_from([1, 2])),
                "num_attention_heads": heads,
                "num_kv_heads": kv_heads,
                "head_dim": 64,
                "ffn_hidden_size": 8 * draw(st.integers(1, 500)),
                "seq_length": 8 * draw(st.integers(1, 500)),
                "vocab_size": draw(st.integers(1000, 50000)),
                "vocab_multiple": multiple,
            },
            "data": {"synthetic": True},
            "train": {"steps": 1, "micro_batch_size": micro, "global_batch_size": num_microbatches * micro * dp},
            "parallel": {
                "tp": tp,
                "pp": pp,
                "vpp": vpp,
                "dp": dp,
                "sequence_parallel": tp > 1 and draw(st.booleans()),
                "layers_per_stage": layers_per_stage,
            },
            "recompute": {"head_tokens": draw(st.none() | st.integers(1, 20000))},
        }
    )


def shrunk(config: Config) -> Config:
    tree: dict[str, Any] = config.model_dump(mode="json")
    for section, values in shrink(config).items():
        tree[section] |= values
    return Config.model_validate(tree)


def relations(config: Config) -> dict[str, object]:
    model, parallel, train = config.model, config.parallel, config.train
    num_microbatches = train.global_batch_size // (train.micro_batch_size * (parallel.dp or 1))
    counts = [
        len(stage.layers) for stage in partition(model.num_layers, parallel.pp, parallel.vpp, parallel.layers_per_stage)
    ]
    head_tokens = config.recompute.head_tokens
    return {
        "logits of all tokens": head_tokens and head_tokens >= train.micro_batch_size * model.seq_length,
        "replicated heads": max(1, parallel.tp // model.kv_heads),
        "grouped": model.num_attention_heads > model.kv_heads,
        "square": model.hidden_size == model.num_attention_heads * model.head_size,
        "padded": model.padded_vocab_size > model.vocab_size,
        "order of stages": [[a < b, a == b] for a in counts for b in counts] if parallel.layers_per_stage else None,
        "uneven": len(set(counts)) > 1,
        "microbatches modulo stages": num_microbatches % parallel.pp,
        "fewer microbatches than stages": num_microbatches < parallel.pp,
        "several samples": train.micro_batch_size > 1,
    }


@settings(max_examples=300, deadline=None)
@given(configs())
def test_relations_are_kept_and_sizes_are_not(config: Config) -> None:
    assume(not problems(config))
    small = shrunk(config)
    assert problems(small) == []
    assert relations(small) == relations(config)
    model, sizes = small.model, small.parallel
    assert model.num_attention_heads <= 4 * max(sizes.tp, 4) and model.head_size == 8
    assert len(set(partition(model.num_layers, sizes.pp, sizes.vpp, sizes.layers_per_stage))) == sizes.pp * sizes.vpp
    assert model.vocab_size <= 40 * max(1, sizes.tp) and model.seq_length <= 2 * max(8, sizes.tp)
