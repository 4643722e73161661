"""Docstrings open as CONTRIBUTING.md says: functions with a verb in its base form, classes with a noun.

`verbs.txt` has the base forms that open docstrings here. Words that are as often a noun in that place (time, price, sum, group) are
not in it.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.documented import ROOT

VERBS = frozenset((Path(__file__).parent / "verbs.txt").read_text().split())
HEADLESS = frozenset(
    [
        "How",
        "It",
        "Its",
        "Nobody",
        "Of",
        "Somebody",
        "Something",
        "That",
        "What",
        "When",
        "Where",
        "Whether",
        "Which",
        "Who",
        "Whom",
        "Whose",
        "Why",
    ]
)
"""Openings that leave the sentence without a subject."""

NOUNS = frozenset(["Calls", "Changes", "Copies", "Counts", "Limits", "Lock", "Results", "Views"])
"""Words that are nouns at the head of a class, though they have the form of a verb."""

LEAST_SHARE_OF_VERBS = 0.9


@dataclass(frozen=True, slots=True)
class Opening:
    """The first word of a docstring, and its place."""

    place: str
    word: str
    is_class: bool


@cache
def openings() -> list[Opening]:
    """Return the first word of every docstring of a function or class of the product."""
    return [
        one
        for top in ("engine", "models", "launch")
        for path in sorted((ROOT / top).rglob("*.py"))
        for one in _of(path)
    ]


def _of(path: Path) -> Iterator[Opening]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (
            text := ast.get_docstring(node)
        ):
            place = f"{path.relative_to(ROOT)}:{node.body[0].lineno}"
            yield Opening(place, text.split()[0].strip("`*\"'.,:;"), isinstance(node, ast.ClassDef))


def third_person(verb: str) -> str:
    """Return a verb's form after "it"."""
    if verb.endswith(("s", "sh", "ch", "x", "z", "o")):
        return f"{verb}es"
    return f"{verb[:-1]}ies" if verb.endswith("y") and verb[-2] not in "aeiou" else f"{verb}s"


def test_no_docstring_opens_without_a_subject() -> None:
    assert not [one for one in openings() if one.word in HEADLESS]


def test_functions_open_with_a_verb() -> None:
    functions = [one for one in openings() if not one.is_class]
    others = [one for one in functions if not (one.word[:1].isupper() and one.word.lower() in VERBS)]
    assert len(others) <= (1 - LEAST_SHARE_OF_VERBS) * len(functions), others


def test_no_function_opens_in_the_third_person() -> None:
    forms = {third_person(verb).capitalize() for verb in VERBS}
    assert not [one for one in openings() if not one.is_class and one.word in forms]


def test_classes_open_with_a_noun() -> None:
    verbs = {form.capitalize() for verb in VERBS for form in (verb, third_person(verb))} - NOUNS
    assert not [one for one in openings() if one.is_class and one.word in verbs]


def test_the_list_of_verbs_is_sorted_and_has_no_word_twice() -> None:
    words = (Path(__file__).parent / "verbs.txt").read_text().split()
    assert words == sorted(set(words))
