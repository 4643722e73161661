"""Formats that are refused by name, each with a command that makes of it what is read (no torch here).

Taken as text, a table would be one document of commas, and an archive one of its own bytes.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from triaxis.engine.data.corpus.findings import Findings, Kind, Place, Reading
from triaxis.engine.data.corpus.pieces import InputFile, Piece

UNPACKERS = {".gz": "gzip -dc", ".zst": "zstd -dc", ".xz": "xz -dc", ".bz2": "bzip2 -dc"}
"""Ending -> the command that decompresses a file to its output."""
LINES = (
    "import json; x = json.load(open(0, encoding='utf-8-sig')); "
    "[print(json.dumps(one)) for one in (x if isinstance(x, list) else [x])]"
)
ROWS = """python3 -c "import csv, json, sys; csv.field_size_limit(sys.maxsize); [print(json.dumps(row)) for row in \
csv.DictReader(open(0, newline='', encoding='utf-8-sig'), dialect='{}')]\""""
ARROW = """python3 -c "import pyarrow as a, pyarrow.ipc as i, pyarrow.parquet as p, sys; name, to = sys.argv[1:]; \
read = i.open_file if open(name, 'rb').read(6) == b'ARROW1' else i.open_stream; \
p.write_table(read(a.OSFile(name)).read_all(), to)\""""


@dataclass(frozen=True, slots=True)
class Refused:
    """The reader of a format that is not read.

    Attributes:
        command: writes `result`; both with {file}, the command with {result} too.
        result: path of a file or folder that is read, beside the file and unlike any that is there by habit.
    """

    command: str
    result: str

    def pieces(self, file: InputFile, text_key: str, step: int, findings: Findings) -> Iterator[Piece]:
        """Add the file to the findings; it has no pieces."""
        result = self.result.format(file=file.path, stem=file.path.with_suffix(""))
        command = self.command.format(file=shlex.quote(str(file.path)), result=shlex.quote(result))
        advice = f"Its bytes or its commas would become one document. Convert it with\n  {command}\nand give {result} to --input."
        findings.add(Kind.OTHER_FORMAT, Place(str(file.path), detail="is of a format that is not read"), advice)
        yield from ()

    def documents(self, piece: Piece, text_key: str, reading: Reading) -> Iterator[str]:
        """Yield nothing: no piece is of this format."""
        yield from ()


def lines_command(path: Path) -> tuple[str, str]:
    """Return the command that writes the values of a JSON array as lines, and the path that it writes.

    Args:
        path: of the array, or of one value; it may be compressed.
    """
    unpack, result = UNPACKERS.get(path.suffix.lower(), "cat"), f"{path}.jsonl"
    program = f'python3 -c "{LINES}"'
    return f"{unpack} < {shlex.quote(str(path))} | {program} > {shlex.quote(result)}", result


def _tables() -> Iterator[tuple[str, Refused]]:
    for ending, dialect in ((".csv", "excel"), (".tsv", "excel-tab")):
        for packed, unpack in {"": "cat", **UNPACKERS}.items():
            command = f"{unpack} < {{file}} | {ROWS.format(dialect)} > {{result}}"
            yield ending + packed, Refused(command, "{file}.jsonl")


def _unpacked(ending: str) -> Refused:
    # The result has the name that the file had before it was compressed, which may be there.
    return Refused(f"[ -e {{result}} ] || {UNPACKERS[ending]} < {{file}} > {{result}}", "{stem}")


_ARCHIVE = Refused("mkdir {result} && tar -xf {file} -C {result}", "{file}.unpacked")
_ARROW = Refused(f"{ARROW} {{file}} {{result}}", "{file}.parquet")

REFUSED: dict[str, Refused] = {
    **dict(_tables()),
    **dict.fromkeys((".tar", *(f".tar{packed}" for packed in UNPACKERS), ".tgz", ".tbz2", ".txz"), _ARCHIVE),
    ".zip": Refused("python3 -m zipfile -e {file} {result}", "{file}.unpacked"),
    ".xz": _unpacked(".xz"),
    ".bz2": _unpacked(".bz2"),
    ".arrow": _ARROW,
    ".feather": _ARROW,
}
"""The formats by the endings of their names; the longest that fits counts, as in READERS."""
