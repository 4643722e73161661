"""Run a transformers model with torch's AdamW as an oracle."""

from unittest.mock import patch

import torch
from torch import nn

from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.numerics.precision import DTYPES
from triaxis.launch.verify.oracles.adamw import UpdatedByTorch
from triaxis.models.interop.huggingface.config import family_of, to_hugging_face
from triaxis.models.interop.huggingface.families import FAMILIES
from triaxis.models.interop.huggingface.weights import exchanges


class HuggingFace(UpdatedByTorch):
    """A `model.Oracle` that runs the Hugging Face model with the exported config."""

    def __init__(self, config: Config) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        family = family_of(config.model)
        dtype = DTYPES[config.precision.dtype]
        keys, _ = to_hugging_face(config.model, family, dtype=str(dtype).removeprefix("torch."))
        self._gpt = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys)).to(dtype)
        # The batched expert products in transformers do not accept float64.
        self._gpt.set_experts_implementation("eager")
        naming = FAMILIES[family].naming
        self.pairs = exchanges(family, config.model, naming.fused or naming)
        weights = dict(self._gpt.named_parameters())
        # The bias for choosing experts is a buffer in transformers.
        names = {name for pair in self.pairs for name in pair.theirs}
        named = weights | {name: buffer for name, buffer in self._gpt.named_buffers() if name in names}
        trained = list(weights.values())
        decayed, others = ([one for one in trained if (one.dim() > 1) is decays] for decays in (True, False))
        super().__init__(named, decayed, others, config.optimizer)

    def token_losses(self, microbatch: MicroBatch) -> torch.Tensor:
        numbers = None if microbatch.documents is None else microbatch.documents.numbers
        # transformers infers documents from restarting positions; here their numbers are known.
        with patch("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: numbers):
            output = self._gpt(input_ids=microbatch.tokens, position_ids=microbatch.position_ids, use_cache=False)
        logits = output.logits
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), microbatch.labels.flatten(), reduction="none")
        return losses.view(microbatch.labels.shape)

    def end_backward(self) -> None:
        """Do nothing: the gradients are complete."""
