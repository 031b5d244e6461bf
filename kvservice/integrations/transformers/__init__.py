"""Hugging Face transformers models with their K/V in the daemon.

    install(model)                                   attention goes to the daemon from here on
    with KVServiceCache(kv) as cache:                kv: a session of kvservice.client
        model.generate(**inputs, past_key_values=cache)      the library's own loop: greedy, sampled, beams, assisted

or, for an engine with a loop of its own, `forward(model, step, token_ids)`: one ragged step without padding, over
sequences that were allocated with `extra_keys=model_keys(model)`.

Supported are decoders whose attention is plain, grouped-query or multi-query and goes through the library's
attention-function registry (and BLOOM, which has attention code of its own), with rotary, learned or ALiBi positions,
sliding windows and logits soft caps. `install` names what keeps a model from being supported.
"""

from kvservice.integrations.transformers.cache import KVServiceCache
from kvservice.integrations.transformers.keys import model_keys
from kvservice.integrations.transformers.models import install, pool_options, uninstall
from kvservice.integrations.transformers.packed import forward

__all__ = ["KVServiceCache", "forward", "install", "model_keys", "pool_options", "uninstall"]
