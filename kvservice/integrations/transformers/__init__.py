"""Hugging Face transformers models with their K/V in the daemon.

    install(model)                                   the model's attention now runs in the daemon
    with KVServiceCache(kv) as cache:                kv is a session of kvservice.client
        model.generate(**inputs, cache=cache)        the library's own loop: greedy, sampled, beams, assisted

Before version 5.24 of the library the argument is `past_key_values`. An engine with its own loop uses `forward(model,
step, token_ids)`, which runs one ragged step without padding over sequences that were allocated with
`extra_keys=model_keys(model)`.

`pool_options(model.config)` returns the shape of the pool that a model needs: `num_layers`, `num_kv_heads`, `head_size`
(32 to 256, in steps of 8) and `dtype`. `cache.reset()` frees the sequences of a cache, which can then take another
batch.

With `KVServiceCache(kv, graphs=DecodeGraphs(model, kv, max_tokens=4096))` the decode passes are CUDA graphs, if model
and pool are on the same GPU and the daemon shares the pool for writing.

The integration supports decoders with multi-head, grouped-query or multi-query attention, with rotary, learned or ALiBi
positions, sliding windows and logits soft caps. It uses the library's registry of attention functions, and adapts seven
families that have their own attention code (`own_attention`). `install` raises an error with the reason for models that
are not supported. The README lists the model types that give the same tokens and logits as the library's own cache.
"""

from kvservice.integrations.transformers.cache import KVServiceCache
from kvservice.integrations.transformers.decode_graphs import DecodeGraphs
from kvservice.integrations.transformers.keys import model_keys
from kvservice.integrations.transformers.models import forward, install, pool_options, uninstall

__all__ = ["DecodeGraphs", "KVServiceCache", "forward", "install", "model_keys", "pool_options", "uninstall"]
