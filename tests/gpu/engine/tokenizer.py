"""Owns the tokenizer: a token for each byte, one that begins a text, one that ends it."""

import codecs

BEGIN = 256
END = 257
VOCABULARY = 258


def encode(text: str) -> list[int]:
    """The tokens of a text; never none. A lone surrogate, which JSON has and UTF-8 has not, becomes a question mark."""
    return [BEGIN, *text.encode("utf-8", errors="replace")]


class Decoder:
    """Turns the tokens of one output into text, as far as they make up whole characters."""

    def __init__(self):
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(bytes([token])) if token < BEGIN else ""

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)
