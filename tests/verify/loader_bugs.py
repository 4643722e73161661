"""Bugs of a loader that every layout shares, planted at run time: only who reads the corpus apart from it can see them."""

from collections.abc import Sequence
from dataclasses import replace

from triaxis.engine.data.documents import Documents
from triaxis.engine.data.epoch_index import EpochIndex
from triaxis.engine.data.loader import Batches, MicroBatch
from triaxis.engine.data.samples import DocumentPart, SampleStream


def the_last_label_of_a_row_is_its_first_token() -> None:
    """Plant labels made by rolling the row in place of reading one token more."""
    read = Batches._read_microbatch

    def rolled(self: Batches, sample_ids: list[int]) -> MicroBatch:
        microbatch = read(self, sample_ids)
        return replace(microbatch, labels=microbatch.tokens.roll(-1, dims=1))

    Batches._read_microbatch = rolled  # type: ignore[method-assign]


def the_last_label_of_a_row_is_not_counted() -> None:
    """Plant a mask that leaves out the label beyond the row."""
    read = Batches._read_microbatch

    def shorter(self: Batches, sample_ids: list[int]) -> MicroBatch:
        microbatch = read(self, sample_ids)
        loss_mask = microbatch.loss_mask.clone()
        loss_mask[:, -1] = False
        return replace(microbatch, loss_mask=loss_mask, num_tokens=int(loss_mask.sum()))

    Batches._read_microbatch = shorter  # type: ignore[method-assign]


def each_sample_begins_one_token_early() -> None:
    """Plant samples that overlap by two tokens in place of one."""
    parts_at = SampleStream.parts_at

    def early(self: SampleStream, index: EpochIndex, start: int, length: int) -> list[DocumentPart]:
        return parts_at(self, index, max(0, start - 1), length)

    SampleStream.parts_at = early  # type: ignore[method-assign]


def documents_end_one_token_late() -> None:
    """Plant boundaries that count the token before a document as its first."""
    of = Documents.of.__func__

    def late(cls: type[Documents], lengths: Sequence[tuple[int, ...]], *given: int) -> Documents:
        rows = [(row[0] + 1, row[1] - 1, *row[2:]) if len(row) > 1 and row[1] > 1 else row for row in lengths]
        return of(cls, rows, *given)

    Documents.of = classmethod(late)  # type: ignore[assignment, method-assign]
