"""Owns the leases on hand-offs: issued once, pulled once, expired in time.

A hand-off that is being pulled cannot be pulled by another, nor expire; a pull that broke off puts it back.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from .cache import Blocks

# Ended hand-offs that are remembered, to tell "used" and "expired" from "never heard of".
REMEMBERED = 65_536


class PullRefused(Exception):
    """Its words go over the wire: `used`, `expired`, or what is wrong with the hand-off."""


@dataclass
class Lease:
    """The KV of one prompt, waiting."""

    blocks: Blocks
    prompt_tokens: int
    fingerprint: str
    deadline: float
    being_pulled: bool = False


@dataclass
class LeaseCounts:
    """Totals since the engine started."""

    handoffs_issued: int = 0
    handoffs_consumed: int = 0
    handoffs_expired: int = 0
    blocks_issued: int = 0
    blocks_pulled: int = 0


class LeaseTable:
    """All leases of an engine."""

    def __init__(self, engine_id: str, seconds: float):
        self.counts = LeaseCounts()
        self._engine_id = engine_id
        self._seconds = seconds
        self._held: dict[str, Lease] = {}
        self._ends: OrderedDict[str, str] = OrderedDict()

    def issue(self, stem: str, blocks: Blocks, prompt_tokens: int, fingerprint: str) -> str:
        """Puts blocks under a lease; returns the hand-off's id, `stem` and a serial number: none is issued twice."""
        loop = asyncio.get_running_loop()
        handoff = f"{stem}-{self.counts.handoffs_issued:08x}"
        self.counts.handoffs_issued += 1
        self.counts.blocks_issued += len(blocks.numbers)
        self._held[handoff] = Lease(blocks, prompt_tokens, fingerprint, loop.time() + self._seconds)
        loop.call_later(self._seconds, self._expire, handoff)
        return handoff

    def begin_pull(self, engine_id: str, handoff: str, block_groups: list[list[int]]) -> Lease:
        if engine_id != self._engine_id:
            raise PullRefused("remote_engine_id is not this engine's")
        lease = self._held.get(handoff)
        if lease is None:
            raise PullRefused(self._ends.get(handoff, "no such remote_request_id"))
        if lease.being_pulled:
            raise PullRefused("used")
        if block_groups != [lease.blocks.numbers]:
            raise PullRefused("remote_block_ids are not those of the request")
        lease.being_pulled = True
        return lease

    def finish_pull(self, handoff: str) -> None:
        """The other engine has the KV: the blocks are free again, and the id is worth nothing from now on."""
        self.counts.handoffs_consumed += 1
        self.counts.blocks_pulled += self._end(handoff, "used")

    def break_off_pull(self, handoff: str) -> None:
        lease = self._held[handoff]
        lease.being_pulled = False
        if lease.deadline <= asyncio.get_running_loop().time():
            self._expire(handoff)

    def _expire(self, handoff: str) -> None:
        lease = self._held.get(handoff)
        if lease is None or lease.being_pulled:
            return
        self.counts.handoffs_expired += 1
        self._end(handoff, "expired")

    def _end(self, handoff: str, how: str) -> int:
        """Frees the blocks and remembers how it ended; returns how many they were."""
        blocks = self._held.pop(handoff).blocks
        count = len(blocks.numbers)
        blocks.free()
        self._ends[handoff] = how
        if len(self._ends) > REMEMBERED:
            self._ends.popitem(last=False)
        return count
