"""Parse the output of NVIDIA's tools into tables.

TOPOLOGY's output  ->  links(text): GPU number -> GPU number -> NV18, PIX, SYS, ...
QUERY's output     ->  uuids(text): GPU number -> UUID
"""

import re
from collections import Counter
from collections.abc import Mapping

TOPOLOGY = ("nvidia-smi", "topo", "-m")
QUERY = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d+)")


def uuids(text: str) -> dict[int, str]:
    """Parse the node's GPU UUIDs, without the prefix `GPU-`, as torch has them. Lines in another form are skipped."""
    found = {}
    for line in text.splitlines():
        number, _, uuid = (word.strip() for word in line.partition(","))
        if number.isdigit() and uuid.startswith("GPU-"):
            found[int(number)] = uuid.removeprefix("GPU-")
    return found


def links(text: str) -> dict[int, dict[int, str]]:
    """Parse `nvidia-smi topo -m`: GPU number -> GPU number -> link, such as NV18; {} without a link table."""
    columns: list[int] | None = None
    found: dict[int, dict[int, str]] = {}
    for line in _ESCAPES.sub("", text).splitlines():
        words = line.split()
        if not words or not (first := _GPU.fullmatch(words[0])):
            continue
        if columns is None:
            # Columns for network cards and affinities come after those for GPUs.
            columns = [int(match[1]) for word in words if (match := _GPU.fullmatch(word))]
            continue
        number = int(first[1])
        cells = zip(columns, words[1:], strict=False)
        found[number] = {column: link for column, link in cells if column != number}
    return found


def by_uuid(matrix: Mapping[int, Mapping[int, str]], uuid: Mapping[int, str]) -> dict[str, dict[str, str]]:
    """Replace GPU numbers in `matrix`, the result of `links`, by UUIDs.

    CUDA_VISIBLE_DEVICES changes GPU numbers, but not UUIDs.
    """
    return {
        uuid[row]: {uuid[column]: link for column, link in cells.items() if column in uuid}
        for row, cells in matrix.items()
        if row in uuid
    }


def summary(matrix: Mapping[int, Mapping[int, str]]) -> str:
    """Summarize a node's links in comparable words, such as `28 x NV18`."""
    counted = Counter(link for row, cells in matrix.items() for column, link in cells.items() if row < column)
    return ", ".join(f"{count} x {link}" for link, count in sorted(counted.items())) or "none"
