"""Rules about batches and parameter groups."""

from collections.abc import Iterator

from triaxis.engine.config.quantities.plan import partial_batch
from triaxis.engine.config.rules.problem import Problem, Rule, Subject, divisors, multiples

MOST_MICROBATCHES = 2**17
"""Maximum microbatches per pipeline and step: a schedule lists a forward and a backward for each."""


def batch_is_whole_microbatches(subject: Subject) -> Iterator[Problem]:
    train, dp = subject.config.train, subject.dp
    if rule := partial_batch(train, dp):
        yield subject.problem(
            "train.global_batch_size",
            rule,
            {
                "train.global_batch_size": multiples(train.micro_batch_size * (dp or 1), train.global_batch_size),
                "train.micro_batch_size": divisors(train.global_batch_size, train.micro_batch_size),
                "parallel.dp": divisors(train.global_batch_size, dp) if dp is not None else [],
            },
        )


def microbatches_can_be_listed(subject: Subject) -> Iterator[Problem]:
    train, dp = subject.config.train, subject.dp or 1
    num_microbatches = train.global_batch_size // (train.micro_batch_size * dp)
    if num_microbatches > MOST_MICROBATCHES:
        most = MOST_MICROBATCHES * train.micro_batch_size * dp
        yield subject.problem(
            "train.global_batch_size",
            f"makes {num_microbatches:,} microbatches per pipeline and step, and at most {MOST_MICROBATCHES:,} are planned: a "
            "schedule lists each of them, and would not fit in memory",
            {"train.global_batch_size": [most]},
        )


def groups_change_something(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each group that has no field, repeats an earlier pattern, or both freezes and updates."""
    seen: set[str] = set()
    for number, group in enumerate(subject.config.optimizer.groups):
        pattern, key = group["match"], f"optimizer.groups.{number}.match"
        if len(group) == 1:
            yield Problem(
                key,
                pattern,
                "has none of weight_decay, lr_factor and freeze: its parameters would be as those of no group",
                {},
                "Give the group one of them, or leave it out.",
            )
        of_updates = [name for name in ("weight_decay", "lr_factor") if name in group]
        if group.get("freeze") and of_updates:
            yield Problem(
                key,
                pattern,
                f"freezes its parameters, so {' and '.join(of_updates)} would have no effect: they are never updated",
                {},
                f"Leave out freeze, or {' and '.join(of_updates)}.",
            )
        if pattern in seen:
            yield Problem(
                key,
                pattern,
                "is the pattern of two groups, of which the first has all that match: the other would have no effect",
                {},
                "Put the fields of both into one group.",
            )
        seen.add(pattern)


TRAINING_RULES: tuple[Rule, ...] = (
    batch_is_whole_microbatches,
    microbatches_can_be_listed,
    groups_change_something,
)
