"""Makes text from anywhere safe to show: the one place that decides which characters reach a terminal or a log.

Job types, errors and payloads may come from anyone. Control characters could change a terminal's state or forge a line
of a log; characters that change the writing direction or are invisible could show something else than is there."""

from __future__ import annotations

import re

# C0 and C1 controls except the newline; line and paragraph separators; marks, embeddings, overrides and isolates of
# the writing direction; invisible operators, tags and annotations; and lone surrogates, which cannot be encoded.
_UNSAFE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


def clean(text: str) -> str:
    """The text with unsafe characters escaped. Newlines stay."""
    return _UNSAFE.sub(_visible, text)


def clean_line(text: object) -> str:
    """The text on one line: newlines are escaped as well."""
    return clean(str(text)).replace("\n", "\\n")


def clean_block(text: str, indent: str) -> str:
    """Lines of text, each behind an indent, so that none can be taken for a line of another kind."""
    return "\n".join(indent + line for line in clean(text).split("\n"))


def _visible(found: re.Match[str]) -> str:
    character = found[0]
    return "    " if character == "\t" else ascii(character)[1:-1]
