"""Starts an engine: `python -m engine --role prefill`. When ready, it says where it listens in one line of JSON."""

import argparse
import asyncio
import json
import os
import signal

# Read by cuBLAS when it starts: without it, results may depend on which of its work areas was free.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from .legs import Role
from .model import set_up_determinism
from .server import Server, Settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    settings = read_arguments()
    set_up_determinism(settings.device)
    asyncio.run(serve(settings))


def read_arguments() -> Settings:
    default = Settings(Role.AGGREGATED, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    parser = argparse.ArgumentParser(prog="engine", description=__doc__)
    parser.add_argument("--role", type=Role, default=default.role, help="prefill, decode or aggregated")
    parser.add_argument("--device", type=torch.device, default=default.device, help="cpu, cuda, cuda:1, …")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--host", default=default.host, help="for the API and the side channel")
    parser.add_argument("--port", type=int, default=default.port, help="of the API; 0 takes a free one")
    parser.add_argument("--side-channel-port", type=int, default=default.side_channel_port, help="where KV is fetched")
    parser.add_argument("--model", default=default.model, help="the name served")
    parser.add_argument("--block-tokens", type=int, default=default.block_tokens)
    parser.add_argument("--kv-blocks", type=int, default=default.kv_blocks)
    parser.add_argument("--longest", type=int, default=default.longest, help="tokens of prompt and output together")
    parser.add_argument("--lease", type=float, default=default.lease, help="seconds that a hand-off is held")
    arguments = vars(parser.parse_args())
    return Settings(**arguments | {"dtype": DTYPES[arguments["dtype"]]})


async def serve(settings: Settings) -> None:
    server = Server(settings)
    await server.start()
    told = asyncio.Event()
    for ending in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(ending, told.set)
    about = {"address": server.address, "side_channel": server.engine.address[1], **server.engine.about}
    print(json.dumps(about), flush=True)
    await told.wait()
    os._exit(0)  # as a process that dies: nothing that is open is waited for


if __name__ == "__main__":
    main()
