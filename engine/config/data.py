"""The `data` section and its rules."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from triaxis.engine.config.counts import Count
from triaxis.engine.config.places import LocalPath, TokenizerName
from triaxis.engine.config.problem import Problem, Rule, Subject
from triaxis.engine.config.section import LAYOUT, MEANT, Section
from triaxis.engine.config.sources import Sources

AttentionScope = Literal["across", "within"]
PositionOrigin = Literal["sample", "document"]


class DataConfig(Section):
    """The corpora and tokenizer that a run's tokens come from, and how document ends affect attention, positions and loss."""

    train: Annotated[Sources, MEANT] = Field(
        default_factory=list,
        description="corpora for training: a path, or [{path: data/web, weight: 0.7, name: web}, ...]",
    )
    valid: Annotated[Sources | None, MEANT] = Field(
        None, description="corpora for validation, as in `train`; null: cut from `train` by `split`"
    )
    split: Annotated[tuple[float, float, float], MEANT] = Field(
        (0.98, 0.02, 0.0), description="shares of the documents for train, valid, test"
    )
    cache_dir: Annotated[LocalPath | None, LAYOUT] = Field(
        None, description="folder of index caches; null: next to each corpus"
    )
    # Only a path: its content is compared with the checkpoint separately (`engine/checkpoint/resume.py`).
    tokenizer: Annotated[TokenizerName | None, LAYOUT] = Field(
        None, description="`bytes` or a path (docs/data.md); null: what the corpora record, else bytes"
    )
    synthetic: Annotated[bool, MEANT] = Field(
        False, description="random tokens instead of a corpus; each sample is a function of (seed, sample id)"
    )
    synthetic_document_length: Annotated[int | None, MEANT] = Field(
        None, gt=0, description="mean tokens of a document of synthetic data; null: each sample is one document"
    )
    attention: Annotated[AttentionScope, MEANT] = Field(
        "across",
        description="across: tokens see all before them in the sample; within: only those of their own document",
    )
    positions: Annotated[PositionOrigin, MEANT] = Field(
        "sample", description="positions count from the start of the sample, or of each document"
    )
    count_document_starts: Annotated[bool, MEANT] = Field(
        True, description="the loss counts a document's first token, predicted from the end of the document before it"
    )
    skip_samples: Annotated[list[tuple[Count, Count]], MEANT] = Field(
        default_factory=list, description="training samples to leave out: [[first id, id after the last], ...]"
    )

    @property
    def tokenizer_name(self) -> str:
        """The run's tokenizer as a name or path; use it only after `triaxis.engine.data.run_tokenizer` has filled it in."""
        assert self.tokenizer is not None, "it is named before the first text"
        return self.tokenizer


def reads_documents(data: DataConfig) -> bool:
    """Whether a run's attention, positions or loss depends on where documents end."""
    return data.attention == "within" or data.positions == "document" or not data.count_document_starts


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
