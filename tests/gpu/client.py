"""Owns the way to an engine or a gateway: one request on a connection of its own, its answer read to the last byte."""

import http.client
import json
import socket
from dataclasses import dataclass, field
from typing import Any

# Seconds without a byte.
PATIENCE = 120


class Unexpected(Exception):
    """An answer that is none, or not the one hoped for."""


@dataclass
class Output:
    """What was generated, however it was sent."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    completion_tokens: int | None = None


def get(address: str, path: str) -> str:
    status, content = exchange(address, "GET", path, None)
    if status != 200:
        raise Unexpected(f"GET {path}: {status} {content[:300]}")
    return content


def post(address: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    return exchange(address, "POST", path, body)


def exchange(address: str, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    try:
        connection.request(method, path, as_content(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def as_content(body: dict[str, Any] | None) -> bytes | None:
    return None if body is None else json.dumps(body).encode()


def generate(address: str, path: str, body: dict[str, Any]) -> Output:
    status, content = post(address, path, body)
    if status != 200:
        raise Unexpected(f"{status} {content[:300]}")
    return read_stream(content) if body.get("stream") else read_whole(content)


def read_whole(content: str) -> Output:
    answer = json.loads(content)
    (choice,) = answer["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Output(choice["token_ids"], text, choice["finish_reason"], answer["usage"]["completion_tokens"])


def read_stream(content: str) -> Output:
    *events, done, end = content.split("\n\n")
    if (done, end) != ("data: [DONE]", ""):
        raise Unexpected(f"a stream that does not end in [DONE] but in {content[-100:]!r}")
    output = Output()
    for event in events:
        add_event(output, json.loads(event.removeprefix("data: ")))
    return output


def add_event(output: Output, event: dict[str, Any]) -> None:
    for choice in event["choices"]:
        output.tokens += choice["token_ids"]
        output.text += choice["delta"]["content"] if "delta" in choice else choice["text"]
        output.finish = output.finish or choice["finish_reason"]
    if event.get("usage"):
        output.completion_tokens = event["usage"]["completion_tokens"]


def leave(address: str, path: str, body: dict[str, Any], after_bytes: int) -> None:
    """Sends a request and leaves when so much of its answer has come: 0, right after sending."""
    host, port = address.rsplit(":", 1)
    content = as_content(body)
    headers = {"host": address, "content-type": "application/json", "content-length": len(content)}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall("\r\n".join(lines).encode() + content)
        seen = 0
        while seen < after_bytes:
            piece = connection.recv(after_bytes - seen)
            if not piece:
                raise Unexpected("an answer that ended before its client left")
            seen += len(piece)
