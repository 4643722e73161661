"""Count the bytes that a microbatch keeps on a rank for its backward, from the configuration alone.

The formula follows section 4 of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
(2205.05198), term by term, with what these kernels keep. The paper's block has 16 bits per element, 1 byte per dropout mask, MLP
width 4 h for hidden size h, and heads x head size = h. With these sizes the terms add up to the paper's equations, in bytes per
token (b samples of s tokens on c context-parallel ranks have s b / c tokens; a heads, t tensor-parallel ranks):

    one rank (equation 1)                34 h + 5 a s
    tensor parallel (equation 2)         (10 + 24/t) h + 5 a s / t
    and sequence parallel (equation 4)   (34 h + 5 a s) / t

Differences from the paper:

    dropout            the mask as a factor in the run's dtype, w h instead of h; nothing where p is 0
    fused attention    no scores (5 a s is gone), but the logarithm of each row's sum
    "explicit"         softmax in the accumulation dtype; the causal mask, one for all heads and samples
    RMSNorm            its input and one number per token
    recomputation      selective: not the chosen parts (`models/predict/recompute_choice.py`); full: only each layer group's input
    gathered inputs    column-parallel layers keep them whole (`recompute.gathered_inputs`): w h instead of w h / t
    gathered k and v   all cp ranks' keys and values, kept whole (`recompute.gathered_kv`)
    ulysses            q, k and v a second time, for some heads and all tokens, and attention's output once more
    FP8                inputs of products in 1 byte per element (`models/predict/fp8_terms.py`)
    head_tokens        the gradient of the head's input in place of input, sums and logits; while the head runs, some tokens' logits
    experts            `models/predict/experts/memory.py`, given the rank's expert load
    MTP layers         `models/predict/mtp_terms.py`, and the embedding's and head's tensors once more for each
    offload            a chunk's first layers keep only small tensors, or tensors that are held elsewhere

Each term is one tensor with its own storage, because offloading selects tensors by their bytes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from triaxis.engine.config.quantities.context_parallel import gathers_keys
from triaxis.engine.config.quantities.head_pieces import head_tokens
from triaxis.engine.config.quantities.layer_products import Product, layer_products
from triaxis.engine.config.schema.layer_kinds import LayerKind, Rotary
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.experts.memory import BACKWARD as MLP_BACKWARD
from triaxis.models.predict.experts.memory import BALANCED, choice_terms, deferred_expert_terms, remembered_counts
from triaxis.models.predict.fp8_terms import is_in_fp8, kept_in_fp8, remembered_terms, sends_fp8
from triaxis.models.predict.latent_terms import BEHIND_LATENTS
from triaxis.models.predict.layer_terms import (
    all_terms,
    attention_part,
    block_terms,
    layer_sort,
    norm_terms,
    per_token,
)
from triaxis.models.predict.mtp_terms import BEHIND_PROJECTION, INPUTS, embedding_terms, joining_terms
from triaxis.models.predict.terms import (
    BYTES_PER_ELEMENT,
    INDEX_BYTES,
    Sizes,
    Term,
    column_input,
    keeps_gathered,
    tokens_of_microbatch,
)
from triaxis.models.specs import StageContents

LOSS_MASK = "mask"


def end_terms(config: Config, sizes: ParallelSizes, stage: StageContents) -> list[Term]:
    """List the tensors that a stage's embedding, rotation and head keep, also those of MTP layers (2205.05198, section 4.3)."""
    at = Sizes.of(config, sizes)
    terms = _before_layers(config, at, stage)
    if stage.has_head:
        terms += head_terms(config, sizes, at)
    for _ in range(stage.num_mtp):
        terms += [*embedding_terms(config, at), *head_terms(config, sizes, at)]
    return terms


def _before_layers(config: Config, at: Sizes, stage: StageContents) -> list[Term]:
    """List the tensors that a stage keeps before its layers: the embedding's, and the rotation's tables."""
    terms = embedding_terms(config, at) if stage.has_embedding else []
    if stage.has_embedding and config.model.position_kind.has_table:
        terms.append(Term("embedding", "positions", Fraction(0), INDEX_BYTES * at.shard))
    return terms if config.recompute.granularity == "full" else [*terms, *_tables(config, at, stage.layers)]


