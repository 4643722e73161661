"""Refuse unsupported file formats by name.

The message mostly has a command that converts the file to a supported format. Read as text, such a file would become one document
full of commas, braces or raw bytes. A format is recognised by the file name's ending, or by unambiguous content.
"""

import codecs
import csv
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from triaxis.engine.data.corpus.findings import BadInput, Findings, InputPlace, Reading
from triaxis.engine.data.corpus.pieces import Document, InputFile, Piece, field_of
from triaxis.engine.storage.elsewhere import pointer_of
from triaxis.engine.storage.json_text import parse_json
from triaxis.launch.prepare.streams import GZIP, ZSTANDARD, decompress_of

UNPACKERS = {".gz": "gzip -dc", ".zst": "zstd -dc", ".xz": "xz -dc", ".bz2": "bzip2 -dc", ".lz4": "lz4 -dc"}
"""Ending -> the command that decompresses a file to standard output."""
HEAD_BYTES = 2**16
"""Bytes read at a file's start to recognise its format; JSON whose first line is longer is taken for JSON lines."""
ROWS_COMPARED = 20
LEAST_ROWS = 3
"""Rows after the header needed to recognise a table with blanks beside its commas; prose has such commas too."""
LINES = (
    "import json; x = json.load(open(0, encoding='utf-8-sig')); "
    "[print(json.dumps(one)) for one in (x if isinstance(x, list) else [x])]"
)
ROWS = """python3 -c "import csv, json, sys; csv.field_size_limit(sys.maxsize); [print(json.dumps(row)) for row in \
csv.DictReader(open(0, newline='', encoding='utf-8-sig'), delimiter='{}')]\""""
ARROW = """python3 -c "import pyarrow as a, pyarrow.ipc as i, pyarrow.parquet as p, sys; name, to = sys.argv[1:]; \
read = i.open_file if open(name, 'rb').read(6) == b'ARROW1' else i.open_stream; \
p.write_table(read(a.OSFile(name)).read_all(), to)\""""
CONVERT = (
    "Its bytes or its commas would become one document. Convert it with\n  {command}\nand give {result} to --input."
)
TAKE_OUT = "Take its text out of it: of a .jsonl, each line is one document."
AS_IT_IS = "--format text takes it as it is."


@dataclass(frozen=True, slots=True)
class Refused:
    """The reader for a refused format, which adds every file to the findings.

    Attributes:
        title: format name, with its article.
        command: template for a command that converts the file; "" if there is none. Its fields are {file}, {result} and {unpack},
            a command that prints the file decompressed.
        result: template for the path of the converted file or folder, with the fields {file} and {stem}.
        advice: sentences to print after the command, or instead of one.
    """

    title: str
    command: str = ""
    result: str = ""
    advice: str = ""

    def refuse(self, file: InputFile, findings: Findings) -> None:
        """Add the file to the findings, with advice on how to convert it."""
        advice = self.advice or ("" if self.command else TAKE_OUT)
        if self.command:
            result = self.result.format(file=file.path, stem=file.path.with_suffix(""))
            name = shlex.quote(str(file.path))
            unpack = f"{UNPACKERS.get(file.path.suffix.lower(), 'cat')} < {name}"
            command = self.command.format(file=name, unpack=unpack, result=shlex.quote(result))
            advice = f"{CONVERT.format(command=command, result=result)} {advice}".strip()
        findings.add(
            BadInput.OTHER_FORMAT, InputPlace(str(file.path), detail=f"is {self.title}, which is not read"), advice
        )

    def pieces(self, file: InputFile, step: int, findings: Findings) -> Iterator[Piece]:
        """Add the file to the findings. It has no pieces."""
        self.refuse(file, findings)
        yield from ()

    def documents(self, piece: Piece, reading: Reading) -> Iterator[Document]:
        """Yield nothing, because a refused file has no pieces."""
        yield from ()


def _unpacked(ending: str, result: str = "{stem}") -> Refused:
    # By default the result has the file's name before compression, so that file may already exist.
    command = f"[ -e {{result}} ] || {UNPACKERS[ending]} < {{file}} > {{result}}"
    return Refused(f"compressed, a {ending}", command, result)


def _table(delimiter: str, name: str) -> Refused:
    return Refused(f"a table, {name}", f"{{unpack}} | {ROWS.format(delimiter)} > {{result}}", "{file}.jsonl", AS_IT_IS)


