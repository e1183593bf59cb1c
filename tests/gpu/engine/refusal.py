"""Owns the reasons for not serving a request, with vLLM's statuses and error JSON.

The words are those of `host-harness/src/engine/refusal.rs`.
"""

import json

CORE = "EngineCore encountered an issue: "
KINDS = {400: "BadRequestError", 404: "NotFoundError", 413: "BadRequestError", 500: "InternalServerError"}


class Refusal(Exception):
    """A request that is not served; `count` is the counter it goes to."""

    def __init__(self, status: int, count: str, words: str):
        super().__init__(words)
        self.status = status
        self.count = count

    def content(self) -> bytes:
        error = {"message": str(self), "type": KINDS[self.status], "param": None, "code": self.status}
        return json.dumps({"error": error}).encode()


def bad_request(words: str) -> Refusal:
    return Refusal(400, "refused_bad_request", words)


def too_large(most: int) -> Refusal:
    return Refusal(413, "refused_bad_request", f"Request body exceeds {most} bytes")


def unknown_model(model: str) -> Refusal:
    return Refusal(404, "refused_bad_request", f"The model `{model}` does not exist.")


def not_a_prefill_leg(why: str) -> Refusal:
    return Refusal(400, "refused_not_a_prefill_leg", f"prefill engine only runs prefill legs: {why}")


def missing_handoff() -> Refusal:
    words = "kv_transfer_params with do_remote_prefill are required for decode mode"
    return Refusal(500, "refused_missing_handoff", CORE + words)


def wrong_handoff(why: str) -> Refusal:
    return Refusal(500, "refused_wrong_handoff", f"{CORE}KV load failed: {why}")


def used_handoff() -> Refusal:
    return Refusal(500, "refused_used_handoff", CORE + "KV load failed: the blocks were already pulled")


def expired_handoff() -> Refusal:
    return Refusal(500, "refused_expired_handoff", CORE + "KV load failed: the lease of the blocks has expired")


def unreachable_handoff(why: str) -> Refusal:
    return Refusal(500, "refused_unreachable_handoff", f"{CORE}NIXL handshake failed: {why}")