def head_terms(config: Config, sizes: ParallelSizes, at: Sizes) -> list[Term]:
    """List the tensors that a final norm, the head and the losses keep."""
    columns = Fraction(config.model.padded_vocab_size, sizes.tp)
    norm, mask = norm_terms(config, at, "final_norm"), Term("losses", LOSS_MASK, Fraction(0), Fraction(1))
    if head_tokens(config) is not None:
        return [*norm, Term("head", "gradient of the input", Fraction(0), at.w * at.h * at.shard), mask]
    return [
        *norm,
        column_input(config, at, "head"),
        # The paper keeps 32-bit logits; this engine keeps them in the run's dtype and recomputes the softmax.
        Term("losses", "logits", 4 * columns, at.w * columns),
        Term("losses", "sums, targets and which are held", Fraction(0), Fraction(at.acc + INDEX_BYTES + 1)),
        mask,
    ]


def kept_bytes(
    config: Config,
    sizes: ParallelSizes,
    stage: StageContents,
    groups: "Sequence[LayerGroup] | None" = None,
    load: Fraction = BALANCED,
) -> int:
    """Count the bytes that one microbatch keeps on one stage's device for its backward.

    Args:
        groups: the stage's `layer_groups`; None: computed here.
        load: rows that the rank's experts get, over the rows under balanced routing.
    """
    groups = layer_groups(config, sizes, stage, load) if groups is None else groups
    return _bytes(config, end_terms(config, sizes, stage)) + sum(group.kept for group in groups)


def moved_bytes(
    config: Config,
    sizes: ParallelSizes,
    stage: StageContents,
    groups: "Sequence[LayerGroup] | None" = None,
    load: Fraction = BALANCED,
) -> int:
    """Count the bytes that one microbatch keeps in host memory for its backward; arguments as for `kept_bytes`."""
    return sum(group.moved for group in (layer_groups(config, sizes, stage, load) if groups is None else groups))


def forward_bytes(
    config: Config,
    sizes: ParallelSizes,
    stage: StageContents,
    groups: "Sequence[LayerGroup] | None" = None,
    load: Fraction = BALANCED,
) -> int:
    """Count the peak bytes that one microbatch keeps on one stage's device during its forward; arguments as for `kept_bytes`.

    A tensor that a layer moves to the host stays on the device until the layer above it, or the chunk, is done.
    """
    groups = layer_groups(config, sizes, stage, load) if groups is None else groups
    at, num_own = Sizes.of(config, sizes), len(groups) - stage.num_mtp
    head = _bytes(config, head_terms(config, sizes, at)) if stage.has_head else 0
    logits = _logits_at_a_time(config, sizes, stage)
    most = kept = _bytes(config, _before_layers(config, at, stage))
    below = _NOTHING
    for place, group in enumerate(groups):
        if place >= num_own:
            # Another head and an embedding come before an MTP layer.
            kept += head
            most = max(most, kept + below.moved + logits)
            kept += _bytes(config, embedding_terms(config, at))
        kept += group.kept
        most = max(most, kept + group.moved + below.moved)
        below = group
    return max(most, kept + head + below.moved + logits)


def deferred_terms(config: Config, sizes: ParallelSizes, layer: int = 0, load: Fraction = BALANCED) -> list[Term]:
    """List the tensors that a layer holds from an `I` to its `W` for deferred weight gradients: GEMM inputs, output gradients.

    With sequence parallelism, the inputs of column-parallel layers (unless they are kept as gathered) and the output gradients
    of row-parallel layers are held as shards.
    """
    at, model = Sizes.of(config, sizes), config.model
    kind, is_kept_gathered = model.layer_kind(layer), keeps_gathered(config, at)
    products = layer_products(model, kind, sizes.tp)
    terms = [term for product in products for term in _operands(config, at, product)]
    # A tensor is listed once: as the input of another product, or as the gradient that a parallel block's branches share unless a
    # branch has its own operator in between.
    listed = set[tuple[str, str]]()
    if model.mla is not None and model.mla.q_lora_rank is None and not is_kept_gathered:
        listed.add(("attention.q_up", "input"))
    if model.parallel_block and not (model.norms_before or is_kept_gathered):
        listed.add(("mlp.up", "input"))
    is_sent_in_fp8 = is_in_fp8(config, layer) and sends_fp8(config, at)
    has_operator = model.hidden_dropout or model.norms_after or model.residual_multiplier != 1.0 or is_sent_in_fp8
    if model.parallel_block and not has_operator and products[-1].name != "attention.proj":
        listed.add(("attention.proj", "gradient"))
    terms = [term for term in terms if (term.module, term.tensor) not in listed]
    terms += deferred_expert_terms(config, at, sizes, load) if kind.has_experts else []
    parts = config.recompute.parts_made_again
    return kept_in_fp8(config, at, terms, parts) if is_in_fp8(config, layer) else terms


