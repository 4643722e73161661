"""The `model.mtp` section: multi-token prediction (DeepSeek-V3, 2412.19437, section 2.2).

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

from typing import Annotated

from pydantic import Field

from triaxis.engine.config.schema.section import MEANT, Section

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
