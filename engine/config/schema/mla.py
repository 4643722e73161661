"""The `model.mla` section: multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1).

    c_q  = norm(W_qa x)   [q_lora_rank]          q_i = [rope(W_qr c_q) | W_qn c_q]       per head, dr + dn
    c_kv = norm(W_kva x)  [kv_lora_rank]         k_i = [rope(W_kr x) | W_kn c_kv]        the rotated part is one for all heads
                                                 v_i = W_v c_kv                          per head, dv

x is a token's hidden state, i a head. A query or key has dr rotated elements (`qk_rope_head_dim`) and dn others
(`qk_nope_head_dim`); a value has dv (`v_head_dim`). Queries and keys have the rotated part first, as in every head in this project
that rotates in part. Caches and context parallelism store and gather c_kv and the rotated key: kv_lora_rank + dr numbers per token,
however many heads there are.
"""

from pydantic import Field

from triaxis.engine.config.schema.section import LARGEST_WIDTH, Section


class MLAConfig(Section):
    """Multi-head latent attention: all heads' keys and values are computed from one small vector per token."""

    q_lora_rank: int | None = Field(
        None, gt=0, le=LARGEST_WIDTH, description="size of the queries' latent; null: queries are projected from x"
    )
    kv_lora_rank: int = Field(gt=0, le=LARGEST_WIDTH, description="size of the latent of keys and values")
    qk_nope_head_dim: int = Field(
        gt=0, le=LARGEST_WIDTH, description="elements of a query or key that come from a latent"
    )
    qk_rope_head_dim: int = Field(gt=0, le=LARGEST_WIDTH, description="elements that rotate; of keys one for all heads")
    v_head_dim: int = Field(gt=0, le=LARGEST_WIDTH, description="elements of a value")

    @property
    def qk_head_dim(self) -> int:
        """Size of a query or a key, in elements."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_size(self) -> int:
        """Elements per token in c_kv and the rotated key, from which all heads' keys and values are computed."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def latent_size(self) -> int:
        """Elements per token that the down-projections of x compute: both latents and the rotated key."""
        return (self.q_lora_rank or 0) + self.cached_size
