"""Owns the thread that computes: one pass at a time, who asks first is served first, each prompt token counted."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from . import tokenizer
from .cache import Blocks, KvCache
from .model import CHUNK, Model

T = TypeVar("T")


@dataclass
class Sequence:
    """A prompt, what was generated after it, and how much of both is in the KV cache."""

    tokens: list[int]
    prompt_tokens: int
    blocks: Blocks
    cached: int = 0
    # Prompt tokens that went through the model here.
    computed: int = 0


class Runner:
    """The model with its cache, for asynchronous callers.

    A caller that is cancelled leaves a pass behind that may still run, and write to blocks that have another owner by
    then. That does no harm: passes run in the order in which they were asked for, so the new owner's writes come after.
    """

    def __init__(self, model: Model, cache: KvCache):
        self.cache = cache
        self.prompt_tokens_computed = 0
        self._model = model
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    async def compute_prompt(self, sequence: Sequence) -> None:
        """Brings the KV of the prompt but for its last token into the cache."""
        while sequence.cached < sequence.prompt_tokens - 1:
            end = min(sequence.cached + CHUNK, sequence.prompt_tokens - 1)
            await self._run(lambda: self._pass(sequence, end))

    async def next_token(self, sequence: Sequence, end_allowed: bool) -> int:
        """Runs the last token, and appends the likeliest to follow it."""
        token = await self._run(lambda: self._choose(sequence, end_allowed))
        sequence.tokens.append(token)
        return token

    async def to_bytes(self, blocks: list[int]) -> bytes:
        return await self._run(lambda: self.cache.to_bytes(blocks))

    async def from_bytes(self, blocks: list[int], content: bytearray) -> None:
        await self._run(lambda: self.cache.from_bytes(blocks, content))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _choose(self, sequence: Sequence, end_allowed: bool) -> int:
        logits = self._pass(sequence, len(sequence.tokens))
        # The token that ends a text is the last of the vocabulary.
        allowed = logits if end_allowed else logits[: tokenizer.END]
        return int(allowed.argmax())

    def _pass(self, sequence: Sequence, end: int):
        """One pass over the tokens from the first that is not cached up to `end`."""
        start = sequence.cached
        logits = self._model.forward(sequence.tokens[start:end], start, sequence.blocks.numbers, self.cache)
        of_prompt = min(end, sequence.prompt_tokens) - min(start, sequence.prompt_tokens)
        sequence.cached = end
        sequence.computed += of_prompt
        self.prompt_tokens_computed += of_prompt
        return logits
