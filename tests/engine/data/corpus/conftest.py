"""Text in many scripts."""

import random
import unicodedata

from tests.launch.prepare.conftest import in_process as in_process

SCRIPTS = (
    *(
        "LATIN",
        "GREEK",
        "CYRILLIC",
        "ARMENIAN",
        "HEBREW",
        "ARABIC",
        "DEVANAGARI",
        "BENGALI",
        "TAMIL",
        "TELUGU",
        "THAI",
        "LAO",
    ),
    *("TIBETAN", "MYANMAR", "GEORGIAN", "HANGUL", "ETHIOPIC", "CHEROKEE", "KHMER", "MONGOLIAN", "HIRAGANA", "KATAKANA"),
    *("CJK", "SINHALA", "MATHEMATICAL", "EMOJI"),
)
EMOJI = [*range(0x1F300, 0x1F5FF), *range(0x1F600, 0x1F64F), 0x200D, 0xFE0F]
SPACES = (" ", " ", " ", " ", "  ", "\n", "\t", "\u3000", "\u00a0", "\r\n", "\n\n")
ENDINGS = ("", "", "", ",", ".", "!", "…", "'s", "-", "؟", "。", "123", "١٢", "½", "\u0301", "\u200b")


def letters() -> dict[str, list[str]]:
    """Characters of each script, by their names in the Unicode database."""
    found: dict[str, list[str]] = {script: [] for script in SCRIPTS}
    for point in (
        *range(0x21, 0x3400),
        *range(0x4E00, 0x9FFF, 7),
        *range(0xAC00, 0xD7A3, 11),
        *range(0x1D400, 0x1D7FF),
    ):
        script = unicodedata.name(chr(point), "").partition(" ")[0]
        if script in found and unicodedata.category(chr(point))[0] in "LM":
            found[script].append(chr(point))
    found["EMOJI"] = [chr(point) for point in EMOJI]
    return found


def many_scripts(num_bytes: int) -> list[str]:
    """Documents of about 2 kB in many scripts, the same on every machine of one Unicode version."""
    draw = random.Random(7)
    characters = letters()
    assert all(characters.values())
    texts: list[str] = []
    total = 0
    while total < num_bytes:
        words = []
        for _ in range(150):
            script = characters[draw.choice(SCRIPTS)]
            words += [*draw.choices(script, k=draw.randint(1, 9)), draw.choice(ENDINGS), draw.choice(SPACES)]
        texts.append("".join(words))
        total += len(texts[-1].encode())
    return texts
