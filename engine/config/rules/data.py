"""Rules about corpora, their split, and samples to leave out."""

from collections.abc import Iterator

from triaxis.engine.config.rules.problem import Problem, Rule, Subject


def corpora_have_names(subject: Subject) -> Iterator[Problem]:
    data = subject.config.data
    for field, corpora in (("data.train", data.train), ("data.valid", data.valid or [])):
        if len({source.path for source in corpora}) < len(corpora):
            yield subject.problem(
                field,
                "must name each corpus once: a second entry would give the same samples again",
                advice="Name it once, with the sum of its weights.",
            )
        elif len(set(names := [source.name for source in corpora if source.name])) < len(names):
            yield subject.problem(
                field,
                "has two corpora of one name: what is printed could not say which of them it means",
                advice="Give one of them a name of its own.",
            )


def split_has_parts(subject: Subject) -> Iterator[Problem]:
    data = subject.config.data
    if min(data.split) < 0 or data.split[0] == 0:
        yield subject.problem(
            "data.split",
            "must be three weights of at least 0 for train, valid and test, train above 0: there is nothing to learn from",
            {"data.split": [(0.98, 0.02, 0.0)]},
        )
    elif subject.config.eval.interval is not None and data.valid is None and data.split[1] == 0 and not data.synthetic:
        yield subject.problem(
            "eval.interval",
            "asks for validation, but data.split gives no document to it and data.valid names no corpus",
            {
                "eval.interval": [None],
                "data.split": [(data.split[0] * 0.98, data.split[0] * 0.02, data.split[2])],
            },
        )


def skipped_samples_are_ranges(subject: Subject) -> Iterator[Problem]:
    given = subject.config.data.skip_samples
    if wrong := [pair for pair in given if not 0 <= pair[0] < pair[1]]:
        yield subject.problem(
            "data.skip_samples",
            f"must be ranges [first id, id after the last] from 0: {', '.join(str(list(pair)) for pair in wrong)} "
            "names no sample, so nothing would be left out",
            {"data.skip_samples": [[pair for pair in given if pair not in wrong]]},
        )


DATA_RULES: tuple[Rule, ...] = (
    corpora_have_names,
    split_has_parts,
    skipped_samples_are_ranges,
)
