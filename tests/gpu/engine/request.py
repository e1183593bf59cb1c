"""Reads a generation request as vLLM would, and refuses what vLLM refuses; decoding is greedy, whatever is asked."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from . import tokenizer
from .refusal import bad_request

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# Output tokens where the request sets no limit.
DEFAULT_OUTPUT_TOKENS = 16
MOST_OUTPUT_TOKENS = 1_000_000


@dataclass(frozen=True)
class Generation:
    """What is asked of an engine: one sequence."""

    path: str
    model: str
    prompt: list[int]
    output_tokens: int
    fewest_tokens: int
    ignores_end: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    kv_transfer_params: dict[str, Any] | None

    def fingerprint(self) -> str:
        """Identity of the prompt: equal for equal ones, also in another process."""
        return hashlib.sha256(json.dumps(self.prompt).encode()).hexdigest()


def parse(path: str, body: bytes) -> Generation:
    fields = read_object(body)
    stream = read(fields, "stream", bool) or False
    output_tokens = read_output_tokens(path, fields)
    choices = read_count(fields, "n", 128) or 1
    if choices != 1:
        raise bad_request(f"this engine generates one sequence: n must be 1, got {choices}.")
    return Generation(
        path=path,
        model=required(fields, "model", str),
        prompt=read_messages(fields) if path == CHAT else read_prompt(fields),
        output_tokens=output_tokens,
        fewest_tokens=read_fewest_tokens(fields, output_tokens),
        ignores_end=read(fields, "ignore_eos", bool) or False,
        stream=stream,
        include_usage=read_include_usage(fields, stream),
        return_token_ids=read(fields, "return_token_ids", bool) or False,
        kv_transfer_params=read(fields, "kv_transfer_params", dict),
    )


def read_object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"Invalid JSON body: {error}") from None
    if not isinstance(fields, dict):
        raise bad_request("Invalid JSON body: not an object")
    return fields


def read(fields: dict[str, Any], name: str, kind: type) -> Any:
    """The field, or None where it is absent or null."""
    value = fields.get(name)
    if value is not None and not is_a(value, kind):
        raise bad_request(f"Invalid `{name}`: {kind.__name__} expected")
    return value


def required(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = read(fields, name, kind)
    if value is None:
        raise bad_request(f"Field required: `{name}`")
    return value


def is_a(value: Any, kind: type) -> bool:
    """In Python `True` is an int; here it is none."""
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def read_count(fields: dict[str, Any], name: str, most: int) -> int | None:
    """A whole number from 1 to `most`, if the field is there."""
    value = read(fields, name, int)
    if value is not None and value < 1:
        raise bad_request(f"{name} must be at least 1, got {value}.")
    if value is not None and value > most:
        raise bad_request(f"{name} is too large: {value}. This model supports at most {most}.")
    return value


def read_output_tokens(path: str, fields: dict[str, Any]) -> int:
    limit = read_count(fields, "max_tokens", MOST_OUTPUT_TOKENS)
    if path == CHAT:
        limit = read_count(fields, "max_completion_tokens", MOST_OUTPUT_TOKENS) or limit
    return limit or DEFAULT_OUTPUT_TOKENS


def read_fewest_tokens(fields: dict[str, Any], most: int) -> int:
    fewest = read(fields, "min_tokens", int) or 0
    if fewest < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {fewest}.")
    if fewest > most:
        raise bad_request(f"min_tokens must be less than or equal to max_tokens={most}, got {fewest}.")
    return fewest


def read_include_usage(fields: dict[str, Any], stream: bool) -> bool:
    options = read(fields, "stream_options", dict)
    if options is None:
        return False
    if not stream:
        raise bad_request("Stream options can only be defined when `stream=True`.")
    return read(options, "include_usage", bool) or False


def read_messages(fields: dict[str, Any]) -> list[int]:
    messages = required(fields, "messages", list)
    if not messages:
        raise bad_request("`messages` must not be empty")
    lines = []
    for message in messages:
        if not isinstance(message, dict):
            raise bad_request("Invalid `messages`: dict expected")
        lines.append(f"{required(message, 'role', str)}: {read_content(message)}\n")
    return tokenizer.encode("".join(lines) + "assistant: ")


def read_content(message: dict[str, Any]) -> str:
    """A message's text, whether it is a string, a list of parts or nothing."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad_request("Invalid `content`: str or list of parts expected")
    return "".join(read(part, "text", str) or "" for part in content)


def read_prompt(fields: dict[str, Any]) -> list[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not prompt:
        raise bad_request("Field required: `prompt`, a string or a list of token ids")
    if not all(is_a(token, int) and 0 <= token < tokenizer.VOCABULARY for token in prompt):
        raise bad_request(f"Invalid `prompt`: one string, or token ids from 0 to {tokenizer.VOCABULARY - 1}, expected")
    return prompt