COMMAS, TABS = _table(",", "a .csv"), _table("\\t", "a .tsv")
SEMICOLONS = _table(";", "a .csv with semicolons")
ARCHIVE = Refused("an archive, a .tar", "mkdir {result} && tar -xf {file} -C {result}", "{file}.unpacked")
ZIP = Refused("an archive, a .zip", "python3 -m zipfile -e {file} {result}", "{file}.unpacked")
TABLE_OF_ARROW = Refused("a table of Arrow", f"{ARROW} {{file}} {{result}}", "{file}.parquet")
_AS_LINES = f'{{unpack}} | python3 -c "{LINES}" > {{result}}'
JSON_ARRAY = Refused("a JSON array and not lines", _AS_LINES, "{file}.jsonl")
JSON_OBJECT = Refused("a JSON object over several lines", _AS_LINES, "{file}.jsonl")
JSON_LINES = Refused(
    "text by its name and JSON lines by its content",
    advice=f"As text it would be one document of JSON. Give --format jsonl; {AS_IT_IS}",
)
PDF, PICKLE = Refused("a PDF"), Refused("a pickle of Python")
TABLES = {",": COMMAS, "\t": TABS, ";": SEMICOLONS}

REFUSED: dict[str, Refused] = {
    **{f".csv{packed}": COMMAS for packed in ("", *UNPACKERS)},
    **{f".tsv{packed}": TABS for packed in ("", *UNPACKERS)},
    **dict.fromkeys((".tar", *(f".tar{packed}" for packed in UNPACKERS), ".tgz", ".tbz2", ".txz"), ARCHIVE),
    ".zip": ZIP,
    ".xz": _unpacked(".xz"),
    ".bz2": _unpacked(".bz2"),
    ".lz4": _unpacked(".lz4"),
    ".arrow": TABLE_OF_ARROW,
    ".feather": TABLE_OF_ARROW,
}
"""Ending -> refused format; the longest matching ending decides, as in READERS."""

CONTENTS: tuple[tuple[int, bytes, Refused], ...] = (
    (0, GZIP, _unpacked(".gz", "{file}.unpacked")),
    (0, ZSTANDARD, _unpacked(".zst", "{file}.unpacked")),
    (0, b"\xfd7zXZ\0", _unpacked(".xz", "{file}.unpacked")),
    (0, b"BZh", _unpacked(".bz2", "{file}.unpacked")),
    (0, b"\x04\x22\x4d\x18", _unpacked(".lz4", "{file}.unpacked")),
    (0, b"PK\x03\x04", ZIP),
    (257, b"ustar", ARCHIVE),
    (
        0,
        b"PAR1",
        Refused("a .parquet by its content", advice="Give it a name that ends in .parquet, or --format parquet."),
    ),
    (0, b"ARROW1", TABLE_OF_ARROW),
    (0, b"\xff\xff\xff\xff", TABLE_OF_ARROW),
    (
        0,
        b"\x93NUMPY",
        Refused("an array of numpy", advice="If it holds tokens, end its name in .npy, or give --format tokens."),
    ),
    (
        0,
        b"MMIDIDX",
        Refused("an index of a corpus", advice="Its corpus is prepared: data.train names it without the ending."),
    ),
    (0, b"%PDF-", PDF),
    (0, b"\x89HDF", Refused("an HDF5 file")),
    (0, b"SQLite format 3\0", Refused("a database of SQLite")),
    (0, b"7z\xbc\xaf", Refused("an archive, a .7z")),
    (0, b"Rar!", Refused("an archive, a .rar")),
    (0, b"Obj\x01", Refused("a file of Avro")),
    (0, b"ORC", Refused("a file of ORC")),
    *((0, bytes([0x80, protocol]), PICKLE) for protocol in range(2, 6)),
)
"""Offset in bytes, magic bytes and format, from the formats' specifications."""
TEXT_FORMS: tuple[tuple[re.Pattern[bytes], Refused], ...] = (
    (re.compile(rb"%PDF-\d\.\d\s"), PDF),
    (re.compile(rb"WARC/\d\.\d+\r?\n"), Refused("an archive of the web, a WARC")),
    (re.compile(rb"\{\\rtf1\b"), Refused("a document of a word processor, an RTF")),
    # Pickle protocol 0: a dict, a list, an object with its arguments, or strings in a tuple; each is stored in the memo.
    (re.compile(rb"\(*(\([dl]p\d+\n|c[\w.]+\n\w+\np\d+\n\(|\([SV].*\np\d+\n)"), PICKLE),
)
"""First bytes of formats whose files may be plain text, from their specifications."""
NOT_IN_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")


