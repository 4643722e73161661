"""Cross-entropy with label smoothing and a z-loss; the ends of lines count twice."""

import torch

from triaxis import Extension
from triaxis.engine.head.vocabulary import VocabularyLogits
from triaxis.models.gpt.own_loss import LogitLosses

SMOOTHING = 0.1
Z_LOSS = 1e-4
LINE_END = 10


class SmoothedLoss(LogitLosses):
    """-(1 - e) log p_label - e mean_v log p_v + z (log sum_v exp(z_v))^2."""

    def of_logits(self, logits: VocabularyLogits, labels: torch.Tensor) -> torch.Tensor:
        """Compute the losses [s, b] of labels int64 [s, b]."""
        log_sum = logits.log_sum_exp()
        mean = logits.sum(logits.columns) / logits.vocab_size
        smoothed = log_sum - (1 - SMOOTHING) * logits.at(labels) - SMOOTHING * mean
        return smoothed + Z_LOSS * log_sum.square()

    @staticmethod
    def weights(tokens: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Weigh counted labels [b, s]: a byte that ends a line twice."""
        return torch.where(labels == LINE_END, 2.0, 1.0) * counted


extension = Extension(loss=SmoothedLoss)
