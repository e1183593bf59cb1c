"""The whole check of the gateway in front of a real engine: `check.py --harness FILE --plugin FILE [--envoy FILE]`.

Two prefill and two decode engines behind the gateway must answer as one aggregated engine does, token for token, while
the decode engines compute no prompt and every hand-off is used.
"""

import argparse
import json
import os
import pathlib
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import fleet as fleets
from client import Output, Unexpected, generate, leave, post
from fleet import Fleet, Gateway
from prompts import BYTES, COMPLETIONS, MODEL, Case, cases, draw_ids

CLIENTS = 8
# Seconds for all to end after the last answer: fewer than a lease has, so that no hand-off can hide by expiring.
SETTLING = 20
# Metrics of the gateway that tell of something under way, or lost.
MUST_BE_ZERO = [
    "pd_router_streams",
    "pd_router_prefill_charges",
    "pd_router_decode_charges",
    "pd_router_kv_leaked_handoffs_total",
    "pd_router_kv_leaked_blocks_total",
    "pd_router_kv_unknown_handoffs_total",
    "pd_router_kv_unknown_blocks_total",
]
# Cases whose output may be another's, or the beginning of it.
SAME_PROMPTS = 4


@dataclass
class Verdict:
    """What was found, and what of it is wrong."""

    faults: list[str] = field(default_factory=list)

    def expect(self, holds: bool, words: str) -> None:
        if not holds:
            self.faults.append(words)
            print(f"WRONG: {words}", flush=True)

    def equal(self, what: str, found: object, wanted: object) -> None:
        self.expect(found == wanted, f"{what}: {found!r}, not {wanted!r}")


def main() -> int:
    arguments = read_arguments()
    begun = time.monotonic()
    verdict = Verdict()
    with fleets.started(arguments.engine) as fleet:
        show_engines(fleet)
        answers = reference(fleet)
        distinct = len({tuple(output.tokens) for _, output in answers})
        verdict.expect(distinct >= len(answers) - SAME_PROMPTS, f"only {distinct} different outputs")
        for proxy in arguments.proxies:
            with fleets.gateway(proxy, vars(arguments), fleet.config()) as gateway:
                check_gateway(gateway, fleet, answers, verdict)
        check_refusals(fleet, verdict)
        show_totals(fleet)
    print(f"{time.monotonic() - begun:.0f} s in all: {'FAILED' if verdict.faults else 'passed'}")
    return 1 if verdict.faults else 0


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check.py", description=__doc__)
    parser.add_argument("--harness", required=True, help="pd-harness")
    parser.add_argument("--plugin", required=True, help="pd_router.wasm")
    parser.add_argument("--envoy", default=str(fleets.ROOT / "target/envoy/envoy"), help="left out where there is none")
    parser.add_argument("engine", nargs="*", help="options for every engine, after --")
    arguments = parser.parse_args()
    arguments.proxies = ["wasmtime", "envoy"] if pathlib.Path(arguments.envoy).is_file() else ["wasmtime"]
    return arguments


def show_engines(fleet: Fleet) -> None:
    (about,) = fleet.states("aggregated")
    engines = f"{fleets.PREFILLS} prefill, {fleets.DECODES} decode and 1 aggregated engine"
    print(f"{engines} on {about['device']}, {about['dtype']}, PyTorch {about['torch']}", flush=True)


def reference(fleet: Fleet) -> list[tuple[Case, Output]]:
    """All cases with what the aggregated engine answers, one that ends with its first token among them."""
    (aggregated,) = fleet.of("aggregated")
    begun = time.monotonic()
    todo = cases() + ends_at_once(aggregated.address)
    answers = [(case, generate(aggregated.address, case.path, case.body(stream=False))) for case in todo]
    tokens = sum(len(output.tokens) for _, output in answers)
    print(f"aggregated: {len(answers)} requests, {tokens} tokens, {time.monotonic() - begun:.1f} s", flush=True)
    return answers


