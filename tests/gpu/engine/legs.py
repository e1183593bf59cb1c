"""The story of a generation request: read, checked, its prompt computed or its KV fetched, its tokens sent."""

import enum
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

from . import refusal, request, tokenizer
from .answer import Answer
from .cache import BlockPool, Blocks
from .lease import LeaseTable
from .refusal import Refusal
from .request import Generation
from .runner import Runner, Sequence
from .transfer import Handoff, Puller, SideChannel
from .web import Request, Response

TP_SIZE = 1
EVENT_STREAM = "text/event-stream; charset=utf-8"
ID_KINDS = {request.CHAT: "chatcmpl", request.COMPLETIONS: "cmpl"}
# The members of a hand-off's kv_transfer_params, and what each must be.
HANDOFF_MEMBERS = {
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_block_ids": list,
    "remote_host": str,
    "remote_port": int,
    "tp_size": int,
}


class Role(enum.Enum):
    """What an engine does with a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


@dataclass
class Counts:
    """Since the engine started; each generation request ends in exactly one of answered, aborted and the refusals."""

    requests: int = 0
    running: int = 0
    answered: int = 0
    aborted: int = 0
    refused_missing_handoff: int = 0
    refused_wrong_handoff: int = 0
    refused_used_handoff: int = 0
    refused_expired_handoff: int = 0
    refused_unreachable_handoff: int = 0
    refused_not_a_prefill_leg: int = 0
    refused_bad_request: int = 0
    output_tokens: int = 0
    # Prompt tokens computed beyond those that the engine must: of a prompt that was handed off, beyond the last.
    recomputed: int = 0


@dataclass
class Engine:
    """What all requests to one engine share."""

    role: Role
    engine_id: str
    model: str
    longest: int
    runner: Runner
    pool: BlockPool
    leases: LeaseTable
    side_channel: SideChannel
    puller: Puller
    # Host and port under which a decode engine reaches the side channel; known once it listens.
    address: tuple[str, int] = ("", 0)
    about: dict[str, Any] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    def state(self) -> dict[str, Any]:
        """The counters, by the names that the simulated engines use too."""
        counts, leases = asdict(self.counts), self.leases.counts
        refused_handoffs = sum(count for name, count in counts.items() if name.endswith("_handoff"))
        return {
            "role": self.role.value,
            "engine_id": self.engine_id,
            **self.about,
            **counts,
            # A decode engine computes the last token of each prompt.
            "prompt_tokens_computed": self.runner.prompt_tokens_computed,
            "refused_handoffs": refused_handoffs,
            **asdict(leases),
            "blocks_unpulled": leases.blocks_issued - leases.blocks_pulled,
            "blocks_used": self.pool.used,
            "kv_bytes_sent": self.side_channel.bytes_sent,
            "kv_bytes_received": self.puller.bytes_received,
        }

    async def serve(self, asked: Request) -> Response:
        """Serves one request to a generation path. Cancelled, as when the client leaves, it counts as aborted."""
        self.counts.requests += 1
        job = Job(self)
        try:
            return await job.run(asked)
        except Refusal as refused:
            job.end(refused.count)
            return Response(refused.status, refused.content())
        except BaseException:
            job.end("aborted")
            raise


class Job:
    """One request on its way through the engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._blocks: Blocks | None = None
        self._ended = False
        engine.counts.running += 1

    def end(self, how: str) -> None:
        """Counts the request under `how` and frees what it holds; only the first call does anything."""
        if self._ended:
            return
        self._ended = True
        counts = self._engine.counts
        counts.running -= 1
        setattr(counts, how, getattr(counts, how) + 1)
        if self._blocks is not None:
            self._blocks.free()

    async def run(self, asked: Request) -> Response:
        engine = self._engine
        generation = request.parse(asked.path, asked.body)
        self._check(generation)
        request_id = f"{ID_KINDS[asked.path]}-{asked.headers.get('x-request-id') or uuid.uuid4().hex}"
        if engine.role is Role.PREFILL:
            return await self._prefill_leg(generation, request_id)
        if engine.role is Role.DECODE:
            # A bad hand-off is a status, so the blocks are fetched before the headers of a stream.
            sequence = await self._fetch_prompt(generation)
            return await self._respond(generation, request_id, sequence, demanded=1)
        sequence = await self._reserve(generation, generation.output_tokens)
        return await self._respond(generation, request_id, sequence, demanded=len(generation.prompt))

    def _check(self, generation: Generation) -> None:
        engine = self._engine
        if generation.model != engine.model:
            raise refusal.unknown_model(generation.model)
        wanted = len(generation.prompt) + (1 if engine.role is Role.PREFILL else generation.output_tokens)
        if wanted > engine.longest:
            raise refusal.bad_request(
                f"This model's maximum context length is {engine.longest} tokens. However, your request has "
                f"{len(generation.prompt)} input tokens and asks for {wanted - len(generation.prompt)} more."
            )

    async def _reserve(self, generation: Generation, output_tokens: int) -> Sequence:
        """Takes blocks for the prompt and all that may be generated but the last token, which nothing attends to."""
        length = len(generation.prompt) + output_tokens - 1
        self._blocks = await self._engine.pool.reserve(self._block_count(length))
        return Sequence(list(generation.prompt), len(generation.prompt), self._blocks)

    def _block_count(self, tokens: int) -> int:
        return -(-tokens // self._engine.runner.cache.layout.block_tokens)

    async def _prefill_leg(self, generation: Generation, request_id: str) -> Response:
        """Computes the prompt and one token, and hands the KV off, unless that token was the end."""
        check_prefill_leg(generation)
        sequence = await self._reserve(generation, 1)
        answer = Answer(request_id, generation, 0)
        finish = "length"
        async for token, finish in self._tokens(generation, sequence, len(generation.prompt)):
            answer.push(token, finish)
        handoff = self._hand_off(generation, request_id) if finish == "length" else None
        self.end("answered")
        return Response(200, answer.whole(finish, handoff))

    def _hand_off(self, generation: Generation, request_id: str) -> dict[str, Any]:
        """The prompt's blocks go under a lease."""
        engine = self._engine
        blocks = self._blocks.split(self._block_count(len(generation.prompt)))
        numbers = list(blocks.numbers)
        handoff = engine.leases.issue(request_id, blocks, len(generation.prompt), generation.fingerprint())
        host, port = engine.address
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [numbers],
            "remote_engine_id": engine.engine_id,
            "remote_request_id": handoff,
            "remote_host": host,
            "remote_port": port,
            "tp_size": TP_SIZE,
        }

    async def _fetch_prompt(self, generation: Generation) -> Sequence:
        """Takes the hand-off over. Left to compute is the prompt's last token, whose logits did not come along."""
        handoff = read_handoff(generation.kv_transfer_params)
        sequence = await self._reserve(generation, generation.output_tokens)
        blocks = self._blocks.numbers[: self._block_count(len(generation.prompt))]
        await self._engine.puller.pull(handoff, generation.fingerprint(), blocks)
        sequence.cached = len(generation.prompt) - 1
        return sequence

    async def _respond(self, generation: Generation, request_id: str, sequence: Sequence, demanded: int) -> Response:
        answer = Answer(request_id, generation, len(generation.prompt) - demanded)
        if generation.stream:
            return Response(200, self._events(generation, answer, sequence, demanded), EVENT_STREAM)
        finish = "length"
        async for token, finish in self._tokens(generation, sequence, demanded):
            answer.push(token, finish)
        self.end("answered")
        return Response(200, answer.whole(finish, None))

    async def _events(
        self, generation: Generation, answer: Answer, sequence: Sequence, demanded: int
    ) -> AsyncIterator[bytes]:
        try:
            opening = answer.opening()
            async for token, finish in self._tokens(generation, sequence, demanded):
                yield opening + answer.push(token, finish)
                opening = b""
            yield answer.closing()
            self.end("answered")
        finally:
            self.end("aborted")

    async def _tokens(
        self, generation: Generation, sequence: Sequence, demanded: int
    ) -> AsyncIterator[tuple[int, str | None]]:
        """Each token and, with the last, how the output ends."""
        runner, counts = self._engine.runner, self._engine.counts
        most = 1 if self._engine.role is Role.PREFILL else generation.output_tokens
        await runner.compute_prompt(sequence)
        for number in range(1, most + 1):
            end_allowed = number > generation.fewest_tokens
            token = await runner.next_token(sequence, end_allowed)
            counts.output_tokens += 1
            if number == 1:
                counts.recomputed += sequence.computed - demanded
            ended = token == tokenizer.END and not generation.ignores_end
            finish = "stop" if ended else "length" if number == most else None
            yield token, finish
            if finish is not None:
                return


