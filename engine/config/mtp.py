"""The `model.mtp` section and its rules: multi-token prediction (DeepSeek-V3, 2412.19437, section 2.2).

    h0_i = final_norm(last layer)_i
    hk_i = norm_k(layer_k(W_k [norm(embedding(t_{i+k})), norm(h(k-1)_i)]))          k = 1 .. num_layers
    loss = L0 + loss_weight / num_layers x (L1 + .. )       Lk: cross-entropy of t_{i+k+1} from head(hk_i)

t_j is the token at position j of a sample, hk_i the hidden state at position i after k such layers. Each layer has the kind of the
model's last layer. Word embedding and head are the model's; norms and W_k [h, 2 h] are the layer's own.

Position i counts for Lk if k + 1 tokens follow it in its sample and the loss counts all of them. With `data.attention: within`,
those tokens must also lie in token i's document. Lk is the mean over the global batch's positions that count for Lk, times
(s - k) / s. That factor is the share of a sample's s positions that can count. So if no label is masked, Lk is the sum divided by
batch size x s (2412.19437, equation 24). The printed loss is L0; evaluation and generation skip these layers.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from triaxis.engine.config.section import MEANT, Problem, Rule, Section, Subject

MOST_AHEAD = 16
"""Maximum number of multi-token prediction layers."""


class MTPConfig(Section):
    """Multi-token prediction: layers after the last one that predict tokens further ahead, in training only."""

    num_layers: int = Field(
        1, gt=0, le=MOST_AHEAD, description="tokens that are predicted beyond the next, a layer each"
    )
    loss_weight: Annotated[float, MEANT] = Field(
        0.3, gt=0, description="factor of the mean of their losses, trained but not printed as the loss (DeepSeek-V3)"
    )


def tokens_lie_ahead(subject: Subject) -> Iterator[Problem]:
    model = subject.config.model
    if model.mtp is not None and model.seq_length <= model.mtp.num_layers:
        yield subject.problem(
            "model.seq_length",
            f"must be above model.mtp.num_layers = {model.mtp.num_layers}: no token of a sample would have another so far ahead",
            {"model.seq_length": [model.mtp.num_layers + 1]},
        )


def embeddings_have_no_table(subject: Subject) -> Iterator[Problem]:
    model = subject.config.model
    if model.mtp is not None and model.position_kind.has_table:
        yield subject.problem(
            "model.position",
            "does not go with model.mtp: the embedding of a token ahead would need a row of the table, which is on the first stage",
            {"model.position": ["rope"]},
        )


MTP_RULES: tuple[Rule, ...] = (tokens_lie_ahead, embeddings_have_no_table)
