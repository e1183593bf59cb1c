#!/usr/bin/env python3
"""Writes the model that Dynamo's mockers pretend to serve: a tokenizer and the configuration files, no weights.

    mkmodel.py OUT

The tokenizer is a byte-level BPE of 4096 tokens, built by rule rather than trained, so that it needs no corpus and no
library. The mockers answer with random token ids of about 1000 and above: a vocabulary much smaller than 4096 would turn
every answer into null.
"""

import json
import pathlib
import sys

VOCABULARY = 4096
SPECIAL = ["<s>", "</s>", "<unk>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPACE = "\u0120"  # how a byte-level tokenizer writes a space

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_alphabet():
    """The 256 characters that stand for the 256 bytes: printable ones for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(0x100 + place) for place in range(len(others))]


def merges(count):
    """`count` merges in order: letter pairs, a space and a letter, a space and a pair, then two pairs."""
    pairs = [first + second for first in LETTERS for second in LETTERS]
    made = [(pair[0], pair[1]) for pair in pairs]
    made += [(SPACE, letter) for letter in LETTERS]
    made += [(SPACE, pair) for pair in pairs]
    made += [(first, second) for first in pairs for second in pairs]
    return made[:count]


def tokenizer():
    tokens = SPECIAL + byte_alphabet()
    joined = merges(VOCABULARY - len(tokens))
    tokens += [left + right for left, right in joined]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": place,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for place, token in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: place for place, token in enumerate(tokens)},
            "merges": [f"{left} {right}" for left, right in joined],
        },
    }


FILES = {
    "config.json": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    },
}


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: mkmodel.py OUT")
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, content in {**FILES, "tokenizer.json": tokenizer()}.items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
