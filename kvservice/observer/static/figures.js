// The strip of figures at the top, and what the daemon is.

import { Facts } from "./dom.js";
import * as format from "./format.js";

export class Figures {
  constructor(host) {
    this.facts = new Facts({ id: "figures", "aria-label": "Key figures" });
    host.replaceWith(this.facts.element);
  }

  frame({ pool, rates }, info) {
    const held = (pool.active_blocks + pool.shared_blocks) / pool.num_blocks;
    this.facts.show([
      ["Pool held", format.percent(held)],
      ["Tokens", format.compact(pool.tokens)],
      ["Sequences", pool.swapped_sequences ? `${format.count(pool.sequences)} + ${format.count(pool.swapped_sequences)} swapped` : format.count(pool.sequences)],
      ["Sessions", format.count(pool.sessions)],
      ["Prefix hits", info.prefix_caching ? format.percent(rates.hit_share) : "off"],
      ["Tokens/s", format.compact(rates.computed_tokens)],
      ["Calls/s", format.compact(rates.calls)],
      ["Lane calls/s", format.compact(rates.lane_calls)],
      ["Errors/s", format.compact(rates.errors)],
      ["Evicted/s", format.compact(rates.evicted_blocks)],
      ["Copies on write/s", format.compact(rates.cow_copies)],
      ["Out of blocks/s", format.compact(rates.out_of_blocks)],
      ["Lanes", format.count(pool.lanes)],
      ["Regions", pool.regions ? `${format.count(pool.regions)}, ${format.bytes(pool.region_bytes)}` : "0"],
    ]);
  }
}

export function shapeOf(info) {
  const stored = info.kv_cache_dtype === "auto" || info.kv_cache_dtype === info.dtype ? info.dtype : `${info.dtype} stored as ${info.kv_cache_dtype}`;
  return `${info.version} · ${info.device} · ${format.plural(info.num_layers, "layer")} × ${format.plural(info.num_kv_heads, "KV head")} × ${info.head_size} · ${stored}`;
}
