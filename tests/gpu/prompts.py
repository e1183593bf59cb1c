"""Owns the requests that are sent: prompts of all kinds and lengths around the edges of blocks and chunks."""

import random
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = "tiny-llama"
BYTES = 256
# Blocks have 16 tokens, and prompts are computed in chunks of 512 tokens before their last.
LENGTHS = [1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 300, 511, 512, 513, 514, 700]
OUTPUT_TOKENS = 24
WORDS = "the cache of a prompt goes from one worker to another and not a block of it is lost on the way".split()


@dataclass(frozen=True)
class Case:
    """One request, but for whether it is streamed."""

    name: str
    path: str
    fields: dict[str, Any]

    def body(self, stream: bool) -> dict[str, Any]:
        streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return {"model": MODEL, "temperature": 0, "return_token_ids": True, **self.fields, **streamed}


def cases() -> list[Case]:
    """The same in every run."""
    chance = random.Random(5)
    return [*token_ids(chance), *texts(chance), *chats(chance), *limits(chance)]


def token_ids(chance: random.Random) -> list[Case]:
    return [
        Case(f"{length} token ids", COMPLETIONS, {"prompt": draw_ids(chance, length), "max_tokens": OUTPUT_TOKENS})
        for length in LENGTHS
    ]


def texts(chance: random.Random) -> list[Case]:
    shapes = {
        "an empty text": "",
        "one letter": "x",
        "other alphabets": "Straße, 数据, 🙂 and \u0000",
        "a text in a list": [draw_text(chance, 12)],
        "a long text": draw_text(chance, 80),
    }
    return [Case(name, COMPLETIONS, {"prompt": prompt, "max_tokens": OUTPUT_TOKENS}) for name, prompt in shapes.items()]


def chats(chance: random.Random) -> list[Case]:
    user = {"role": "user", "content": draw_text(chance, 20)}
    parts = [{"type": "text", "text": draw_text(chance, 6)}, {"type": "text", "text": "?"}]
    turns = [{"role": ("user", "assistant")[turn % 2], "content": draw_text(chance, 14)} for turn in range(7)]
    shapes = {
        "a chat": [user],
        "a chat with a system prompt": [{"role": "system", "content": draw_text(chance, 40)}, user],
        "a chat in parts": [{"role": "user", "content": parts}],
        "a conversation": turns,
        "an empty message": [{"role": "user", "content": None}],
    }
    return [
        Case(name, CHAT, {"messages": messages, "max_completion_tokens": OUTPUT_TOKENS})
        for name, messages in shapes.items()
    ]


def limits(chance: random.Random) -> list[Case]:
    """All spellings of the limit, and none."""
    messages = [{"role": "user", "content": draw_text(chance, 10)}]
    prompt = draw_text(chance, 10)
    return [
        Case("no limit", COMPLETIONS, {"prompt": prompt}),
        Case("one token", COMPLETIONS, {"prompt": prompt, "max_tokens": 1}),
        Case("a hundred tokens", COMPLETIONS, {"prompt": prompt, "max_tokens": 100, "ignore_eos": True}),
        Case("fewest tokens", COMPLETIONS, {"prompt": prompt, "max_tokens": 40, "min_tokens": 40}),
        Case("both limits", CHAT, {"messages": messages, "max_tokens": 30, "max_completion_tokens": 20}),
        Case("the old limit", CHAT, {"messages": messages, "max_tokens": 17}),
    ]


def draw_ids(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(BYTES) for _ in range(length)]


def draw_text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(words))
