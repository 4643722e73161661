"""What `benchmarks.mutants` draws, and what it leaves alone."""

from benchmarks.mutants import ROOT, draw, mutants_of

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


def test_a_seed_draws_the_same_lines_again() -> None:
    drawn = draw(ROOT, seed=3, count=20)
    assert drawn == draw(ROOT, seed=3, count=20)
    assert drawn != draw(ROOT, seed=4, count=20)
    assert len({(one.file, one.line) for one in drawn}) == 20