def _operands(config: Config, at: Sizes, product: Product) -> list[Term]:
    """List a product's input and output gradient; with sequence parallelism both are shards outside tp."""
    outside = {
        "column": (Fraction(1) if keeps_gathered(config, at) else at.shard, Fraction(1)),
        "row": (Fraction(1), at.shard),
        "own": (at.shard, at.shard),
        "latents": (Fraction(at.c), Fraction(at.c)),
    }[product.kind]
    return [
        Term(product.name, tensor, Fraction(0), at.w * width * share)
        for tensor, width, share in zip(("input", "gradient"), (product.k, product.n), outside, strict=True)
    ]


def deferred_bytes(config: Config, sizes: ParallelSizes, stage: StageContents, load: Fraction = BALANCED) -> int:
    """Count the bytes that one microbatch holds on one stage for deferred weight gradients; 0 if none are deferred."""
    if not config.schedule.defers_weight_gradients:
        return 0
    sorts = {layer: layer_sort(config, layer) for layer in stage.layers}
    counted = Counter(sorts.values())
    first = {sorts[layer]: layer for layer in reversed(stage.layers)}
    return sum(
        count * _bytes(config, deferred_terms(config, sizes, first[sort], load)) for sort, count in counted.items()
    )


def _waiting(config: Config, sizes: ParallelSizes, layer: int, load: Fraction, *, is_last_use: bool) -> tuple[int, int]:
    """Count (bytes that a layer holds for deferred weight gradients, bytes by which its backward's peak exceeds what is kept).

    From the last GEMM to the first, the backward adds each GEMM's operands to what the forward kept, and frees the kept tensors
    that the GEMM's backward has used. An input that the layer kept anyway adds nothing; a recomputed input adds its bytes. A
    rotation table is freed at its last use in a stage (`is_last_use`).
    """
    kept, waiting = block_terms(config, sizes, layer, load), deferred_terms(config, sizes, layer, load)
    has_input = {term.module for term in kept if term.tensor == "input" and term.ours}
    has_experts = config.model.layer_kind(layer).has_experts
    mlp = MLP_BACKWARD if has_experts else {"mlp.down": ("mlp",), "mlp.up": ("mlp_norm",)}
    latents = {"attention.qkv": "attention_norm"} if config.model.mla is None else BEHIND_LATENTS
    behind = {**mlp, "attention.proj": ("attention",)} | {module: (freed,) for module, freed in latents.items()}
    behind |= BEHIND_PROJECTION if config.model.layer_kind(layer).is_mtp else {}
    above = most = 0
    for module, freed in behind.items():
        made_again = [
            term for term in waiting if term.module == module and not (term.tensor == "input" and module in has_input)
        ]
        above += _bytes(config, made_again)
        most = max(most, above)
        above -= _bytes(config, [term for term in kept if term.module in freed])
        if "attention" in freed and is_last_use:
            above -= _bytes(config, _tables(config, Sizes.of(config, sizes), [layer]))
    return _bytes(config, waiting), most


def _all_waiting(config: Config, sizes: ParallelSizes, layers: Sequence[int], load: Fraction) -> list[tuple[int, int]]:
    """List `_waiting`'s pair of byte counts for each layer in a stage; equal layers share one computation.

    A backward visits the last layer first, so a rotation table's last use is in the lowest layer that reads it.
    """
    known, found = dict[tuple[object, bool], tuple[int, int]](), []
    seen: set[Rotary | None] = set()
    for layer in layers:
        rotary = config.model.layer_kind(layer).rotary
        key = layer_sort(config, layer), rotary not in seen
        seen.add(rotary)
        if key not in known:
            known[key] = _waiting(config, sizes, layer, load, is_last_use=key[1])
        found.append(known[key])
    return found


