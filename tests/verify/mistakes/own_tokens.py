"""A loss that is divided by the tokens that a rank has of a row."""

import torch

from triaxis import Extension
from triaxis.engine.head.vocabulary import VocabularyLogits
from triaxis.models.gpt.own_loss import LogitLosses


class Mean(LogitLosses):
    def of_logits(self, logits: VocabularyLogits, labels: torch.Tensor) -> torch.Tensor:
        return logits.cross_entropy(labels) / len(labels)


extension = Extension(loss=Mean)
