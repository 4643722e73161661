"""What `benchmarks.mutants` draws, and what it leaves alone."""

from pathlib import Path

from benchmarks.mutants import PLACES, ROOT, draw, mutants_of

SOURCE = '''
"""A docstring: 1 + 1."""
LIMIT: "int | 3" = 12


def clip(values: list[int], strict: bool = True) -> int:
    if not strict and len(values) > LIMIT:
        raise ValueError(f"{len(values) + 1} values" + "!" * 3)
    values.sort()
    return values[0] / 2
'''

MUTATED = """
12 -> 13
True -> False
not strict -> (strict)
not strict and len(values) > LIMIT -> (not strict or len(values) > LIMIT)
len(values) > LIMIT -> (len(values) >= LIMIT)
values.sort() -> None
0 -> 1
values[0] / 2 -> (values[0] * 2)
2 -> 3
"""


def test_a_mutant_changes_one_expression_and_no_annotation_message_or_docstring() -> None:
    text = SOURCE.encode()
    found = mutants_of(SOURCE, "clip.py")
    assert sorted(f"{one.old(text).decode()} -> {one.instead}" for one in found) == sorted(MUTATED.split("\n")[1:-1])
    (sorting,) = (one for one in found if one.instead == "None")
    assert sorting.source(text, b"None") == text.replace(b"values.sort()", b"None")


def test_a_seed_draws_the_same_lines_again(tmp_path: Path) -> None:
    for place in PLACES:
        some = sorted((ROOT / place).glob("*.py"))[:5]
        (tmp_path / place).mkdir(parents=True)
        for path in some:
            (tmp_path / place / path.name).write_bytes(path.read_bytes())
    drawn = draw(tmp_path, seed=3, count=20)
    assert drawn == draw(tmp_path, seed=3, count=20)
    assert drawn != draw(tmp_path, seed=4, count=20)
    assert len({(one.file, one.line) for one in drawn}) == 20
    assert {Path(one.file).parent for one in drawn} == {Path(place) for place in PLACES}