def backward_bytes(
    config: Config,
    sizes: ParallelSizes,
    stage: StageContents,
    groups: "Sequence[LayerGroup] | None" = None,
    load: Fraction = BALANCED,
) -> int:
    """Count the peak bytes that one microbatch keeps on one stage during its backward; arguments as for `kept_bytes`.

    Recomputed tensors are included. The backward goes from the head to the embedding and frees what it has used. When a layer's
    backward begins, the layer's offloaded tensors have returned from the host. Those of the layer below are being copied, and
    count too.
    """
    at = Sizes.of(config, sizes)
    # The loss mask belongs to the batch.
    of_head = [term for term in head_terms(config, sizes, at) if term.tensor != LOSS_MASK] if stage.has_head else []
    head = _bytes(config, of_head)
    groups = layer_groups(config, sizes, stage, load) if groups is None else groups
    kept = kept_bytes(config, sizes, stage, groups)
    # With deferred weight gradients each group is one layer.
    layers: list[tuple[int, int]] = []
    if config.schedule.defers_weight_gradients:
        layers = _all_waiting(config, sizes, stage.layers, load)
    most = kept + (groups[-1].moved if groups else 0)
    kept -= head
    num_own = len(groups) - stage.num_mtp
    for index in reversed(range(len(groups))):
        group, below = groups[index], groups[index - 1] if index else _NOTHING
        coming = group.moved + below.moved
        deferred, above = layers[index] if layers else (0, 0)
        most = max(most, kept + coming + above, kept - group.kept + group.whole + below.moved)
        kept += deferred - group.kept
        if index >= num_own:
            # After an MTP layer's backward come its embedding and the previous token's head.
            kept -= _bytes(config, embedding_terms(config, at))
            most = max(most, kept + below.moved)
            kept -= head
    return max(most, kept)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Bytes of a group of layers that are kept or recomputed together.

    Attributes:
        kept: device bytes between forward and backward.
        whole: device bytes in the backward.
        moved: bytes on the host.
    """

    kept: int
    whole: int
    moved: int = 0


_NOTHING = LayerGroup(0, 0)


def layer_groups(
    config: Config, sizes: ParallelSizes, stage: StageContents, load: Fraction = BALANCED
) -> list[LayerGroup]:
    """List the bytes of a stage's layer groups in order; `GPTChunk` (`models/gpt`) forms the same groups.

    Args:
        load: rows that the rank's experts get, over the rows under balanced routing.
    """
    at, recompute, num_layers = Sizes.of(config, sizes), config.recompute, len(stage.layers)
    num_own = stage.num_own
    assert recompute.granularity != "auto", "triaxis.models.predict.rank_memory.resolve_recompute comes first"
    sorts = [layer_sort(config, layer) for layer in stage.layers]
    kinds = [sort.kind for sort in sorts]
    # Terms that a layer keeps if nothing is recomputed. After a full recomputation its backward holds them too.
    plain = {sort: all_terms(config, sizes, sort, load) for sort in set(sorts)}
    entry = Term("attention_norm", "input", Fraction(0), at.w * at.h * at.shard)
    again = recompute.granularity == "full"
    num_again = 0
    if again:
        num_again = num_layers if recompute.method == "uniform" else min(num_layers, recompute.num_layers)
    size = recompute.num_layers if recompute.method == "uniform" else 1
    groups = []
    # MTP layers are recomputed one by one.
    of_own = min(num_own, num_again)
    for start in [*range(0, of_own, size), *range(num_own, num_again)]:
        first = joining_terms(config, at)[0] if kinds[start].is_mtp else entry
        moved = _moved(config, at, [first], start, stage)
        # All layers share one rotation table per kind; a recomputed group gets it from outside.
        stop = start + 1 if kinds[start].is_mtp else min(start + size, of_own)
        in_backward = sum(_bytes(config, plain[sort]) for sort in sorts[start:stop])
        in_backward += _bytes(config, _tables(config, at, stage.layers[start:stop]))
        chosen = [term for kind in kinds[start:stop] if kind.has_experts for term in choice_terms(config, at, sizes)]
        remembered = [term for layer in stage.layers[start:stop] for term in remembered_terms(config, at, layer)]
        remembered += [remembered_counts(config, at) for kind in kinds[start:stop] if kind.has_experts]
        in_backward += _bytes(config, remembered)
        groups.append(LayerGroup(_bytes(config, [first, *chosen, *remembered]) - moved, in_backward, moved))
    seen: set[Rotary | None] = set()
    of_sort = {sorts[start]: stage.layers[start] for start in range(num_again, num_layers)}
    kept = {sort: block_terms(config, sizes, layer, load) for sort, layer in of_sort.items()}
    most = {
        sort: (_bytes(config, terms), _in_attention(config, at, sort.kind, terms, plain[sort]))
        for sort, terms in kept.items()
    }
    for start in range(num_again, num_layers):
        kind, sort = kinds[start], sorts[start]
        terms, (layer, in_core) = kept[sort], most[sort]
        moved = _moved(config, at, terms, start, stage)
        # The first layer that keeps a rotation table keeps it for all.
        is_first = again and kind.rotary not in seen
        outside = _bytes(config, _tables(config, at, stage.layers[start : start + 1])) if is_first else 0
        seen.add(kind.rotary)
        groups.append(LayerGroup(outside + layer - moved, outside + max(layer, in_core), moved))
    return groups


def _in_attention(config: Config, at: Sizes, kind: LayerKind, terms: Sequence[Term], plain: Sequence[Term]) -> int:
    """Count the bytes that a layer holds while its backward recomputes attention's core; 0 if the core is not recomputed.

    Args:
        terms: tensors that the layer keeps with the configured recomputation.
        plain: tensors that the layer would keep if nothing were recomputed.
    """
    if "attention" not in config.recompute.parts:
        return 0
    is_made_again = "rope" in config.recompute.parts
    before = next(index for index, term in enumerate(terms) if term.module == "attention.proj")
    inside = [term for term in plain if term.part == "attention"]
    if config.model.mla is not None:
        inside += [term for term in plain if is_made_again and term.tensor == "new q"]
        inside += (
            [] if config.kernels.attention == "explicit" else [Term("attention", "output", Fraction(0), at.w * at.out)]
        )
        return _bytes(config, [*terms[:before], *inside])
    rotated = [
        term for term in attention_part(config, at, kind, is_core_again=True) if term.tensor in ("new q", "new k")
    ]
    is_exchanged = at.c > 1 and not gathers_keys(config)
    if config.kernels.attention == "explicit":
        copies = [f"exchanged {name}" if is_exchanged else name for name in ("k", "v", *(["q"] if at.b > 1 else []))]
        inside += [term for term in plain if term.module == "attention" and term.tensor in copies]
        inside += [term for term in rotated if is_made_again and at.b == 1 and term.tensor == "new q"]
    else:
        inside += rotated if is_made_again else []
        # The exchanged heads' output is a term of its own.
        inside += [] if is_exchanged else [Term("attention", "output", Fraction(0), at.w * at.q)]
    return _bytes(config, [*terms[:before], *inside])


def _moved(config: Config, at: Sizes, terms: Sequence[Term], layer: int, stage: StageContents) -> int:
    """Count the bytes that a layer moves to the host; `layer` is its index in the chunk."""
    if layer >= config.offload.num_layers:
        return 0
    total = 0
    for index, term in enumerate(terms):
        # A tensor from another stage is held for its gradient. Gathered for the first GEMM, it is another tensor.
        is_entry = index == 0 and term.ours == at.w * at.h * at.shard
        is_received = layer == 0 and not stage.has_embedding and is_entry and term.module != INPUTS
        num_bytes = _bytes(config, [term])
        if term.moves and num_bytes >= config.offload.min_bytes and not is_received:
            total += num_bytes
    return total


def _logits_at_a_time(config: Config, sizes: ParallelSizes, stage: StageContents) -> int:
    """Count the bytes of a piece's logits, which exist while a head in pieces runs; 0 unless `recompute.head_tokens` is set."""
    at_a_time = head_tokens(config)
    if at_a_time is None or not stage.has_head:
        return 0
    tokens = min(at_a_time, tokens_of_microbatch(config))
    return tokens * BYTES_PER_ELEMENT[config.precision.dtype] * config.model.padded_vocab_size // sizes.tp


def _tables(config: Config, at: Sizes, layers: Sequence[int]) -> list[Term]:
    """List some layers' cosine and sine tables: one for each kind of rotation among them."""
    kinds = config.model.kinds
    rotaries = dict.fromkeys(kinds[layer].rotary for layer in layers)
    return [
        Term("attention", "tables of rotation", Fraction(0), Fraction(2 * at.acc * rotary.dim))
        for rotary in rotaries
        if rotary is not None
    ]


def _bytes(config: Config, terms: Sequence[Term]) -> int:
    """Sum the terms' bytes over a microbatch."""
    total = per_token(terms) * tokens_of_microbatch(config)
    assert total.denominator == 1, "tensors have whole bytes"
    return total.numerator
