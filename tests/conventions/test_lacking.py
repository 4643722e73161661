"""One rule for tests on a machine that lacks something, and only `.ci/run` is strict."""

import re
from pathlib import Path

import pytest

from tests.lacking import STRICT, VARIABLE, give_up, need_package, skip_where

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("value", "outcome"), [(STRICT, pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_what_is_lacking_skips_and_fails_where_ci_is_strict(
    monkeypatch: pytest.MonkeyPatch, value: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(outcome, match="apt-get install it"):
        give_up("it is missing (apt-get install it)")
    with pytest.raises(outcome, match=r"no_such_package\.part is not installed: pip install it"):
        need_package("no_such_package.part", "pip install it")
    need_package("pytest", "pip install it")
    assert skip_where(True, "it is missing").args == (value != STRICT,)
    assert skip_where(False, "it is missing").args == (False,)


def test_our_ci_is_strict() -> None:
    assert f"export {VARIABLE}={STRICT}\n" in (ROOT / ".ci" / "run").read_text()


def test_no_test_has_a_rule_of_its_own() -> None:
    """A test that looks at CI, or skips for want of root, a program or a package, does so through `tests/lacking.py`."""
    rule = re.compile(
        r"""environ\W+(get\()?["']CI["']|importorskip\(["'](transformers|megatron)|["']CI["'] (not )?in os"""
    )
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py") if rule.search(path.read_text())}
    assert own <= {"tests/conventions/test_lacking.py"}
