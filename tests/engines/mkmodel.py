#!/usr/bin/env python3
"""Writes the model that the engines serve: a Llama of two layers with random weights, the same each time.

    mkmodel.py OUT

The tokenizer is the one of tests/dynamo. The weights are large enough that attention decides what comes next: with the
small ones that training begins with, an answer would hardly depend on the prompt, and so not on the KV cache either.
"""

import json
import math
import pathlib
import sys

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "dynamo"))
import mkmodel as tiny  # noqa: E402 - found through the path above

SEED = 20261129
HIDDEN = 64
INNER = 128
HEADS = 2  # of 32 each, the smallest that the attention of vLLM's CPU backend takes
LAYERS = 2
CONTEXT = 4096  # tokens

# Tools as Hermes has them: a list of signatures before, calls between <tool_call> and </tool_call> in the answer.
CHAT_TEMPLATE = (
    "{% if tools %}system: tools {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% if message['tool_calls'] %}{% for call in message['tool_calls'] %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def weights():
    torch.manual_seed(SEED)

    def matrix(rows, columns, gain=1.0):
        return torch.randn(rows, columns) * (gain / math.sqrt(columns))

    tensors = {
        "model.embed_tokens.weight": torch.randn(tiny.VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(tiny.VOCABULARY, HIDDEN, gain=4.0),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        for part in ("q_proj", "k_proj"):
            tensors[f"{name}self_attn.{part}.weight"] = matrix(HIDDEN, HIDDEN, gain=1.5)
        for part in ("v_proj", "o_proj"):
            tensors[f"{name}self_attn.{part}.weight"] = matrix(HIDDEN, HIDDEN, gain=2.0)
        tensors[name + "mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        tensors[name + "mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        tensors[name + "mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        tensors[name + "input_layernorm.weight"] = torch.ones(HIDDEN)
        tensors[name + "post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    return tensors


def files():
    config = {
        **tiny.FILES["config.json"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": CONTEXT,
        "torch_dtype": "float32",
    }
    tokenizer_config = {
        **tiny.FILES["tokenizer_config.json"],
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    return {**tiny.FILES, "config.json": config, "tokenizer_config.json": tokenizer_config, "tokenizer.json": tiny.tokenizer()}


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: mkmodel.py OUT")
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights(), out / "model.safetensors", metadata={"format": "pt"})
    for name, content in files().items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
