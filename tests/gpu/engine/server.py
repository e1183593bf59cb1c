"""Owns one running engine: its parts put together, its two ports, its paths."""

import asyncio
import json
import pathlib
import uuid
from dataclasses import dataclass
from typing import Any

import torch

from .cache import BlockPool, KvCache
from .lease import LeaseTable
from .legs import ID_KINDS, Engine, Role
from .model import Model, Shape
from .runner import Runner
from .tokenizer import VOCABULARY
from .transfer import Puller, SideChannel
from .web import LONGEST_HEAD, Connection, Request, Response


@dataclass(frozen=True)
class Settings:
    """How an engine is started."""

    role: Role
    device: torch.device
    # Of the API and the side channel; port 0 takes a free one.
    host: str = "127.0.0.1"
    port: int = 0
    side_channel_port: int = 0
    model: str = "tiny-llama"
    dtype: torch.dtype = torch.float32
    block_tokens: int = 16
    kv_blocks: int = 2048
    # Tokens of prompt and output together.
    longest: int = 4096
    # Seconds that a hand-off is held for its decode.
    lease: float = 30.0


class Server:
    """An engine that listens."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self.engine = build(settings)
        self.address = ""
        self._listening: list[asyncio.AbstractServer] = []

    async def start(self) -> None:
        settings, engine = self._settings, self.engine
        channel = await asyncio.start_server(engine.side_channel.serve, settings.host, settings.side_channel_port)
        engine.address = (settings.host, port_of(channel))
        api = await asyncio.start_server(self._connect, settings.host, settings.port, limit=LONGEST_HEAD)
        self.address = f"{settings.host}:{port_of(api)}"
        self._listening = [channel, api]

    def stop(self) -> None:
        """Takes no further connections."""
        for listening in self._listening:
            listening.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Connection(reader, writer, self._route).serve()

    async def _route(self, request: Request) -> Response:
        if request.path in ID_KINDS:
            return await self.engine.serve(request) if request.method == "POST" else detail(405, "Method Not Allowed")
        if request.method not in ("GET", "HEAD"):
            return detail(404, "Not Found")
        if request.path == "/health":
            return Response(200, b"")
        if request.path == "/v1/models":
            return as_json(self._models())
        if request.path == "/__state":
            return as_json(self.engine.state())
        return detail(404, "Not Found")

    def _models(self) -> dict[str, Any]:
        name = self.engine.model
        model = {"id": name, "object": "model", "created": 0, "owned_by": "pd-router", "root": name, "parent": None}
        return {"object": "list", "data": [model | {"max_model_len": self.engine.longest}]}


def build(settings: Settings) -> Engine:
    model = Model(Shape(VOCABULARY), settings.device, settings.dtype)
    layout = model.shape.kv_layout(settings.block_tokens, settings.dtype)
    # One more than are given out: block 0 is nobody's.
    runner = Runner(model, KvCache(layout, settings.kv_blocks + 1, settings.device))
    engine_id = uuid.uuid4().hex
    leases = LeaseTable(engine_id, settings.lease)
    return Engine(
        role=settings.role,
        engine_id=engine_id,
        model=settings.model,
        longest=min(settings.longest, settings.kv_blocks * settings.block_tokens),
        runner=runner,
        pool=BlockPool(settings.kv_blocks),
        leases=leases,
        side_channel=SideChannel(leases, runner),
        puller=Puller(runner),
        about={"device": name_of(settings.device), "dtype": str(settings.dtype), "torch": torch.__version__},
    )


def name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"CPU ({names[0]})" if names else "CPU"


def port_of(listening: asyncio.AbstractServer) -> int:
    return listening.sockets[0].getsockname()[1]


def as_json(content: dict[str, Any]) -> Response:
    return Response(200, json.dumps(content).encode())


def detail(status: int, words: str) -> Response:
    return Response(status, json.dumps({"detail": words}).encode())
