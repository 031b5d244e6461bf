"""The largest requests on sequences: the maximum number of sequences per request, and the longest sequence."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from kvservice.bench.sending import Sender
from kvservice.v1 import attention_pb2, blocks_pb2, host_pb2, inspect_pb2, tensor_pb2

Cycle = Callable[[], Awaitable[None]]

# Bytes of a message reserved for everything except tensors.
_OVERHEAD = 65536
_SNAPSHOT = inspect_pb2.GetSnapshotRequest(max_sessions=1000, max_sequences=1000)


def many_sequences(sender: Sender) -> Cycle:
    """The maximum number of sequences per request, with equal shares of its tokens, and as many forks of them."""
    info = sender.info
    count, length = info.max_request_sequences, info.max_request_tokens // info.max_request_sequences
    content = f"{count} sequences"
    tokens = np.random.default_rng(2).integers(0, 50_000, (count, length)).tolist()
    sequences = [blocks_pb2.SequenceAllocation(sequence_id=i, token_ids=tokens[i]) for i in range(count)]
    ids, forks = list(range(count)), list(range(count, 2 * count))
    allocate = blocks_pb2.AllocateRequest(sequences=sequences)
    can_allocate = blocks_pb2.CanAllocateRequest(sequences=sequences)
    describe = blocks_pb2.DescribeRequest(sequence_ids=ids, return_token_ids=True, return_block_ids=True)
    read = read_request(sender, ids, length)
    # One token less per sequence, which remain to be computed.
    more = length - 1
    append = blocks_pb2.AppendRequest(
        sequence_ids=forks, token_ids=tokens[0][:more] * count, num_tokens=[more] * count,
        expected_lengths=[length] * count, return_slot_mapping=True,
    )  # fmt: skip
    can_append = blocks_pb2.CanAppendRequest(sequence_ids=forks, num_tokens=[more] * count)

    async def cycle() -> None:
        await sender.send("CanAllocate", content, can_allocate)
        await sender.send("Allocate", content, allocate)
        await sender.send("Describe", content, describe)
        await compute(sender, content, ids, count * length)
        await sender.send("Allocate", f"{count} sequences that there are", allocate)
        await sender.send("CommonPrefix", content, blocks_pb2.CommonPrefixRequest(sequence_ids=ids))
        await sender.send("Read", f"{count} ranges", read)
        await sender.send("CanSwapOut", content, blocks_pb2.CanSwapOutRequest(sequence_ids=ids))
        await sender.send("SwapOut", content, blocks_pb2.SwapOutRequest(sequence_ids=ids))
        await sender.send("CanSwapIn", content, blocks_pb2.CanSwapInRequest(sequence_ids=ids))
        await sender.send("SwapIn", content, blocks_pb2.SwapInRequest(sequence_ids=ids))
        await ahead(sender, ids, length)
        await sender.send("Fork", content, blocks_pb2.ForkRequest(parent_ids=ids, child_ids=forks))
        await sender.send("GetSnapshot", "1000 sequences", _SNAPSHOT)
        await sender.send("CanAppend", f"{more} tokens to each of {content}", can_append)
        await sender.send("Append", f"{more} tokens to each of {content}", append)
        await attend(sender, "Extend", forks, lengths=[length] * count)
        await attend(sender, "Decode", forks, lengths=[length] * count)
        await sender.send("Truncate", content, truncate(forks, [0] * count))
        await sender.send("Free", content, blocks_pb2.FreeRequest(sequence_ids=ids))
        await sender.send("Free", f"{count} empty sequences", blocks_pb2.FreeRequest(sequence_ids=forks))
        await sender.send("ResetPrefixCache", f"{count * length} tokens", blocks_pb2.ResetPrefixCacheRequest())

    return cycle


def longest_sequence(sender: Sender) -> Cycle:
    """One sequence of the maximum length, and the maximum number of forks of it per request."""
    info = sender.info
    length, count = info.max_sequence_tokens, info.max_request_sequences
    num_blocks = length // info.block_size
    content = f"{length} tokens"
    tokens = np.random.default_rng(3).integers(0, 50_000, length).tolist()
    sequence = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=tokens)
    allocate = blocks_pb2.AllocateRequest(sequences=[sequence])
    match = blocks_pb2.MatchPrefixRequest(token_ids=tokens)
    one = blocks_pb2.DescribeRequest(sequence_ids=[1], return_token_ids=True, return_block_ids=True)
    forks = list(range(2, count + 2))
    per_fork = info.max_request_blocks // num_blocks
    batches = [forks[i : i + per_fork] for i in range(0, count, per_fork)]
    pin = blocks_pb2.PinRequest(token_ids=tokens, ttl_s=600.0)

    async def cycle() -> None:
        await sender.send("MatchPrefix", f"{content}, none cached", match)
        await sender.send("CanAllocate", content, blocks_pb2.CanAllocateRequest(sequences=[sequence]))
        await sender.send("Allocate", f"{content}, none cached", allocate)
        await commit(sender, content, [1])
        await sender.send("MatchPrefix", f"{content}, cached", match)
        await sender.send("Describe", content, one)
        pinned = await sender.send("Pin", content, pin)
        pin_id = blocks_pb2.PinResponse.FromString(pinned).pin_id
        for batch in batches:
            await sender.send("Fork", f"{content}, {per_fork} times", fork(batch))
        content_of_all = f"{count} forks of {content}"
        await sender.send("CommonPrefix", content_of_all, blocks_pb2.CommonPrefixRequest(sequence_ids=forks))
        await sender.send("Describe", content_of_all, blocks_pb2.DescribeRequest(sequence_ids=forks))
        await sender.send("GetSnapshot", content_of_all, _SNAPSHOT)
        cut = [length - 1] * count
        await sender.send("Truncate", f"{count} forks by one token", truncate(forks, cut))
        can_append = blocks_pb2.CanAppendRequest(sequence_ids=forks)
        await sender.send("CanAppend", f"a token to each of {content_of_all}", can_append)
        append = blocks_pb2.AppendRequest(sequence_ids=forks, token_ids=[7] * count, return_slot_mapping=True)
        await sender.send("Append", f"a token to each of {content_of_all}", append)
        first = batches[0]
        await sender.send("Truncate", f"{per_fork} forks of {content}", truncate(first, [0] * len(first)))
        await sender.send("Free", content_of_all, blocks_pb2.FreeRequest(sequence_ids=forks))
        await sender.send("CanSwapOut", content, blocks_pb2.CanSwapOutRequest(sequence_ids=[1]))
        await sender.send("SwapOut", content, blocks_pb2.SwapOutRequest(sequence_ids=[1]))
        await sender.send("CanSwapIn", content, blocks_pb2.CanSwapInRequest(sequence_ids=[1]))
        await sender.send("SwapIn", content, blocks_pb2.SwapInRequest(sequence_ids=[1]))
        await sender.send("Free", content, blocks_pb2.FreeRequest(sequence_ids=[1]))
        await sender.send("Allocate", f"{content}, cached", allocate)
        await sender.send("Free", content, blocks_pb2.FreeRequest(sequence_ids=[1]))
        await sender.send("Unpin", content, blocks_pb2.UnpinRequest(pin_id=pin_id))
        await sender.send("ResetPrefixCache", content, blocks_pb2.ResetPrefixCacheRequest())

    return cycle


def fork(child_ids: list[int]) -> blocks_pb2.ForkRequest:
    return blocks_pb2.ForkRequest(parent_ids=[1] * len(child_ids), child_ids=child_ids)


def truncate(ids: list[int], lengths: list[int]) -> blocks_pb2.TruncateRequest:
    return blocks_pb2.TruncateRequest(sequence_ids=ids, lengths=lengths)


async def open_step(sender: Sender, content: str, ids: list[int]) -> int:
    request = blocks_pb2.OpenStepRequest(sequence_ids=ids, return_slot_mapping=True)
    return blocks_pb2.StepResponse.FromString(await sender.send("OpenStep", content, request)).step_id


async def compute(sender: Sender, content: str, ids: list[int], num_tokens: int) -> None:
    """Write the K/V of this many tokens, with messages of the maximum size."""
    step_id = await open_step(sender, content, ids)
    part = (sender.info.max_message_bytes - _OVERHEAD) // _token_bytes(sender)
    for first in range(0, num_tokens, part):
        count = min(part, num_tokens - first)
        request = attention_pb2.WriteRequest(step_id=step_id, layer=0, first_token=first, num_tokens=count)
        request.key.CopyFrom(_tensor(sender, count, 1))
        request.value.CopyFrom(request.key)
        await sender.send("Write", f"{count} tokens", request)


async def commit(sender: Sender, content: str, ids: list[int]) -> None:
    """Commit a step as if its K/V had been written into the mapped pool."""
    await sender.send("MapPool", "writable", host_pb2.MapPoolRequest(writable=True))
    step_id = await open_step(sender, f"{content}, in a mapped pool", ids)
    await sender.send("Commit", content, host_pb2.CommitRequest(step_id=step_id))
    await sender.send("UnmapPool", "", host_pb2.UnmapPoolRequest())


async def ahead(sender: Sender, ids: list[int], length: int) -> None:
    """Commit as many tokens of a step ahead as the sequences have, and open the next step. They are removed again."""
    await sender.send("MapPool", "writable", host_pb2.MapPoolRequest(writable=True))
    content = f"{length} tokens of each of {len(ids)} sequences"
    request = blocks_pb2.OpenAheadRequest(sequence_ids=ids, num_steps=length)
    step = blocks_pb2.StepResponse.FromString(await sender.send("OpenAhead", content, request))
    tokens = [7] * (len(ids) * length)
    following = blocks_pb2.CommitAheadRequest(step_id=step.step_id, token_ids=tokens, num_steps=length)
    await sender.send("CommitAhead", content, following)
    await sender.send("Truncate", content, truncate(ids, [length] * len(ids)))
    await sender.send("UnmapPool", "", host_pb2.UnmapPoolRequest())


def read_request(sender: Sender, ids: list[int], length: int) -> attention_pb2.ReadRequest:
    """Request a response of the maximum size."""
    each = min(length, (sender.info.max_message_bytes - _OVERHEAD) // _token_bytes(sender) // len(ids))
    ranges = [attention_pb2.SequenceRange(sequence_id=i, start=0, stop=each) for i in ids]
    return attention_pb2.ReadRequest(ranges=ranges)


async def attend(sender: Sender, rpc: str, ids: list[int], lengths: list[int]) -> None:
    """Attend with one token per sequence, and as many query heads as fit into a message."""
    await sender.send("Truncate", "by all that was appended", truncate(ids, lengths))
    append = blocks_pb2.AppendRequest(sequence_ids=ids, token_ids=[7] * len(ids), return_slot_mapping=True)
    answer = await sender.send("Append", f"a token to each of {len(ids)} sequences", append)
    # The daemon counts output and log-sum-exp as 9/8 of the query.
    num_heads = (sender.info.max_message_bytes - _OVERHEAD) * 8 // 9 // (len(ids) * sender.info.head_size * 2)
    step_id = blocks_pb2.StepResponse.FromString(answer).step_id
    request = attention_pb2.AttendRequest(step_id=step_id, layer=0, return_lse=True)
    request.query.CopyFrom(_tensor(sender, len(ids), num_heads))
    request.key.CopyFrom(_tensor(sender, len(ids), 1))
    request.value.CopyFrom(request.key)
    request.options.alibi_slopes.extend([0.5] * num_heads)
    await sender.send(rpc, f"{len(ids)} sequences, {num_heads} heads", request)


def _token_bytes(sender: Sender) -> int:
    """Return the bytes of key and value of one token."""
    return 2 * sender.info.num_kv_heads * sender.info.head_size * 2


def _tensor(sender: Sender, num_tokens: int, num_heads: int) -> tensor_pb2.Tensor:
    shape = [num_tokens, num_heads, sender.info.head_size]
    inline = bytes(num_tokens * num_heads * sender.info.head_size * 2)
    return tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_BFLOAT16, shape=shape, inline=inline)
