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
are not supported. These model types give the same tokens and logits as the library's own cache:

    afmoe, apertus, arcee, aria_text, beam, bert, bert-generation, biogpt, bitnet, bloom, camembert, codegen, cohere,
    cohere2, cohere2_moe, cohere_compass_text, ctrl, cwm, data2vec-text, dbrx, dots1, electra, ernie, ernie4_5,
    ernie4_5_moe, exaone4, exaone_moe, falcon, flex_olmo, gemma, gemma2, gemma3_text, glm, glm4, glm4_moe, gpt-sw3,
    gpt2, gpt_bigcode, gpt_neo, gpt_neox, gpt_neox_japanese, gptj, granite, granitemoe, granitemoeshared, helium,
    hunyuan_v1_dense, hunyuan_v1_moe, hy_v3, hyperclovax, internlm3, iquestcoder, jais2, jetmoe, kolibri1, laguna,
    llama, mellum, minimax_m2, ministral, ministral3, mistral, mixtral, modernbert-decoder, mpt, nanochat, nemotron,
    olmo, olmo2, olmo3, olmoe, opt, persimmon, phi, phi3, phi4_multimodal, phimoe, qwen2, qwen2_moe, qwen3, qwen3_moe,
    roberta, roberta-prelayernorm, roc_bert, seed_oss, smollm3, solar_open, stablelm, starcoder2, vaultgemma,
    xlm-roberta, xlm-roberta-xl, xmod.
"""

from kvservice.integrations.transformers.cache import KVServiceCache
from kvservice.integrations.transformers.decode_graphs import DecodeGraphs
from kvservice.integrations.transformers.keys import model_keys
from kvservice.integrations.transformers.models import install, pool_options, uninstall
from kvservice.integrations.transformers.packed import forward

__all__ = ["DecodeGraphs", "KVServiceCache", "forward", "install", "model_keys", "pool_options", "uninstall"]
