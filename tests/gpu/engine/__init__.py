"""Owns a small inference engine: a tiny Llama with random weights behind vLLM's API and its NIXL hand-off.

It exists to be driven by the gateway with KV tensors that are real. It is as strict about hand-offs as the simulated
engines of `pd-harness engine`, and has their paths and counters.
"""
