"""Owns the processes: engines of three roles, and a gateway in front of those that are two halves of one."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from client import get
from prompts import MODEL

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
# Seconds in which a process must say that it is ready: importing PyTorch takes most of it.
START = 120
PREFILLS = 2
DECODES = 2
# One thread each, so that sums are made in the same order everywhere; and there are more processes than cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Engine:
    """A running engine."""

    role: str
    address: str

    def state(self) -> dict[str, Any]:
        return json.loads(get(self.address, "/__state"))


@dataclass
class Fleet:
    """All engines."""

    engines: list[Engine]

    def of(self, role: str) -> list[Engine]:
        return [engine for engine in self.engines if engine.role == role]

    def states(self, role: str) -> list[dict[str, Any]]:
        return [engine.state() for engine in self.of(role)]

    def total(self, role: str, count: str) -> int:
        return sum(state[count] for state in self.states(role))

    def config(self) -> dict[str, Any]:
        """The plugin's, for the engines that hand off."""
        workers = [
            {"address": engine.address, "role": engine.role, "model": MODEL}
            for engine in self.of("prefill") + self.of("decode")
        ]
        return {"pools": [{"name": "gpu", "protocol": "nixl", "discovery": {"static": {"workers": workers}}}]}


@dataclass(frozen=True)
class Gateway:
    """A running gateway."""

    proxy: str
    address: str
    admin: str

    def metrics(self) -> dict[str, float]:
        """The sums of the plugin's metrics, over their labels."""
        sums: dict[str, float] = {}
        for line in get(self.admin, "/stats/prometheus").splitlines():
            if line.startswith("pd_router_"):
                series, value = line.rsplit(" ", 1)
                name = series.split("{")[0]
                sums[name] = sums.get(name, 0) + float(value)
        return sums


class Process:
    """A program that says in one line of JSON that it is ready."""

    def __init__(self, command: list[str], directory: pathlib.Path, environment: dict[str, str]):
        self._command = command
        self._running = subprocess.Popen(
            command,
            cwd=directory,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> dict[str, Any]:
        """Waits for that line."""
        giving_up = threading.Timer(START, self._running.kill)
        giving_up.start()
        line = self._running.stdout.readline()
        giving_up.cancel()
        if not line:
            raise RuntimeError(f"did not start: {' '.join(self._command)}")
        return json.loads(line)

    def stop(self) -> None:
        self._running.stdin.close()  # a gateway ends then
        self._running.terminate()
        self._running.wait()
        self._running.stdout.close()


@contextlib.contextmanager
def started(options: list[str]) -> Iterator[Fleet]:
    """Starts all engines, at once."""
    roles = ["prefill"] * PREFILLS + ["decode"] * DECODES + ["aggregated"]
    with contextlib.ExitStack() as stack:
        processes = []
        for role in roles:
            processes.append(Process([sys.executable, "-m", "engine", "--role", role, *options], HERE, ONE_THREAD))
            stack.callback(processes[-1].stop)
        addresses = [process.ready()["address"] for process in processes]
        yield Fleet([Engine(role, address) for role, address in zip(roles, addresses)])


@contextlib.contextmanager
def gateway(proxy: str, files: dict[str, str], config: dict[str, Any]) -> Iterator[Gateway]:
    """Starts `pd-harness run` with this plugin configuration."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        command = [
            *[files["harness"], "run", "--proxy", proxy, "--config", str(path), "--plugin", files["plugin"]],
            *["--envoy", files["envoy"], "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"],
            *["--json", "--until-stdin-closes"],
        ]
        process = Process(command, ROOT, {})
        try:
            told = process.ready()
            yield Gateway(proxy, told["listen"], told["admin"])
        finally:
            process.stop()
