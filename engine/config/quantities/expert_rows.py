"""How tokens reach their experts, and how many rows a rank's experts get."""

from triaxis.engine.config.schema.moe import DispatchName, MoEConfig
from triaxis.engine.config.tree import Config


def dispatch_of(config: Config) -> DispatchName:
    """Return how tokens reach their experts' ranks; `auto` chooses the method that sends fewer bytes.

    An all-gather sends each token to ep ranks, an all-to-all to at most `top_k` ranks.
    """
    asked, moe = config.kernels.dispatch, config.model.moe
    if asked != "auto":
        return asked
    return "all_gather" if moe is None or config.parallel.ep <= moe.top_k else "all_to_all"


def worst_rows(moe: MoEConfig, tokens: int, ep: int, etp: int) -> int:
    """Maximum number of rows that one rank's experts can get if each of ep x etp ranks has `tokens` tokens."""
    return ep * etp * tokens * min(moe.top_k, moe.num_experts // ep)


def buffer_rows(moe: MoEConfig, tokens: int, ep: int, etp: int) -> int:
    """Number of rows in a rank's buffer with dispatch by all-gather.

    It is `row_headroom` x the number of rows if experts are balanced, and at most `worst_rows`; without headroom, `worst_rows`.
    """
    worst = worst_rows(moe, tokens, ep, etp)
    if moe.row_headroom is None:
        return worst
    return min(worst, max(1, round(moe.row_headroom * etp * moe.top_k * tokens)))


def local_tokens(config: Config) -> int:
    """Number of tokens per microbatch that one rank routes; tokens are cut over cp and tp."""
    parallel, train = config.parallel, config.train
    return train.micro_batch_size * config.model.seq_length // (parallel.cp * parallel.tp)
