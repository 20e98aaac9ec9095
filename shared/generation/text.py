"""Text of tokens that come one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_CONTEXT = 8  # tokens of the prompt that the text of the first may depend on


class TextStream:
    """Gives out text as soon as it is certain.

    A token may hold a part of a character only, and what it stands for may depend on
    the one before it (a leading space). Characters whose bytes are not all there wait.

    Example usage::

      >>> decode = lambda ids: bytes(ids).decode("utf-8", errors="replace")
      >>> stream = TextStream(decode)
      >>> [stream.push(byte) for byte in "né".encode()]
      ['n', '', 'é']

    Args:
      decode: text of ids.
      prompt: ids before the first.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()):
        self._decode = decode
        self._ids = list(map(int, prompt))[-_CONTEXT:]
        self._told = len(self._ids)  # ids whose text, `_before`, was given out
        # A character that ends after the prompt is given out when it is complete.
        self._before = decode(self._ids).rstrip("\ufffd")

    def push(self, token: int) -> str:
        """The text that is certain with one more token, often none."""
        self._ids.append(int(token))
        text = self._decode(self._ids)
        return "" if text.endswith("\ufffd") else self._rest(text)

    def close(self) -> str:
        """What was held back: of characters that never got complete, U+FFFD."""
        return self._rest(self._decode(self._ids))

    def _rest(self, text: str) -> str:
        rest = text[len(self._before) :]
        self._ids = self._ids[self._told :]
        self._told, self._before = len(self._ids), self._decode(self._ids)
        return rest
