"""List the sizes of axes that a run may have: the candidates of whatever chooses a layout.

    tp x cp x pp x dp = ranks     tp divides a node, and dp is what the others leave
    ep x etp                      divides a stage's tp x cp x dp ranks, and ep the experts; etp is 1 or tp

`triaxis plan` takes the fastest of them (`launch/planning/search.py`), `triaxis new` the smallest that fits
(`launch/tuning/choose_layout.py`), and a memory error proposes the nearest that fits (`models/predict/changes.py`). Each checks the
rules, since they also read what it chooses besides sizes.
"""

from collections.abc import Collection, Iterator
from itertools import product

from triaxis.engine.config.rules.problem import divisors
from triaxis.engine.config.tree import Config

AXES = ("tp", "cp", "pp", "ep", "etp", "sequence_parallel")
"""Fields of `parallel` that may vary; `dp` follows from them."""


def in_all_sizes(
    config: Config, num_ranks: int, ranks_per_node: int, varied: Collection[str] = AXES
) -> Iterator[Config]:
    """Yield the run with all sizes of the `varied` axes that fill `num_ranks`; other axes stay as they are.

    Some break rules. With tp > 1, sequence parallelism comes before the same sizes without.
    """
    parallel, moe = config.parallel, config.model.moe

    def each(name: str, number: int) -> list[int]:
        return list(divisors(number, 1)) if name in varied else [getattr(parallel, name)]

    pps = [pp for pp in each("pp", num_ranks) if pp <= config.model.num_layers]
    eps = each("ep", 1 if moe is None else moe.num_experts)
    for tp, cp, pp in product(each("tp", ranks_per_node), each("cp", num_ranks), pps):
        dp, rest = divmod(num_ranks, tp * cp * pp)
        if rest:
            continue
        own = (True, False) if tp > 1 else (False,)
        are_cut = own if "sequence_parallel" in varied else (parallel.sequence_parallel,)
        etps = dict.fromkeys((1, tp)) if "etp" in varied and moe is not None else (parallel.etp,)
        for is_cut, ep, etp in product(are_cut, eps, etps):
            if tp * cp * dp % (ep * etp) == 0:
                sizes = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "sequence_parallel": is_cut, "ep": ep, "etp": etp}
                yield config.model_copy(update={"parallel": parallel.model_copy(update=sizes)})
