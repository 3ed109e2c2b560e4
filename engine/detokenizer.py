"""Token ids to text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

_utf8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one sequence, token by token.

    The deltas joined are the text of all the tokens, up to the first stop string. How tokens are dealt out
    to calls makes no difference, so pushing all tokens so far to a new one restores an old one. The work
    for a token depends neither on how many came before nor on the length of the prompt.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        """`token_bytes`: the UTF-8 of a token amid a text; it may be part of a character, or empty for a
        token that is not shown. `stop`: each non-empty. `prompt`: the output completes the character
        that it ends inside of, if it does, and shows nothing else of it.
        """
        self._bytes = token_bytes
        self._stop = stop
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self.stopped = False
        """A stop string was found: the sequence has ended."""
        self.num_tokens = 0
        """Tokens taken, the one that completed a stop string included, none after it."""
        self._decoder = _utf8("replace")
        self._decoder.decode(self._last_bytes(prompt))
        self._partial = self._completes_prompt = bool(self._decoder.getstate()[0])

    def _last_bytes(self, prompt: Sequence[int]) -> bytes:
        tail = b""
        for token in reversed(prompt):
            tail = self._bytes(token) + tail
            if len(tail) >= 3:  # an unfinished character is no longer
                break
        return tail

    def push(self, tokens: Sequence[int], ended: bool = False) -> str:
        """The text that is certain now. Tokens after a stop string are ignored.

        `ended`: the last token is a stop token, which counts but is not shown.
        """
        if ended:
            text = self.push(tokens[:-1])
            self.num_tokens += not self.stopped
            return text
        if not self._stop:
            self.num_tokens += len(tokens)
            return self._decode(b"".join(map(self._bytes, tokens)))
        deltas = []
        for token in tokens:
            if self.stopped:
                break
            self.num_tokens += 1
            deltas.append(self._release(self._decode(self._bytes(token))))
        return "".join(deltas)

    def finish(self) -> str:
        """The text withheld so far, once no token follows: an unfinished character is U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _decode(self, data: bytes, final: bool = False) -> str:
        if not self._partial:
            try:
                return data.decode()  # most tokens are whole characters; four times as fast
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data, final)
        self._partial = bool(self._decoder.getstate()[0])
        if text and self._completes_prompt:
            self._completes_prompt = False
            text = text.removeprefix(_REPLACEMENT)  # stands for the prompt's bytes
        return text

    def _release(self, text: str) -> str:
        """Of what is held and `text`, all but what a stop string may begin with; up to one if it is there."""
        text = self._held + text
        # The one that ends first, whatever the tokens: of those that end there, the longest.
        matches = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            self.stopped = True
            self._held = ""
            return text[: min(matches)[1]]
        released = min((_overlap(text, stop) for stop in self._stop), default=len(text))
        self._held = text[released:]
        return text[:released]


def _overlap(text: str, stop: str) -> int:
    """Where the longest end of `text` begins that is a beginning of `stop`; the length if there is none."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
