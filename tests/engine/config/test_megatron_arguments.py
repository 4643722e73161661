"""Megatron-LM's arguments, beside its own parser.

`megatron_arity.txt` has each argument of the parser in core_v0.16.1, with its argparse `nargs`: none for a switch, = for one value.
"""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from triaxis.engine.config.names.megatron_arguments import ARGUMENTS, LISTS, READ, SWITCHES

WORDS = Path(__file__).with_name("megatron_arity.txt").read_text().split()
ARITY = {word.rstrip("=+*?3"): word[len(word.rstrip("=+*?3")) :] for word in WORDS}


def test_every_argument_of_its_parser_is_known_with_its_number_of_values() -> None:
    assert len(ARITY) == 680 and ARITY["rampup-batch-size"] == "3" and not ARITY.keys() - ARGUMENTS.keys()
    for name, nargs in ARITY.items():
        kind = ARGUMENTS[name].kind
        assert (kind in SWITCHES, kind in LISTS) == (nargs == "", nargs in ("+", "*", "3")), name


def test_the_types_are_those_of_its_configuration() -> None:
    """Megatron-LM makes arguments from the fields of these classes, whose names are the parsed values' names."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig  # slow

    theirs: dict[str, Any] = {each.name: each for each in fields(MLATransformerConfig)}
    arguments = [each for each in ARGUMENTS.values() if each.group in READ and each.dest in theirs]
    assert len(arguments) == 70
    of_kind = {
        "int": "int|float",
        "float": "float|int",
        "str": "str|Literal",
        "dtype": "dtype",
        "switch": "bool",
        "off": "bool",
    }
    for each in arguments:
        words = of_kind.get(each.kind, "List|Tuple|list|Callable|str|float")
        assert re.search(words, str(theirs[each.dest].type)), (each.name, theirs[each.dest].type)
