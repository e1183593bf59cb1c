"""Owns HTTP/1.1: reads requests, writes answers whole or as they come, and ends the work for a client that has left."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

LONGEST_HEAD = 64 * 1024
LONGEST_BODY = 16 * 1024 * 1024
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
    500: "Internal Server Error",
}


@dataclass(frozen=True)
class Request:
    """As it came; names of headers are in lower case, and of equal ones the last counts."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Response:
    """Content that is an iterator is sent in chunks, each as soon as it is there."""

    status: int
    content: bytes | AsyncIterator[bytes]
    kind: str = "application/json"


class Malformed(Exception):
    """A request that cannot be read; the connection ends."""


Handler = Callable[[Request], Awaitable[Response]]


class Connection:
    """One client's connection, request after request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler):
        self._reader = reader
        self._writer = writer
        self._handler = handler
        # The first byte of the next request, where it came while the client was watched.
        self._ahead = b""

    async def serve(self) -> None:
        try:
            while True:
                request = await self._read()
                await self._unless_left(self._answer(request))
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            pass  # the client has left
        except Malformed as error:
            await self._refuse(error)
        finally:
            self._writer.close()

    async def _answer(self, request: Request) -> None:
        response = await self._handler(request)
        echoed = request.headers.get("x-request-id")
        more = f"x-request-id: {echoed}\r\n" if echoed else ""
        if isinstance(response.content, bytes):
            content = b"" if request.method == "HEAD" else response.content
            self._writer.write(head(response, more + f"content-length: {len(response.content)}\r\n") + content)
            return await self._writer.drain()
        try:
            self._writer.write(head(response, more + "transfer-encoding: chunked\r\n"))
            async for piece in response.content:
                self._writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await self._writer.drain()
            self._writer.write(b"0\r\n\r\n")
            await self._writer.drain()
        finally:
            await response.content.aclose()

    async def _unless_left(self, work: Awaitable[None]) -> None:
        """Runs `work`; cancels it when the client leaves before it is done."""
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._reader.read(1))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not watching.exception() and watching.result():
                self._ahead = watching.result()
                await working
            if not working.done():
                raise EOFError
            working.result()
        finally:
            watching.cancel()
            working.cancel()
            await asyncio.gather(watching, working, return_exceptions=True)
            # It may have read something in the moment in which it was cancelled.
            if not watching.cancelled() and not watching.exception():
                self._ahead = watching.result()

    async def _read(self) -> Request:
        first, self._ahead = self._ahead, b""
        text = (first + await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *lines = text[:-4].split("\r\n")
        try:
            method, target, _ = line.split(" ")
            headers = {name.lower(): value.strip() for name, value in (field.split(":", 1) for field in lines)}
        except ValueError:
            raise Malformed("not HTTP") from None
        return Request(method, target.split("?")[0], headers, await self._read_body(headers))

    async def _read_body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return await self._read_chunks()
        length = headers.get("content-length", "0")
        if not length.isdigit():
            raise Malformed("content-length")
        if int(length) > LONGEST_BODY:
            raise Malformed("too long")
        return await self._reader.readexactly(int(length))

    async def _read_chunks(self) -> bytes:
        body = bytearray()
        while True:
            size = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
            if len(body) + size > LONGEST_BODY:
                raise Malformed("too long")
            if size == 0:
                while await self._reader.readuntil(b"\r\n") != b"\r\n":
                    pass  # a trailer
                return bytes(body)
            body += await self._reader.readexactly(size)
            await self._reader.readexactly(2)

    async def _refuse(self, error: Malformed) -> None:
        response = Response(400, str(error).encode(), "text/plain")
        self._writer.write(head(response, f"content-length: {len(response.content)}\r\nconnection: close\r\n"))
        self._writer.write(response.content)
        await asyncio.gather(self._writer.drain(), return_exceptions=True)


def head(response: Response, headers: str) -> bytes:
    line = f"HTTP/1.1 {response.status} {REASONS[response.status]}\r\n"
    return f"{line}content-type: {response.kind}\r\n{headers}\r\n".encode("latin-1")
