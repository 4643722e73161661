"""Keys and values of the tokens so far: with them a further token costs the forward of one token.

    prompt, p tokens      fills places 0 .. p - 1 of every layer; attention among them is causal
    one token more        fills place p; its query reads places 0 .. p

A rank caches what it computes anyway: the layers of its chunks, the key/value heads of its tp part (whole replicas where
heads are replicated). Keys are cached after QK-norm and RoPE, so that they are never touched again. Of latent attention it caches
the latent and the rotated key of a token, which all heads share and every tp rank holds whole.
"""

import torch


class LayerCache:
    """Keys and values of one attention layer, each [b, kv_heads on this rank, places, d]; `length` places are filled."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [b, n, s, d]; returns all so far, [b, n, length, d], as views."""
        s, places = keys.shape[2], self._keys.shape[2]
        assert self.length == 0 or s == 1, (
            "first the prompt, then one token at a time: attention has a mask for these only"
        )
        assert self.length + s <= places, f"{self.length} + {s} tokens in a cache of {places}"
        where = slice(self.length, self.length + s)
        self._keys[:, :, where] = keys
        self._values[:, :, where] = values
        self.length += s
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


class LatentCache:
    """Latents of one layer of latent attention, [places, b, latent and rotated key]; `length` places are filled."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._latents = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def extend(self, latents: torch.Tensor) -> torch.Tensor:
        """Append latents [s, b, n]; returns all so far, [length, b, n], as a view."""
        s, places = latents.shape[0], self._latents.shape[0]
        assert self.length == 0 or s == 1, (
            "first the prompt, then one token at a time: attention has a mask for these only"
        )
        assert self.length + s <= places, f"{self.length} + {s} tokens in a cache of {places}"
        self._latents[self.length : self.length + s] = latents
        self.length += s
        return self._latents[: self.length]


KVCache = dict[str, LayerCache | LatentCache]
"""The caches of one chunk's layers, by the name of the block."""
