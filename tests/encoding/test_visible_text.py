"""What reaches a terminal or a log."""

from __future__ import annotations

import logging
import re
import sys
import unicodedata

import pytest

from howdah.encoding.visible_text import clean, clean_block, clean_line
from howdah.worker.logs import HumanFormatter, JsonFormatter

HOSTILE = "a\x1b[2Jb\x9b31mc\x07\u202ed\u2066e\u200ff\u2028g\x85h\rj\ud800k\U000e0041l\x7fm"
FORGED = "boom\n12:34:56 worker stopped  worker_id=other\r12:34:57 all is well\u202egnorw"


def test_no_control_format_or_direction_character_is_left() -> None:
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        shown = clean(character)
        if unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"} and character != "\n":
            assert shown != character
            assert shown.isprintable()
        if unicodedata.bidirectional(character) in {
            "LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI",
        }:  # fmt: skip
            assert shown != character
    assert clean("naïve 日本語 👩‍👩‍👧 שלום\n") == "naïve 日本語 👩‍👩‍👧 שלום\n"


def test_hostile_text_can_be_printed_and_read() -> None:
    shown = clean(HOSTILE)
    assert shown.encode()
    assert shown.isprintable()
    assert r"\x1b[2J" in shown
    assert r"\u202e" in shown
    assert clean_line("a\nb") == r"a\nb"
    assert clean_block("a\nb\x1b", "    ") == "    a\n    b\\x1b"


def record(raised: BaseException | None = None, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("x", logging.INFO, "", 1, "job failed: %s", (FORGED,), None)
    if raised is not None:
        made.exc_info = (type(raised), raised, None)
    vars(made).update(fields)
    return made


@pytest.mark.parametrize("color", [True, False])
def test_a_log_line_cannot_be_forged(color: bool) -> None:
    text = HumanFormatter(color=color).format(record(ValueError(FORGED), error=FORGED))
    starts = [line for line in re.split(r"[\n\r\x0b\x0c\x85\u2028]", text) if line[:1] != " "]
    assert len(starts) == 1
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b" not in bare
    assert not re.search("[\r\u202e]", bare)


def test_json_lines_are_escaped() -> None:
    text = JsonFormatter().format(record(ValueError(HOSTILE), error=HOSTILE))
    assert text.isascii()
    assert text.isprintable()