def refused_file(file: InputFile) -> Refused | None:
    """Detect a file whose content contradicts its name; None for any other file.

    Such a file is a pointer (such as Git LFS's), or plain text named .gz or .zst.

    Raises:
        OSError: the file cannot be read.
    """
    if (pointer := pointer_of(file.path)) is not None:
        tool, command = pointer
        return Refused(f"a pointer of {tool} in place of the file", advice=f"Bring the file:  {command}")
    ending = file.path.suffix.lower()
    if ending not in (".gz", ".zst") or decompress_of(file.path) is None:
        return None
    with file.path.open("rb") as handle:
        is_text = _is_text(handle.read(HEAD_BYTES))
    advice = f"Is it the text, or a page about an error? Download it again, or leave {ending} out of its name."
    return Refused(f"not compressed, though its name ends in {ending}", advice=advice) if is_text else None


def refused_content(content: bytes | None) -> Refused | None:
    """Recognise a refused format by a file's first bytes; None if no such format is found.

    Content whose first HEAD_BYTES are valid text is never refused, because a text may begin with a format's letters.
    """
    head = (content or b"")[:HEAD_BYTES]
    refused = next((each for at, magic, each in CONTENTS if head.startswith(magic, at)), None)
    return None if refused is None or _is_text(head) else refused


def _is_text(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # a character may be cut at the end
    except UnicodeDecodeError:
        return False
    return not NOT_IN_TEXT.search(head)


def json_form(head: bytes) -> Refused | None:
    """Recognise a JSON array, or a JSON object over several lines, by the first line. None: the file may be JSON lines."""
    first, end_of_line, _ = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if first.startswith(b"["):
        return JSON_ARRAY
    is_open = end_of_line and first.startswith(b"{") and first.rstrip().endswith((b"{", b"[", b",", b":"))
    return JSON_OBJECT if is_open else None


def refused_text(content: bytes | None, file: InputFile) -> Refused | None:
    """Recognise a refused format in content to be read as text; None if no such format is found.

    If the user named the file's format, the content is not examined.
    """
    if file.options.format is not None or content is None:
        return None
    if (refused := next((each for form, each in TEXT_FORMS if form.match(content)), None)) is not None:
        return refused
    key, content = file.options.text_key, content.removeprefix(codecs.BOM_UTF8)
    is_json = content.lstrip().startswith(b"{")
    # A JSON record may be longer than the head.
    head = content if is_json else content[:HEAD_BYTES]
    lines = [line.decode(errors="replace") for line in head.split(b"\n", ROWS_COMPARED)]
    if len(lines) > ROWS_COMPARED or len(head) == HEAD_BYTES:
        lines = lines[:-1]
    filled = [line for line in lines if line.strip()]
    if re.match(r"\s*\[\s*\{", "".join(filled[:2])) and f'"{key}"' in "".join(filled[:ROWS_COMPARED]):
        return JSON_ARRAY
    if is_json and filled and all(_has_field(_object(line), key) for line in filled[:2]):
        return JSON_LINES
    if is_json and len(filled) > 1 and all(_object(line) is not None for line in filled[:ROWS_COMPARED]):
        names = ", ".join(map(repr, _object(filled[0]) or {}))
        advice = f"Its lines have no field {key!r}, but {names or 'none'}: name one with --format jsonl --text-key NAME. {AS_IT_IS}"
        return replace(JSON_LINES, advice=advice)
    return next((refused for each, refused in TABLES.items() if _is_table(lines, each, key)), None)


def _object(line: str) -> dict[str, Any] | None:
    """Parse a line as a JSON object; None if it is not one."""
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _has_field(value: dict[str, Any] | None, key: str) -> bool:
    try:
        field_of(value, key)
    except KeyError:
        return False
    return True


def _is_table(lines: Sequence[str], delimiter: str, key: str) -> bool:
    """Whether the lines are a header that contains `key`, and rows with as many fields as the header.

    Prose has blanks beside its commas. So if the header has such blanks, each column name must be a single word, and at least
    LEAST_ROWS rows must follow.
    """
    if not lines or key not in lines[0]:
        return False
    rows = list[list[str]]()
    with suppress(csv.Error):
        rows += csv.reader((f"{line}\n" for line in lines), delimiter=delimiter)
    header, rows = rows[0] if rows else [], [row for row in rows[1:-1] or rows[1:] if row][:ROWS_COMPARED]
    names = [name.strip() for name in header]
    is_plain = names == header or (len(rows) >= LEAST_ROWS and all(re.fullmatch(r"[\w.-]+", name) for name in names))
    is_header = key in names and len(names) > 1 and all(names) and is_plain
    return is_header and bool(rows) and all(len(row) == len(header) for row in rows)
