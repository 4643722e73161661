"""An attention whose mixer has a name of its own, so that no cache can take its place."""

from typing import Any

import torch

from triaxis import Extension
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.models.gpt.attention import Attention
from triaxis.models.specs import attention_specs


class Uncached(Attention):
    specs = staticmethod(attention_specs)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.mixed = self.mixer
        del self.mixer

    def forward(self, x: torch.Tensor, positions: Any, keys: Any) -> torch.Tensor:
        rope = None if self.kind.rotary is None else positions.tables[self.kind.rotary]
        mask = Mask(self.kind.window, positions.documents, positions.part)
        q, k, v = self.rotated(self.qkv(x), tables=rope)
        return self.proj(self.mixed(q, (k, v), mask, None))


extension = Extension(attention=Uncached)
