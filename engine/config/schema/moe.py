"""The `model.moe` section: layers whose MLP is a mixture of experts.

    layers: [dense*3, moe*58]        `dense` and `moe` are layer kinds that every model with this section has
    moe: {num_experts: 256, top_k: 8, ffn_hidden_size: 2048, shared_experts: 1, score: sigmoid}

For a token's hidden state x, the router (weight W) gives each expert i a score s_i. The experts with the k largest scores are used;
among equal scores, the expert with the lower index comes first.

    softmax    s = softmax(x W^T) over all experts               2006.16668, 2401.04088
    sigmoid    s = sigmoid(x W^T)                                2412.19437, equation 15
    y = sum over the k experts of  scaling g_i expert_i(x) + shared(x)      g = s, or with `normalize` s / (sum of the k scores)

`scaling` and `normalize` are fields of this section; `shared` is the shared experts' MLP.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from triaxis.engine.config.schema.section import LARGEST_WIDTH, MEANT, OnResume, Section

MOST_EXPERTS = 2**15 - 1
"""Maximum number of experts in a layer. Tokens are sorted by their experts' numbers as int16."""

DispatchName = Literal["all_gather", "all_to_all"]


class BalanceConfig(Section):
    """Load balancing between experts. No option depends on the layout or the micro batch."""

    on_resume: ClassVar[OnResume | None] = MEANT

    bias_rate: float = Field(
        0.0,
        ge=0,
        description="step of a bias per expert that only the choice sees, by the sign of the global batch's load",
    )
    sequence_loss: float = Field(
        0.0, ge=0, description="factor of a loss on the load within each sample, trained but not printed (DeepSeek-V3)"
    )
    sequence_counts: Literal["scores", "choices"] = Field(
        "scores",
        description="what the sequence loss counts: scores: a token's k best, without bias and groups (DeepSeek-V3); choices: the "
        "experts that it chose",
    )
    z_loss: float = Field(
        0.0, ge=0, description="factor of the mean log(sum of exp(router logits))^2, trained but not printed (ST-MoE)"
    )


class MoEConfig(Section):
    """The experts in layers with kind `moe`."""

    num_experts: int = Field(gt=1, le=MOST_EXPERTS, description="routed experts E of a layer")
    top_k: int = Field(gt=0, le=MOST_EXPERTS, description="experts k of a token")
    ffn_hidden_size: int = Field(gt=0, le=LARGEST_WIDTH, description="inner width of one expert")
    shared_experts: int = Field(
        0, ge=0, le=MOST_EXPERTS, description="experts of this width that every token has, computed as one MLP"
    )
    score: Literal["softmax", "sigmoid"] = Field("softmax", description="scores of experts from the router's logits")
    normalize: bool = Field(True, description="divide the k scores of a token by their sum")
    scaling: float = Field(1.0, gt=0, description="factor of the routed experts' output")
    groups: int = Field(
        1, gt=0, le=MOST_EXPERTS, description="groups of neighbouring experts, of which a token uses some"
    )
    top_groups: int = Field(1, gt=0, le=MOST_EXPERTS, description="groups that a token may use")
    group_score: Literal["max", "top2"] = Field(
        "top2", description="score of a group: its best expert's (DeepSeek-V2), or the sum of its best two (V3)"
    )
    choice_bias: bool = Field(
        False, description="a bias per expert that only the choice sees; balance.bias_rate > 0 has one anyway"
    )
    balance: BalanceConfig = BalanceConfig()
    row_headroom: Annotated[float | None, MEANT] = Field(
        None,
        gt=0,
        description="dispatch by all_gather: rows of a rank's buffer over the balanced number; null: the worst case",
    )
    force_balanced: Annotated[bool, MEANT] = Field(
        False, description="choose experts in turn, whatever the scores: for footprints and speed, not for training"
    )

    @property
    def has_bias(self) -> bool:
        """Whether the expert choice has a bias."""
        return self.choice_bias or self.balance.bias_rate > 0

    @property
    def choice_is_of_scores(self) -> bool:
        """Whether each token chooses the experts with its k best scores; `balance.sequence_counts` then makes no difference."""
        return not self.has_bias and self.groups == 1 and not self.force_balanced

    @property
    def experts_in_group(self) -> int:
        """Number of experts in each group; 0 if the groups are not equal, which a rule refuses."""
        return 0 if self.num_experts % self.groups else self.num_experts // self.groups

    @property
    def counts_scores(self) -> bool:
        """Whether the sequence loss counts experts other than the chosen ones."""
        balance = self.balance
        return balance.sequence_loss > 0 and balance.sequence_counts == "scores" and not self.choice_is_of_scores

    @property
    def shared_size(self) -> int:
        """Inner width of the shared MLP, which every token passes through; 0: none."""
        return self.shared_experts * self.ffn_hidden_size
