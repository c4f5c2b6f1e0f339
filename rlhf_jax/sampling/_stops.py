"""Stop strings: found in the bytes of a row's tokens, wherever tokens begin and end."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

__all__ = ["StopFinder", "decode_text"]


class StopFinder:
    """Look for stop strings in one row's text, token by token.

    The match that counts is the one that is complete first, as if the bytes came one at a time; of
    two that are complete at the same byte, the longer one. So neither how the text is cut into
    tokens nor how many tokens come at once changes what is found.

    Args:
      stops: the strings, none of them empty.
      table: the bytes of each token id; ids beyond it have none.

    >>> finder = StopFinder(["\\n\\n"], [b"a\\n", b"\\nb"])
    >>> finder.feed([0, 0, 1, 0]), finder.text_end
    (3, 3)
    """

    def __init__(self, stops: Iterable[str], table: Sequence[bytes]):
        self._stops = [stop.encode() for stop in stops]
        self._keep = max(len(stop) for stop in self._stops) - 1
        self._table = table
        self._tail = b""
        self._bytes = 0
        self.text_end: int | None = None
        """Bytes before the match, once there is one."""

    def feed(self, tokens: Iterable[int]) -> int | None:
        """Take the row's next tokens.

        Returns:
          How many of them belong to the row: up to the one that completes a match; None without.
        """
        for count, token in enumerate(tokens, 1):
            new = spelled(token, self._table)
            window = self._tail + new
            start = self._bytes - len(self._tail)
            self._bytes += len(new)
            self._tail = window[max(len(window) - self._keep, 0) :]
            found = [(at + len(s), at) for s in self._stops if (at := window.find(s)) >= 0]
            if found:
                self.text_end = start + min(found)[1]
                return count
        return None


def spelled(token: int, table: Sequence[bytes]) -> bytes:
    """The bytes of a token id; a model's vocabulary may be larger than its tokenizer's."""
    return table[token] if token < len(table) else b""


def decode_text(tokens: Iterable[int], table: Sequence[bytes], end: int | None = None) -> str:
    """The text of some tokens.

    Args:
      tokens: token ids.
      table: the bytes of each.
      end: bytes before a stop string, or None for the whole text.

    Returns:
      The text up to ``end``. A last character that is incomplete, because the row was cut within
      it, is left out; bytes that are no UTF-8 become U+FFFD.

    >>> decode_text([0, 1], ["é".encode(), "é".encode()[:1]])
    'é'
    """
    data = b"".join(spelled(token, table) for token in tokens)[:end]
    # What stands before a stop string is followed by a whole character, so nothing is incomplete.
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=end is not None)
