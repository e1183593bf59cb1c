"""Owns the side channel over which a decode engine fetches KV blocks from a prefill engine, both ends.

One TCP connection a pull. The decode engine sends a frame: which hand-off it wants, and the layout of its own cache.
The prefill engine sends a frame: the layout, what the KV was computed from and how many bytes follow; then the bytes of
the tensors. The decode engine acknowledges with one byte when they are in its cache, and only then is the hand-off
used. A frame is a big-endian length of four bytes and so much JSON.
"""

import asyncio
import json
import struct
from dataclasses import dataclass
from typing import Any

from . import refusal
from .cache import KvLayout
from .lease import Lease, LeaseTable, PullRefused
from .runner import Runner

LONGEST_FRAME = 1024 * 1024
# Seconds for either end to do its next step; one that takes longer counts as gone. Long, as the step may have to wait
# for other sequences' passes, which take seconds on a slow CPU.
PATIENCE = 30.0
GOT_IT = b"\x06"
# What reading from a peer that misbehaves or goes away may raise.
BROKEN = (OSError, EOFError, asyncio.TimeoutError, ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class Handoff:
    """Where the KV of a prompt waits, and under what name."""

    engine_id: str
    request_id: str
    block_groups: list[list[int]]
    host: str
    port: int


async def send_frame(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    packed = json.dumps(content).encode()
    writer.write(struct.pack(">I", len(packed)) + packed)
    await writer.drain()


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    (length,) = struct.unpack(">I", await patiently(reader.readexactly(4)))
    if length > LONGEST_FRAME:
        raise ValueError(f"a frame of {length} bytes")
    content = json.loads(await patiently(reader.readexactly(length)))
    if not isinstance(content, dict):
        raise ValueError("a frame that is no object")
    return content


async def patiently(step):
    return await asyncio.wait_for(step, PATIENCE)


def describe(layout: KvLayout, blocks: int) -> dict[str, Any]:
    return {"dtype": str(layout.dtype), "shape": layout.shape(blocks)}


class SideChannel:
    """A prefill engine's end."""

    def __init__(self, leases: LeaseTable, runner: Runner):
        self.bytes_sent = 0
        self._leases = leases
        self._runner = runner

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except BROKEN:
            pass  # the other engine knows, and tells its client
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        question = await read_frame(reader)
        handoff = question["remote_request_id"]
        try:
            lease = self._leases.begin_pull(question["remote_engine_id"], handoff, question["remote_block_ids"])
        except PullRefused as refused:
            return await send_frame(writer, {"refused": str(refused)})
        arrived = False
        try:
            arrived = await self._send(lease, question, reader, writer)
        finally:
            if arrived:
                self._leases.finish_pull(handoff)
            else:
                self._leases.break_off_pull(handoff)

    async def _send(self, lease: Lease, question: dict[str, Any], reader, writer) -> bool:
        """Sends the KV; whether it arrived."""
        layout = self._runner.cache.layout
        description = describe(layout, len(lease.blocks.numbers))
        if question["layout"] != description:
            await send_frame(writer, {"refused": f"the blocks are {description}"})
            return False
        content = await self._runner.to_bytes(lease.blocks.numbers)
        of = {"prompt_tokens": lease.prompt_tokens, "prompt_fingerprint": lease.fingerprint}
        await send_frame(writer, {"layout": description, "bytes": len(content), **of})
        writer.write(content)
        await patiently(writer.drain())
        if await patiently(reader.readexactly(1)) != GOT_IT:
            return False
        self.bytes_sent += len(content)
        return True


class Puller:
    """A decode engine's end."""

    def __init__(self, runner: Runner):
        self.bytes_received = 0
        self._runner = runner

    async def pull(self, handoff: Handoff, fingerprint: str, blocks: list[int]) -> None:
        """Fills `blocks` with the KV of the prompt that has this fingerprint, or raises a Refusal."""
        try:
            reader, writer = await patiently(asyncio.open_connection(handoff.host, handoff.port))
        except (OSError, asyncio.TimeoutError) as error:
            raise refusal.unreachable_handoff(f"cannot connect: {error!r}") from None
        try:
            await self._fetch(handoff, fingerprint, blocks, reader, writer)
        except BROKEN as error:
            raise refusal.unreachable_handoff(f"connection lost: {error!r}") from None
        finally:
            writer.close()

    async def _fetch(self, handoff: Handoff, fingerprint: str, blocks: list[int], reader, writer) -> None:
        layout = self._runner.cache.layout
        description = describe(layout, len(blocks))
        question = {
            "remote_engine_id": handoff.engine_id,
            "remote_request_id": handoff.request_id,
            "remote_block_ids": handoff.block_groups,
            "layout": description,
        }
        await send_frame(writer, question)
        offer = await read_frame(reader)
        check_offer(offer, description, layout.byte_count(len(blocks)), fingerprint)
        content = bytearray(await patiently(reader.readexactly(offer["bytes"])))
        await self._runner.from_bytes(blocks, content)
        writer.write(GOT_IT)
        await writer.drain()
        self.bytes_received += len(content)


def check_offer(offer: dict[str, Any], description: dict[str, Any], byte_count: int, fingerprint: str) -> None:
    refused = offer.get("refused")
    if refused == "used":
        raise refusal.used_handoff()
    if refused == "expired":
        raise refusal.expired_handoff()
    if refused is not None:
        raise refusal.wrong_handoff(str(refused))
    if offer["layout"] != description or offer["bytes"] != byte_count:
        raise refusal.wrong_handoff(f"the blocks are {offer['layout']}, {offer['bytes']} bytes")
    if offer["prompt_fingerprint"] != fingerprint:
        raise refusal.wrong_handoff("the KV is of another prompt")
