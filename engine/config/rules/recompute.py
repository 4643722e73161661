"""Rules about recomputation: the parts of a layer to recompute, and what each needs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from triaxis.engine.config.quantities.context_parallel import starts_from_gathered_keys
from triaxis.engine.config.rules.problem import Problem, Rule, Subject
from triaxis.engine.config.rules.rows import Found, Row
from triaxis.engine.config.schema.fp8 import BLOCKS


def modules_are_named_once(subject: Subject) -> Iterator[Problem]:
    modules = subject.config.recompute.modules or []
    if len(set(modules)) < len(modules):
        yield subject.problem(
            "recompute.modules",
            "must name each module once: it is recomputed or not",
            {"recompute.modules": [sorted(set(modules))]},
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part(Row):
    """A condition without which recomputing a part of a layer saves nothing.

    Attributes:
        part: entry of `recompute.modules`.
        is_met: test of the condition.
        instead: entries that may take its place.
    """

    key: str = "recompute.modules"
    part: str
    is_met: Callable[[Any], bool]
    instead: tuple[str, ...] = ()

    def broken(self, config: Any, value: Any, default: Any) -> Found | None:
        if self.part not in config.recompute.parts or self.is_met(config):
            return None
        left = [each for name in value or () for each in (self.instead if name == self.part else (name,))]
        return {}, {self.key: [list(dict.fromkeys(left))]} if left else {"recompute.granularity": ["none"]}


RECOMPUTED_PARTS = (
    Part(
        part="rope",
        is_met=lambda c: c.model.qk_norm or (c.model.mla is not None and any(kind.rotary for kind in c.model.kinds)),
        rule="has rope, but without qk_norm queries and keys are used as they are projected, or rotate in their place: there is "
        "nothing to recompute",
    ),
    Part(
        part="rope",
        instead=("rope", "attention"),
        is_met=lambda c: c.kernels.attention != "explicit" or "attention" in c.recompute.parts,
        rule="has rope, but kernels.attention = explicit keeps copies of queries and keys: recomputing what they were copied "
        "from would save nothing",
        others={"kernels.attention": ["sdpa"]},
    ),
    Part(
        part="attention",
        is_met=lambda c: not starts_from_gathered_keys(c),
        rule="has attention, but with parallel.cp = {c.parallel.cp} its backward starts from what its forward kept: recomputing "
        "it would gather keys and values once more and save nothing",
    ),
    Part(
        part="norm",
        is_met=lambda c: c.model.norms_before,
        rule="has norm, but with model.norm_placement = after no norm's output is kept: recomputing it would save nothing",
    ),
    Part(
        part="norm",
        is_met=lambda c: c.recompute.gathered_inputs != "keep" or not c.parallel.cuts_sequence,
        rule="has norm, but with gathered_inputs = keep the outputs of norms are not kept, only the gathered copies: recomputing "
        "them would save nothing",
        others={"recompute.gathered_inputs": ["regather"]},
    ),
    Part(
        part="mlp",
        instead=("activation",),
        is_met=lambda c: not c.parallel.cuts_sequence,
        rule="has mlp, but with parallel.sequence_parallel its input is cut over the tp ranks: recomputing it would gather the "
        "sequence once more",
        others={"parallel.sequence_parallel": [False]},
    ),
    Part(
        part="mlp",
        instead=("activation",),
        is_met=lambda c: c.precision.fp8 is None or c.precision.fp8.recipe in BLOCKS or c.parallel.cp == 1,
        rule="has mlp, but with parallel.cp = {c.parallel.cp} and one FP8 scale per tensor, recomputing it would communicate",
        others={"precision.fp8.recipe": ["mxfp8", "blockwise"]},
    ),
)
"""What recomputing each part needs."""


RECOMPUTE_RULES: tuple[Rule, ...] = (modules_are_named_once, *RECOMPUTED_PARTS)
