"""A decode step of a model without layers besides attention, as a DecodeGraph and with an append for each token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvservice.client import Sequence, Session
from kvservice.client.decode_graph import DecodeGraph, DecodeTables

NUM_HEADS, VOCABULARY, MAX_TOKENS = 4, 50, 200


class Toy:
    """Queries, keys and values that depend on the token, its position and the layer only."""

    def __init__(self, kv: Session, device: str) -> None:
        info, generator = kv.info, torch.Generator().manual_seed(1)
        self.kv, self.device, self.num_layers = kv, device, info.num_layers
        dtype = getattr(torch, info.dtype)

        def tables(heads: int) -> list[Any]:
            shapes = [(size, info.num_layers, heads, info.head_size) for size in (VOCABULARY, MAX_TOKENS)]
            return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]

        self._tables = [tables(heads) for heads in (NUM_HEADS, info.num_kv_heads, info.num_kv_heads)]

    def tensors(self, tokens: Any, positions: Any, layer: int) -> list[Any]:
        """Return query, key and value [n, heads, head_size] for int64[n] on the device."""
        return [(of_token[tokens] + of_place[positions])[:, layer].contiguous() for of_token, of_place in self._tables]

    def compute(self, *prompts: list[int]) -> list[Sequence]:
        sequences = []
        for prompt in prompts:
            sequence = self.kv.allocate(prompt)
            step = self.kv.open_step([sequence])
            places = torch.arange(len(prompt) - step.num_tokens, len(prompt), device=self.device)
            tokens = torch.tensor(prompt, device=self.device)[places]
            for layer in range(self.num_layers):
                step.extend(layer, *self.tensors(tokens, places, layer))
            sequences.append(sequence)
        return sequences

    def decode(self, sequences: list[Sequence], tokens: list[int]) -> Any:
        """Append a token to each sequence. Returns the outputs of all layers on the host, [layers, n, heads, size]."""
        places = torch.tensor([sequence.length for sequence in sequences], device=self.device)
        step = self.kv.append(sequences, tokens)
        ids = torch.tensor(tokens, device=self.device)
        outputs = [step.decode(layer, *self.tensors(ids, places, layer)) for layer in range(self.num_layers)]
        return torch.stack([torch.as_tensor(output) for output in outputs]).float().cpu()


class GraphToy:
    """The same decode steps as one graph."""

    def __init__(self, toy: Toy, max_sequences: int, max_tokens: int = MAX_TOKENS) -> None:
        self.toy, self.graph = toy, DecodeGraph(toy.kv, max_sequences, max_tokens)
        self.tokens = torch.zeros(max_sequences, dtype=torch.int64, device=toy.device)
        self.graph.capture(self.run_step)

    def run_step(self) -> Any:
        graph, outputs = self.graph, []
        for layer in range(self.toy.num_layers):
            outputs.append(graph.attend(layer, *self.toy.tensors(self.tokens, graph.positions, layer)))
        return torch.stack(outputs)

    def replay(self, tokens: list[int]) -> Any:
        """Decode a token of each sequence of the graph. Returns what `Toy.decode` returns."""
        self.tokens[: len(tokens)] = torch.tensor(tokens, device=self.toy.device)
        output = self.graph.replay()
        return output[:, : len(tokens)].float().cpu()


def state_of(kv: Session, sequences: list[Sequence]) -> list[Any]:
    """Return tokens, the number of computed tokens, and the bytes of K/V of each sequence."""
    found = []
    for info, sequence in zip(kv.describe(sequences, token_ids=True), sequences, strict=True):
        assert sequence.length == info.length
        parts = kv.read(sequence, 0, info.length)
        found.append((info.token_ids, info.num_computed_tokens, *(part.tobytes() for part in parts)))
    return found


def check_random_runs(kv: Session, other: Session, device: str, seed: int, bound: float) -> None:
    """Runs with random sequences, lengths and numbers of steps: outputs are as with an append for each token, and the
    daemon knows the same tokens and K/V afterwards. `kv` has the graph, `other` appends."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, VOCABULARY, random.integers(1, 40)).tolist() for _ in range(5)]
    toys = Toy(kv, device), Toy(other, device)
    graph = GraphToy(toys[0], 4)
    mine, theirs = (toy.compute(*prompts) for toy in toys)
    for _ in range(8):
        chosen = random.permutation(5)[: random.integers(1, 5)].tolist()
        graph.graph.begin([mine[i] for i in chosen], int(random.integers(1, 6)))
        late: list[list[int]] = []  # tokens that the graph's session is told about later
        for _ in range(random.integers(0, 14)):
            tokens = random.integers(0, VOCABULARY, len(chosen)).tolist()
            expected = toys[1].decode([theirs[i] for i in chosen], tokens)
            torch.testing.assert_close(graph.replay(tokens), expected, rtol=0, atol=bound)
            late.append(tokens)
            if len(late) > random.integers(0, 2):
                graph.graph.written(late.pop(0))
        for tokens in late:
            graph.graph.written(tokens)
        graph.graph.check()
        graph.graph.end()
    assert state_of(kv, mine) == state_of(other, theirs)
    kv.free(mine)
    other.free(theirs)
    kv.reset_prefix_cache()


def check_tables(device: torch.device, seed: int) -> None:
    """Rows without a sequence stay where they are. Slots of new blocks are those of the tables that came last."""
    random = np.random.default_rng(seed)
    rows, max_blocks, block_size = 5, 7, 4
    tables = DecodeTables(rows, max_blocks, block_size, device)
    for _ in range(5):
        num_seqs = int(random.integers(0, rows + 1))
        blocks = random.integers(0, 1 << 30, (num_seqs, max_blocks), np.int32)
        lengths = random.integers(0, 16, num_seqs)
        known = int(lengths.max(initial=0)) // block_size + 1
        tables.load(blocks[:, :known], lengths)
        for number in range(max_blocks * block_size - int(lengths.max(initial=0))):
            if random.random() < 0.2 or known * block_size == lengths.max(initial=0) + number:
                known = max_blocks
                tables.load_blocks(blocks)
            tables.advance()
            at = lengths + number
            assert tables.positions.tolist() == [*at, *[0] * (rows - num_seqs)]
            assert tables.context_lens.tolist() == [*(at + 1), *[1] * (rows - num_seqs)]
            slots = blocks[np.arange(num_seqs), at // block_size].astype(np.int64) * block_size + at % block_size
            assert tables.slot_mapping[:num_seqs].tolist() == slots.tolist()
            assert (tables.slot_mapping[num_seqs:] < 0).all()
    assert (tables.query_lens == 1).all()
