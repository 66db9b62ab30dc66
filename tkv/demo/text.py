"""Real English text that comes with Python: the prose of its language reference."""

from __future__ import annotations

from collections.abc import Iterator

# Pages that are mostly prose, and about different things; the others follow.
_FIRST = ("execmodel", "objects", "import", "debugger", "formatstrings", "typesseq")
_LEAST_WORDS = 12


def passages() -> Iterator[str]:
    """The prose of the pages of the language reference, one page after the other, without headings, tables and code.

    Yields:
        The paragraphs of a page joined by spaces, lines unwrapped.

    Example:
        >>> next(passages())[:48]
        'A Python program is constructed from code blocks'
    """
    from pydoc_data.topics import topics

    names = [name for name in _FIRST if name in topics] + sorted(set(topics) - set(_FIRST))
    for name in names:
        text = " ".join(_prose(topics[name]))
        if text:
            yield text


def _prose(page: str) -> Iterator[str]:
    for paragraph in page.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line.strip()]
        indented = any(line.startswith((" ", "*", "-", "+", "|", "[")) for line in lines)
        if lines and not indented and len(paragraph.split()) >= _LEAST_WORDS and "::=" not in paragraph:
            yield " ".join(lines)
