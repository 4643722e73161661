"""How attention reaches other context-parallel ranks' tokens, and in what pieces.

    all_gather   each rank's queries attend to the gathered keys and values of the row (2407.21783, section 3.3.2)
    ulysses      an all-to-all gives each rank whole rows of some heads, another one brings the output back (2309.14509, section 3)

A layer sends these bytes in forward and backward, in units of w b s d (c - 1) / (c t). The letters are: w bytes per element, b
samples of s tokens, c = cp, t = tp, d the size of a head. The model's number of query heads is a, of key/value heads g.

    all_gather   2 g + 2 g + 2 g      gather, gather again in the backward, sum gradients; 1 / pieces of the bytes is exposed,
                                      because the rest overlaps with other pieces' attention
    ulysses      4 (a + g) / c        all exposed

With latent attention (`engine/config/schema/mla.py`), all_gather gathers each token's latent and rotated key, all at once, and each
rank computes whole rows' keys and values from them. A layer then sends 2 t (kv_lora_rank + dr) / d in the units above.
"""

from fractions import Fraction

from triaxis.engine.config.quantities.layer_products import kv_heads_on_rank
from triaxis.engine.config.schema.layout import Method
from triaxis.engine.config.tree import Config

MOST_PIECES = 4
"""Maximum number of pieces in which keys and values are gathered; each needs a key/value head."""


def heads_of_pieces(num_kv_heads: int) -> list[int]:
    """Split a rank's key/value heads into pieces, and list each piece's head count; the first pieces may have one head more."""
    num_pieces = min(num_kv_heads, MOST_PIECES)
    each, more = divmod(num_kv_heads, num_pieces)
    return [each + (piece < more) for piece in range(num_pieces)]


def local_kv_heads(config: Config) -> int:
    """Count a tensor-parallel rank's key/value heads in the run's layout."""
    return kv_heads_on_rank(config.model, config.parallel.tp)


def exposed_share(num_kv_heads: int) -> Fraction:
    """Share of gathered bytes that overlaps with no other piece's attention: the largest piece's share."""
    return Fraction(heads_of_pieces(num_kv_heads)[0], num_kv_heads)


def method_of(config: Config) -> Method:
    """Return the context-parallel method of a config that has passed the rules.

    `auto` chooses `all_gather` with latents, or if cp does not divide a rank's key/value heads; otherwise the method that exposes
    fewer bytes. With kernel `explicit`, all keys and values are gathered at once, so their whole transfer is exposed. They are kept
    for the backward, which therefore does not gather them again.
    """
    asked = config.parallel.cp_method
    if asked != "auto":
        return asked
    kv_heads = local_kv_heads(config)
    if kv_heads % config.parallel.cp or config.model.mla is not None:
        return "all_gather"
    heads = config.model.num_attention_heads // config.parallel.tp
    is_explicit = config.kernels.attention == "explicit"
    gathered = 4 * kv_heads if is_explicit else 6 * kv_heads * exposed_share(kv_heads)
    return "ulysses" if Fraction(4 * (heads + kv_heads), config.parallel.cp) < gathered else "all_gather"


def gathers_keys(config: Config) -> bool:
    """Whether a rank holds queries for only a part of each row, and gathers the whole row's keys and values for them."""
    return config.parallel.cp > 1 and method_of(config) == "all_gather"


def method_line(config: Config) -> str:
    """Describe the method in one line, with its exposed share of bytes, for a config with cp above 1."""
    kv_heads, is_explicit = local_kv_heads(config), config.kernels.attention == "explicit"
    if not gathers_keys(config):
        cp, heads = config.parallel.cp, config.model.num_attention_heads // config.parallel.tp
        return f"ulysses: {heads // cp} query and {kv_heads // cp} key/value heads of whole samples on each rank"
    if config.model.mla is not None:
        return f"all_gather: latents of {config.model.mla.cached_size} numbers per token, all of their bytes exposed"
    pieces = 1 if is_explicit else len(heads_of_pieces(kv_heads))
    share = 1.0 if is_explicit else float(exposed_share(kv_heads))
    of_heads = f"of the {kv_heads} key/value heads of a rank, {share:.0%} of the bytes exposed"
    return f"all_gather: keys and values in {pieces} piece{'s' * (pieces > 1)} {of_heads}"


def starts_from_gathered_keys(config: Config) -> bool:
    """Whether attention's backward starts from gathered keys and values, which its forward kept or which it gathers again."""
    # Latents are gathered before the recomputed part, which computes keys and values from them.
    return gathers_keys(config) and config.kernels.attention != "explicit" and config.model.mla is None


def decides_what_is_gathered(config: Config) -> bool:
    """Whether `memory_gb` decides if gathered tensors are kept: the run gathers some whose field is `auto`."""
    return (config.recompute.gathered_inputs == "auto" and config.parallel.cuts_sequence) or (
        config.recompute.gathered_kv == "auto" and starts_from_gathered_keys(config)
    )
