"""The keys of real requests of vLLM: what changes K/V changes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_connector import FakePool, cache_config, connector_config
from vllm_processes import source_of
from vllm_requests import FakeOutput

from kvservice.client.store.values import split_keys

# Imports of vLLM warn.
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BLOCK_SIZE = 32
TOKENS = list(range(100, 200))


def features(identifier: str, offset: int = 40) -> list[Any]:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    place = PlaceholderRange(offset=offset, length=20)
    return [MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)]


def keys(algorithm: str = "sha256_cbor", **options: Any) -> list[bytes]:
    """Return the keys of a request's three blocks."""
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from kvservice.integrations.vllm import KVServiceConnector

    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    arguments = {"prompt_token_ids": TOKENS, "sampling_params": SamplingParams(), "pooling_params": None} | options
    request = Request(request_id="a", block_hasher=get_request_block_hasher(BLOCK_SIZE, function), **arguments)
    config = connector_config(algorithm=algorithm, block_size=BLOCK_SIZE)
    connector = KVServiceConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    connector.bind_gpu_block_pool(FakePool(100))
    connector.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 0)
    output = FakeOutput({request.request_id: 3 * BLOCK_SIZE}, new=[(request, [1, 2, 3], 0)])
    (save,) = connector.build_connector_meta(output).step.saves
    connector.shutdown()
    return split_keys(save.keys)


def test_events_name_blocks_as_vllm_does() -> None:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    from kvservice.integrations.vllm import versions

    gone, come = [bytes([n]) * 32 for n in (1, 2)], [bytes([3]) * 32]
    removed, stored = versions.cache_events(gone, come, BLOCK_SIZE)
    assert isinstance(removed, BlockRemoved)
    assert isinstance(stored, BlockStored)
    assert removed.block_hashes == [maybe_convert_block_hash(each) for each in gone]
    assert (stored.block_hashes, stored.block_size) == ([maybe_convert_block_hash(come[0])], BLOCK_SIZE)
    assert removed.medium == stored.medium == "CPU"
    assert versions.cache_events([], [], BLOCK_SIZE) == []


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions have no fixed seed without it."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.mark.skipif(
    "DEFAULT_NONE_HASH_SEED" not in source_of("v1/core/kv_cache_utils.py"), reason="this vLLM has no fixed seed"
)
def test_keys_do_not_depend_on_the_process_unless_it_has_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for algorithm in ("sha256", "sha256_cbor"):
        ours = keys(algorithm)
        assert keys(algorithm) == ours
        monkeypatch.setenv("PYTHONHASHSEED", "1")
        assert not set(keys(algorithm)) & set(ours)
        monkeypatch.delenv("PYTHONHASHSEED")


def test_images_change_the_keys_from_their_first_block_on() -> None:
    text, one, other, moved = keys(), *(keys(mm_features=features(*which)) for which in (("1",), ("2",), ("1", 41)))
    assert {len(key) for key in text} == {32}
    assert text[0] == one[0] == other[0] == moved[0]
    assert len({key for some in (text, one, other, moved) for key in some[1:]}) == 8


def test_salts_and_embeddings_change_all_keys() -> None:
    import torch

    embedded = [keys(prompt_token_ids=None, prompt_embeds=torch.full((100, 8), value)) for value in (1.0, 2.0)]
    assert len({key for some in (keys(), keys(cache_salt="theirs"), *embedded) for key in some}) == 12
