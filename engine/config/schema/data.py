"""The `data` section."""

from typing import Annotated, Literal

from pydantic import Field

from triaxis.engine.config.schema.section import LAYOUT, MEANT, Section
from triaxis.engine.config.values.counts import Count
from triaxis.engine.config.values.places import LocalPath, TokenizerName
from triaxis.engine.config.values.sources import Sources

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

    @property
    def reads_documents(self) -> bool:
        """Whether a run's attention, positions or loss depends on where documents end."""
        return self.attention == "within" or self.positions == "document" or not self.count_document_starts
