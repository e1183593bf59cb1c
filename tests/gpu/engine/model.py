"""Owns the model: a Llama in small, with random weights that depend on nothing but a seed.

Greedy outputs of two engines are equal token for token because they are computed by the same operations on the same
shapes, not because they are close. Every pass is over one sequence alone: first the prompt but for its last token, in
chunks that begin at multiples of CHUNK, then one token at a time, the prompt's last one included. A decode engine that
received a prompt's KV continues at exactly that last token. So each matrix product has the same operands in both, the
sums are rounded alike, and no near-tie between two tokens can fall otherwise.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from .cache import KvCache, KvLayout

# Prompt tokens in one pass: bounds the memory that attention scores take.
CHUNK = 512
# Greater than usual for queries, so that attention is sharp and an output depends on far tokens of its prompt.
QUERY_GAIN = 3.0
SEED = 20_240_817


@dataclass(frozen=True)
class Shape:
    """The model's dimensions."""

    vocabulary: int
    layers: int = 4
    width: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_width: int = 32
    hidden: int = 704
    rope_theta: float = 10_000.0
    epsilon: float = 1e-5

    def kv_layout(self, block_tokens: int, dtype: torch.dtype) -> KvLayout:
        return KvLayout(self.layers, block_tokens, self.kv_heads, self.head_width, dtype)


class Model:
    """The weights, and one pass through them."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = SEED):
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self._drawn = torch.Generator().manual_seed(seed)
        self.embedding = self._draw(shape.vocabulary, shape.width, gain=math.sqrt(shape.width))
        self.layers = [self._draw_layer() for _ in range(shape.layers)]
        self.head = self._draw(shape.vocabulary, shape.width)
        halves = torch.arange(0, shape.head_width, 2, dtype=torch.float32, device=device)
        self.frequencies = shape.rope_theta ** (-halves / shape.head_width)

    def _draw(self, outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        """Drawn on the CPU in float32, whatever the device: so all engines have the same weights."""
        weights = torch.randn(outputs, inputs, generator=self._drawn) * (gain / math.sqrt(inputs))
        return weights.to(device=self.device, dtype=self.dtype)

    def _draw_layer(self) -> dict[str, torch.Tensor]:
        shape = self.shape
        queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        return {
            "query": self._draw(queries, shape.width, QUERY_GAIN),
            "key": self._draw(keys, shape.width),
            "value": self._draw(keys, shape.width),
            "out": self._draw(shape.width, queries),
            "gate": self._draw(shape.hidden, shape.width),
            "up": self._draw(shape.hidden, shape.width),
            "down": self._draw(shape.width, shape.hidden),
        }

    @torch.inference_mode()
    def forward(self, tokens: list[int], start: int, blocks: list[int], cache: KvCache) -> torch.Tensor:
        """Runs `tokens`, which stand at `start` and after, and writes their KV; returns the last one's logits."""
        places = torch.arange(start, start + len(tokens), device=self.device)
        view = cache.view(blocks, start + len(tokens))
        turn = self._rotation(places)
        state = functional.embedding(torch.tensor(tokens, device=self.device), self.embedding)
        for number, layer in enumerate(self.layers):
            normed = self._normalise(state)
            state = state + self._attend(layer, normed, places, turn, view.of_layer(number))
            normed = self._normalise(state)
            gated = functional.silu(normed @ layer["gate"].T) * (normed @ layer["up"].T)
            state = state + gated @ layer["down"].T
        return (self._normalise(state[-1:]) @ self.head.T)[0].float()

    def _normalise(self, state: torch.Tensor) -> torch.Tensor:
        """RMSNorm; its weights are all one, as in a model that was not trained."""
        wide = state.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.shape.epsilon)
        return (wide * scale).to(self.dtype)

    def _rotation(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = places.float()[:, None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _attend(self, layer, state, places, turn, kv) -> torch.Tensor:
        """Grouped-query attention: each key head serves several query heads."""
        shape = self.shape
        count = len(places)
        group = shape.heads // shape.kv_heads
        query = rotate((state @ layer["query"].T).view(count, shape.heads, shape.head_width), turn)
        key = rotate((state @ layer["key"].T).view(count, shape.kv_heads, shape.head_width), turn)
        value = (state @ layer["value"].T).view(count, shape.kv_heads, shape.head_width)
        kv.write(places, key, value)
        keys, values = kv.read()
        query = query.view(count, shape.kv_heads, group, shape.head_width).permute(1, 2, 0, 3)
        query = query.reshape(shape.kv_heads, group * count, shape.head_width)
        scores = query @ keys.permute(1, 2, 0) / math.sqrt(shape.head_width)
        scores = scores.view(shape.kv_heads, group, count, -1).float()
        future = torch.arange(len(keys), device=self.device) > places[:, None]
        weights = scores.masked_fill(future, -math.inf).softmax(-1).to(self.dtype)
        mixed = weights.view(shape.kv_heads, group * count, -1) @ values.permute(1, 0, 2)
        mixed = mixed.view(shape.kv_heads, group, count, shape.head_width).permute(2, 0, 1, 3)
        return mixed.reshape(count, -1) @ layer["out"].T


def rotate(heads: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary position embedding, in Llama's half-and-half order."""
    cosine, sine = turn
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


def set_up_determinism(device: torch.device) -> None:
    """Asks for the same sums each time: one thread on a CPU, full precision and fixed algorithms on a GPU."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