def ends_at_once(aggregated: str) -> list[Case]:
    """A prompt whose first output token ends the output, so that its prefill is its answer, if one token is enough."""
    for token in range(BYTES):
        case = Case("ends at once", COMPLETIONS, {"prompt": [token], "max_tokens": 9})
        probe = case.body(stream=False) | {"max_tokens": 1}
        if generate(aggregated, COMPLETIONS, probe).finish == "stop":
            return [case]
    return []


def check_gateway(gateway: Gateway, fleet: Fleet, answers: list[tuple[Case, Output]], verdict: Verdict) -> None:
    """Every case streamed and not, several at once; then clients that leave."""
    begun = time.monotonic()
    before = Totals.of(fleet)
    todo = [(case, wanted, stream) for case, wanted in answers for stream in (False, True)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        verdicts = pool.map(lambda each: compare(gateway, *each), todo)
        different = [words for words in verdicts if words]
    for words in different:
        verdict.expect(False, f"{gateway.proxy}: {words}")
    took = time.monotonic() - begun
    settle(gateway, fleet)
    made = Totals.of(fleet).since(before)
    terminal = 2 * sum(len(wanted.tokens) == 1 and wanted.finish == "stop" for _, wanted in answers)
    judge(made, len(todo) - terminal, gateway.proxy, verdict)
    clients_leave(gateway)
    settle(gateway, fleet)
    judge_end(gateway, fleet, verdict)
    tokens = 2 * sum(len(wanted.tokens) for _, wanted in answers)
    print(
        f"{gateway.proxy}: {len(todo) - len(different)} of {len(todo)} answers equal, {tokens} tokens,"
        f" {made.issued} hand-offs, {made.kv_bytes / 1e6:.1f} MB of KV moved,"
        f" {terminal} answered by prefill alone, {took:.1f} s",
        flush=True,
    )


def compare(gateway: Gateway, case: Case, wanted: Output, stream: bool) -> str | None:
    """What is different, if anything is."""
    name = f"{case.name}, {'streamed' if stream else 'whole'}"
    try:
        found = generate(gateway.address, case.path, case.body(stream))
    except (Unexpected, OSError, ValueError, KeyError) as error:
        return f"{name}: {error!r}"
    return None if found == wanted else f"{name}: {difference(found, wanted)}"


def difference(found: Output, wanted: Output) -> str:
    """The first tokens that are not the same, or what else is not."""
    if found.tokens == wanted.tokens:
        return f"{found}, not {wanted}"
    same = len(os.path.commonprefix([found.tokens, wanted.tokens]))
    return f"after {same} tokens {found.tokens[same:][:4]}, not {wanted.tokens[same:][:4]}"


@dataclass(frozen=True)
class Totals:
    """Counts of all engines behind the gateway."""

    issued: int
    consumed: int
    expired: int
    decoded: int
    prompt_tokens_at_decode: int
    recomputed: int
    refused: int
    kv_bytes: int

    @staticmethod
    def of(fleet: Fleet) -> "Totals":
        return Totals(
            issued=fleet.total("prefill", "handoffs_issued"),
            consumed=fleet.total("prefill", "handoffs_consumed"),
            expired=fleet.total("prefill", "handoffs_expired"),
            decoded=fleet.total("decode", "answered"),
            prompt_tokens_at_decode=fleet.total("decode", "prompt_tokens_computed"),
            recomputed=fleet.total("decode", "recomputed"),
            refused=fleet.total("decode", "refused_handoffs"),
            kv_bytes=fleet.total("decode", "kv_bytes_received"),
        )

    def since(self, before: "Totals") -> "Totals":
        mine, theirs = vars(self), vars(before)
        return Totals(**{name: mine[name] - theirs[name] for name in mine})


def judge(totals: Totals, handed_off: int, proxy: str, verdict: Verdict) -> None:
    """Each request that was not over at its first token was handed off once, and decoded from what was handed off."""
    verdict.equal(f"{proxy}: hand-offs issued", totals.issued, handed_off)
    verdict.equal(f"{proxy}: hand-offs used", totals.consumed, handed_off)
    verdict.equal(f"{proxy}: answered by decode engines", totals.decoded, handed_off)
    verdict.equal(f"{proxy}: hand-offs refused", totals.refused, 0)
    # The last token of each prompt, whose logits choose the first output token; vLLM's decode engines compute it too.
    verdict.equal(f"{proxy}: prompt tokens computed by decode engines", totals.prompt_tokens_at_decode, handed_off)
    verdict.equal(f"{proxy}: prompt tokens computed by decode engines beyond the last ones", totals.recomputed, 0)


def clients_leave(gateway: Gateway) -> None:
    """During prefill, and in the middle of a stream."""
    chance = random.Random(7)
    for after_bytes in (0, 0, 0, 2000, 4000):
        fields = {"prompt": draw_ids(chance, 600), "max_tokens": 200, "ignore_eos": True}
        body = Case("", COMPLETIONS, fields).body(stream=True)
        leave(gateway.address, COMPLETIONS, body, after_bytes)


def settle(gateway: Gateway, fleet: Fleet) -> None:
    """Waits until nothing is under way, or long enough."""
    deadline = time.monotonic() + SETTLING
    while time.monotonic() < deadline:
        quiet = all(state["running"] == 0 for role in ("prefill", "decode") for state in fleet.states(role))
        if quiet and not left_over(gateway, fleet):
            return
        time.sleep(0.1)


def left_over(gateway: Gateway, fleet: Fleet) -> list[str]:
    """What is still held, or was lost."""
    blocks = [
        f"{state['blocks_used']} blocks in use in a {role} engine"
        for role in ("prefill", "decode")
        for state in fleet.states(role)
        if state["blocks_used"]
    ]
    metrics = gateway.metrics()
    return blocks + [f"{name} {metrics[name]}" for name in MUST_BE_ZERO if metrics[name]]


def judge_end(gateway: Gateway, fleet: Fleet, verdict: Verdict) -> None:
    for words in left_over(gateway, fleet):
        verdict.expect(False, f"{gateway.proxy}: {words}")
    totals = Totals.of(fleet)
    verdict.equal(f"{gateway.proxy}: hand-offs used after clients left", totals.consumed, totals.issued)
    verdict.equal(f"{gateway.proxy}: leases that expired", totals.expired, 0)
    verdict.equal(f"{gateway.proxy}: prompt tokens recomputed", totals.recomputed, 0)


def check_refusals(fleet: Fleet, verdict: Verdict) -> None:
    """That the engines are strict, or the above would mean little."""
    prefill, decode = fleet.of("prefill")[0].address, fleet.of("decode")[0].address
    bare = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}
    asked = bare | {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    status, _ = post(decode, COMPLETIONS, bare)
    verdict.equal("status of a decode leg without a hand-off", status, 500)
    status, _ = post(prefill, COMPLETIONS, bare)
    verdict.equal("status of a whole request at a prefill engine", status, 400)
    _, content = post(prefill, COMPLETIONS, asked)
    handed = bare | {"kv_transfer_params": json.loads(content)["kv_transfer_params"]}
    uses = [handed | {"prompt": [1, 2, 4]}, handed, handed]
    statuses = [post(decode, COMPLETIONS, body)[0] for body in uses]
    verdict.equal("statuses of another prompt's hand-off, a good one and the same again", statuses, [500, 200, 500])


def show_totals(fleet: Fleet) -> None:
    for role in ("prefill", "decode"):
        for state in fleet.states(role):
            computed, again = state["prompt_tokens_computed"], state["recomputed"]
            of_prompts = f"{computed} prompt tokens computed"
            if role == "decode":
                of_prompts = f"the last tokens of {computed - again} prompts and {again} others computed"
            moved = state["kv_bytes_sent"] + state["kv_bytes_received"]
            print(
                f"{role}: {state['requests']} requests, {of_prompts}, {moved / 1e6:.1f} MB of KV,"
                f" {state['handoffs_issued']} hand-offs issued,"
                f" {state['handoffs_issued'] - state['handoffs_consumed']} left, {state['blocks_used']} blocks in use"
            )


if __name__ == "__main__":
    sys.exit(main())
