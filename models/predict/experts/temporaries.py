"""Memory that running experts hold beside what their layer keeps, counted from the configuration alone.

There are k times as many rows as tokens, so row copies are a layer's largest tensors. A rank has T tokens per microbatch and sends
etp k T rows. Its experts get R rows, and e etp ranks share a set of experts. `triaxis.models.predict.experts.memory` defines the
other letters. The peak falls on one of these moments; the right column gives the bytes held then:

    forward, all_to_all      outputs are put in the order of receipt      2 R h w
                             outputs return to their tokens' ranks        (R + etp k T) h w
                             outputs are added up for each token          etp k T h w + T h (a + w)
    forward, all_gather      outputs are added up; choices are held       R h w + e etp T (h (a + w) + 8 k)
    backward, all_to_all     output gradients arrive                      (etp k T + R) h w
                             gradients are put in the experts' order      2 R h w
    backward, all_gather     gradients are gathered, and copied by row    (e etp T + R) h w
    backward, both           the second projection's backward runs        R (h w + f (2 w + a) + a), if a > w
                                                                          R (h w + 2 f w + a), if a = w

With deferred weight gradients the last moment holds R f w more. It also holds the recomputed inner and activated values. Every
moment of a forward also holds the shared experts' output and the routing weights, T k a bytes. Every moment of a backward also
holds the output gradient.

Not counted: other layers' operators, whose tensors are small beside what a layer keeps, and the result of a weight-gradient GEMM.
Elementwise functions are counted operator by operator; compiled functions would hold no copies in the accumulation dtype.
"""

from fractions import Fraction

from triaxis.engine.config.quantities.expert_rows import dispatch_of
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.experts.memory import expert_terms, rows_per_token
from triaxis.models.predict.terms import INDEX_BYTES, Sizes, Term

NOTHING = Fraction(0)


def temporaries(config: Config, sizes: ParallelSizes, load: Fraction) -> tuple[Fraction, Fraction]:
    """Count the peak bytes per token that running experts hold beside what their layer keeps: (forward, backward)."""
    at, moe = Sizes.of(config, sizes), config.model.moe
    assert moe is not None, "a model with experts says which"
    rows, tokens = rows_per_token(config, sizes, load), Fraction(1, sizes.tp)
    token, total = at.w * at.h, at.h * (at.acc + at.w)
    f = Fraction(moe.ffn_hidden_size, sizes.etp)
    if dispatch_of(config) == "all_gather":
        gathered = sizes.expert_ranks * tokens
        forward = rows * token + gathered * (total + moe.top_k * INDEX_BYTES)
        arriving = (gathered + rows) * token
    else:
        leaving = sizes.etp * moe.top_k * tokens
        arriving = (max(leaving, rows) + rows) * token
        forward = max(arriving, leaving * token + tokens * total)
    wide = at.acc if at.acc > at.w else 0
    waiting = at.w if config.schedule.defers_weight_gradients else 0
    second = rows * (token + f * (2 * at.w + wide + waiting) + at.acc)
    again = [term for term in expert_terms(config, at, sizes, load) if _is_made_again(config, term)]
    backward = max(arriving, second + sum(term.ours for term in again))
    # If sequence parallelism is off, a rank slices its tokens from the layer's input, and likewise their gradients.
    cut = NOTHING if at.shard == tokens else tokens
    forward = max(forward, (at.shard + cut) * token if cut else NOTHING) + tokens * moe.top_k * at.acc
    forward += at.shard * token if moe.shared_size else NOTHING
    backward += (at.shard + cut) * token
    return forward, backward


def _is_made_again(config: Config, term: Term) -> bool:
    parts = config.recompute.parts_made_again
    return term.module in ("mlp.experts", "mlp.experts.down") and term.part in parts
