"""Rules about experts: the layers that have them, and the ranks that they are cut over."""

from collections.abc import Iterator

from triaxis.engine.config.rules.problem import Problem, Rule, Subject, divisors
from triaxis.engine.layout.rank_rules import uneven_experts


def experts_have_layers(subject: Subject) -> Iterator[Problem]:
    model = subject.config.model
    if model.moe is not None and not model.has_experts:
        yield Problem(
            "model.layers",
            model.layers,
            "must name layers with experts where model.moe is given: no layer would have them",
            {},
            "For example model.layers=[moe], or [dense*3, moe*58].",
        )


def experts_over_ranks(subject: Subject) -> Iterator[Problem]:
    parallel, dp = subject.config.parallel, subject.dp
    if subject.config.model.moe is None:
        return
    if parallel.etp not in (1, parallel.tp):
        yield subject.problem(
            "parallel.etp",
            f"must be 1 or parallel.tp = {parallel.tp}: an expert is whole on a rank, or cut like other layers",
            {"parallel.etp": [1, parallel.tp]},
        )
    if dp is not None and (rule := uneven_experts(parallel.tp * parallel.cp * dp, parallel.ep, parallel.etp)):
        yield subject.problem(
            "parallel.ep",
            rule,
            {"parallel.ep": divisors(parallel.tp * parallel.cp * dp, parallel.ep), "parallel.etp": [1]},
        )


MOE_RULES: tuple[Rule, ...] = (experts_have_layers, experts_over_ranks)