def check_prefill_leg(generation: Generation) -> None:
    """Whether a prefill engine runs this request."""
    params = generation.kv_transfer_params
    if params is None:
        raise refusal.not_a_prefill_leg("no kv_transfer_params")
    if params.get("do_remote_decode") is not True:
        raise refusal.not_a_prefill_leg("do_remote_decode is not true")
    if params.get("do_remote_prefill") is True:
        raise refusal.not_a_prefill_leg("do_remote_prefill is true as well")
    if generation.stream:
        raise refusal.not_a_prefill_leg("stream is true")
    if generation.output_tokens != 1:
        raise refusal.not_a_prefill_leg("more than one token to generate")


def read_handoff(params: dict[str, Any] | None) -> Handoff:
    """The hand-off that came with a request to a decode engine."""
    if params is None or params.get("do_remote_prefill") is not True:
        raise refusal.missing_handoff()
    if params.get("do_remote_decode") is not False:
        raise refusal.wrong_handoff("do_remote_decode is not false")
    for name, kind in HANDOFF_MEMBERS.items():
        if not request.is_a(params.get(name), kind):
            raise refusal.wrong_handoff(f"got invalid KVTransferParams: `{name}`, {kind.__name__} expected")
    if params["tp_size"] != TP_SIZE:
        raise refusal.wrong_handoff(f"tp_size {params['tp_size']} is not the remote's")
    return Handoff(
        engine_id=params["remote_engine_id"],
        request_id=params["remote_request_id"],
        block_groups=params["remote_block_ids"],
        host=params["remote_host"],
        port=params["remote_port"],
    )
