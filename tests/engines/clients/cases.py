"""What the clients' scripts share: their arguments, how their cases are run and reported, and how two answers are compared.

    SCRIPT --gateway URL --admin URL --refusing URL --alone URL --engine URL…

gateway   in front of a prefill and a decode engine that serve the model `tiny`
admin     where that gateway's metrics are, at /stats/prometheus
refusing  a gateway in front of the same two that takes one request at a time (429), and none for the model `gone` (503)
alone     an aggregated engine with the same model, past any gateway
engine    each engine behind the gateway, for its metrics
"""

import argparse
import asyncio
import json
import time
import urllib.request

MODEL = "tiny"
GONE = "gone"

# No client needs a key here, and none starts without one.
KEY = "none"

# Seconds for an answer on a busy machine.
PATIENCE = 120

# Seconds within which all must have been released after a client has left.
REST_LIMIT = 30

# Seconds that a client waits which gives up: an answer of LONG takes far longer.
IMPATIENCE = 1

# Tokens of an answer that lasts until its client leaves: nearly the whole context.
LONG = 3900

# Fields that differ from answer to answer, or from engine to engine.
PASSING = {
    "call_id",
    "completed_at",
    "created",
    "created_at",
    "id",
    "input_tokens_details",
    "item_id",
    "prompt_tokens_details",
    "system_fingerprint",
}

# Series that are 0 where nothing is under way.
GATEWAY_BUSY = ("pd_router_streams", "pd_router_prefill_charges", "pd_router_decode_charges")
ENGINE_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def arguments():
    parser = argparse.ArgumentParser()
    for name in ("gateway", "admin", "refusing", "alone"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--engine", action="append", required=True)
    return parser.parse_args()


def run(cases):
    """Runs the cases in order, says of each how it went, and gives the exit status."""
    status = 0
    for case in cases:
        try:
            case()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next case is tried
            status = 1
            reason = " ".join(str(error).split())
            print(f"FAILED {case.__name__}: {type(error).__name__}: {reason}", flush=True)
        else:
            print(f"ok {case.__name__}", flush=True)
    return status


def expect(found, wanted, what):
    if found != wanted:
        raise AssertionError(f"{what}: {found!r} instead of {wanted!r}")


def bare(value):
    """The value as plain data, without what differs from answer to answer."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json", warnings=False)
    if isinstance(value, dict):
        return {key: bare(inner) for key, inner in value.items() if key not in PASSING}
    if isinstance(value, (list, tuple)):
        return [bare(inner) for inner in value]
    return value


class Pair:
    """A client of the gateway and one of the aggregated engine."""

    def __init__(self, gateway, alone):
        self.gateway = gateway
        self.alone = alone

    def same(self, call):
        """What `call` gives through the gateway, which must be what it gives past it."""
        through = call(self.gateway)
        expect(bare(through), bare(call(self.alone)), "through the gateway")
        return through

    def fails_alike(self, call, kind, *fields):
        """The error of this class that `call` raises on either way, with the same values in these fields."""
        through = raised(kind, lambda: call(self.gateway))
        alone = raised(kind, lambda: call(self.alone))
        expect(type(through), type(alone), "the error's class")
        for field in fields:
            expect(getattr(through, field), getattr(alone, field), f"the error's {field}")
        return through


def raised(kind, call):
    try:
        answer = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {answer!r}")


def takes_at_least(seconds, call):
    begun = time.monotonic()
    answer = call()
    taken = time.monotonic() - begun
    if taken < seconds:
        raise AssertionError(f"took {taken:.2f} s, not {seconds} s or more")
    return answer


def cancel_early(ask):
    """Cancels the task of a request half a second after it was begun."""

    async def leave_early():
        asked = asyncio.create_task(ask())
        await asyncio.sleep(0.5)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(leave_early())


class Watch:
    """What the metrics of the gateway and of its engines say is under way."""

    def __init__(self, admin, engines):
        self.pages = [(f"{admin}/stats/prometheus", GATEWAY_BUSY)]
        self.pages += [(f"{engine}/metrics", ENGINE_BUSY) for engine in engines]

    def under_way(self):
        """The series that are not 0, with their values."""
        busy = {}
        for address, names in self.pages:
            with urllib.request.urlopen(address, timeout=PATIENCE) as page:
                lines = page.read().decode().splitlines()
            for line in lines:
                name = line.split("{")[0].split(" ")[0]
                if name in names and float(line.rsplit(" ", 1)[1]) != 0:
                    busy[f"{address} {name}"] = line.rsplit(" ", 1)[1]
        return busy

    def is_busy(self):
        if not self.under_way():
            raise AssertionError("nothing is under way while an answer is")

    def comes_to_rest(self):
        deadline = time.monotonic() + REST_LIMIT
        while busy := self.under_way():
            if time.monotonic() > deadline:
                raise AssertionError(f"still under way {REST_LIMIT} s after the client has left: {busy}")
            time.sleep(0.1)


def without_blanks(alone):
    """A bias against the tokens of white space: without it, an answer in JSON may be blanks up to its limit.

    The tokenizer writes each blank as one token of its own.
    """
    body = {"model": MODEL, "prompt": " \t\r\n", "add_special_tokens": False}
    request = urllib.request.Request(
        f"{alone}/tokenize", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return {str(token): -100 for token in json.load(answer)["tokens"]}
