"""Owns the paged KV cache: blocks of tensors, who has which, and their way to and from bytes."""

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KvLayout:
    """What two engines must have in common to exchange blocks."""

    layers: int
    block_tokens: int
    kv_heads: int
    head_width: int
    dtype: torch.dtype

    def shape(self, blocks: int) -> list[int]:
        """Of a tensor that holds so many blocks; its second dimension is keys, then values."""
        return [self.layers, 2, blocks, self.block_tokens, self.kv_heads, self.head_width]

    def byte_count(self, blocks: int) -> int:
        return torch.Size(self.shape(blocks)).numel() * torch.empty((), dtype=self.dtype).element_size()


class KvCache:
    """The tensors of all blocks."""

    def __init__(self, layout: KvLayout, blocks: int, device: torch.device):
        self.layout = layout
        self.device = device
        self._tensor = torch.zeros(layout.shape(blocks), dtype=layout.dtype, device=device)

    def view(self, blocks: list[int], length: int) -> "SequenceView":
        """The KV of a sequence of `length` tokens that has these blocks, in this order."""
        return SequenceView(self._tensor, torch.tensor(blocks, device=self.device), length, self.layout.block_tokens)

    @torch.inference_mode()
    def to_bytes(self, blocks: list[int]) -> bytes:
        """A copy of whole blocks in host memory."""
        chosen = self._tensor[:, :, torch.tensor(blocks, device=self.device)].contiguous().cpu()
        return ctypes.string_at(chosen.data_ptr(), chosen.numel() * chosen.element_size())

    @torch.inference_mode()
    def from_bytes(self, blocks: list[int], content: bytearray) -> None:
        """Fills whole blocks; `content` is as long as the layout says."""
        read = torch.frombuffer(content, dtype=self.layout.dtype).view(self.layout.shape(len(blocks)))
        self._tensor[:, :, torch.tensor(blocks, device=self.device)] = read.to(self.device)


class SequenceView:
    """One sequence's blocks."""

    def __init__(self, tensor: torch.Tensor, blocks: torch.Tensor, length: int, block_tokens: int):
        self._tensor = tensor
        self._blocks = blocks
        self._length = length
        self._block_tokens = block_tokens

    def of_layer(self, layer: int) -> "LayerView":
        keys, values = self._tensor[layer]
        return LayerView(keys, values, self._blocks, self._length, self._block_tokens)


@dataclass(frozen=True)
class LayerView:
    """One sequence's blocks in one layer."""

    keys: torch.Tensor
    values: torch.Tensor
    blocks: torch.Tensor
    length: int
    block_tokens: int

    def write(self, places: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        block, slot = self.blocks[places // self.block_tokens], places % self.block_tokens
        self.keys[block, slot] = key
        self.values[block, slot] = value

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, one row a token, contiguous: from here on nothing depends on which blocks they were in."""
        used = self.blocks[: -(-self.length // self.block_tokens)]
        return self.keys[used].flatten(0, 1)[: self.length], self.values[used].flatten(0, 1)[: self.length]


class BlockPool:
    """Block numbers, from 1 (vLLM keeps block 0 for itself); who asks first is served first."""

    def __init__(self, count: int):
        self.count = count
        self._free = deque(range(1, count + 1))
        self._line = asyncio.Lock()
        self._freed = asyncio.Event()

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    async def reserve(self, count: int) -> "Blocks":
        """Waits for so many blocks; a small request does not overtake a large one that waits."""
        async with self._line:
            while len(self._free) < count:
                self._freed.clear()
                await self._freed.wait()
            return Blocks([self._free.popleft() for _ in range(count)], self._give_back)

    def _give_back(self, numbers: list[int]) -> None:
        self._free.extend(numbers)
        self._freed.set()


class Blocks:
    """Reserved blocks; given back once."""

    def __init__(self, numbers: list[int], give_back: Callable[[list[int]], None]):
        self.numbers = numbers
        self._give_back = give_back

    def free(self) -> None:
        numbers, self.numbers = self.numbers, []
        self._give_back(numbers)

    def split(self, count: int) -> "Blocks":
        """The first `count` of them, to be freed separately."""
        first, self.numbers = self.numbers[:count], self.numbers[count:]
        return Blocks(first, self._give_back)
