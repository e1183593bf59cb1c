"""Writes answers as vLLM's OpenAI server does: whole ones, and the events of a stream."""

import json
import time
from typing import Any

from .request import CHAT, Generation
from .tokenizer import Decoder

DONE = b"data: [DONE]\n\n"


class Answer:
    """One request's answer, token by token."""

    def __init__(self, request_id: str, generation: Generation, cached_tokens: int):
        self._generation = generation
        self._chat = generation.path == CHAT
        self._cached_tokens = cached_tokens
        self._decoder = Decoder()
        self._head = {"id": request_id, "created": int(time.time()), "model": generation.model}
        self._tokens: list[int] = []
        self._text = ""

    def push(self, token: int, finish: str | None) -> bytes:
        """Adds a token; returns its event."""
        text = self._decoder.push(token)
        if finish is not None:
            text += self._decoder.end()
        self._tokens.append(token)
        self._text += text
        shown = {"delta": {"content": text}} if self._chat else {"text": text}
        return self._event([self._choice(shown, [token], finish)])

    def opening(self) -> bytes:
        """What a stream begins with: for a chat a chunk that carries the role and no text."""
        if not self._chat:
            return b""
        return self._event([self._choice({"delta": {"role": "assistant", "content": ""}}, [], None)])

    def closing(self) -> bytes:
        """What a complete stream ends with."""
        usage = self._event([], usage=self._usage()) if self._generation.include_usage else b""
        return usage + DONE

    def whole(self, finish: str, handoff: dict[str, Any] | None) -> bytes:
        """Everything pushed, as one answer; vLLM writes `null` where there is no hand-off."""
        message = {"role": "assistant", "content": self._text}
        shown = {"message": message} if self._chat else {"text": self._text}
        answer = self._head | {
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [self._choice(shown, self._tokens, finish)],
            "usage": self._usage(),
            "kv_transfer_params": handoff,
        }
        return json.dumps(answer).encode()

    def _choice(self, shown: dict[str, Any], tokens: list[int], finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, **shown, "logprobs": None, "finish_reason": finish}
        if self._generation.return_token_ids:
            choice["token_ids"] = tokens
        return choice

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        chunk = self._head | {"object": kind, "choices": choices} | more
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        prompt, completion = len(self._generation.prompt), len(self._tokens)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }
