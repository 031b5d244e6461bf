// The strip of key figures at the top, and the daemon's configuration.

import { Facts } from "./dom.js";
import * as format from "./format.js";
import { hasTiers, missReasons } from "./tiers.js";

export class Figures {
  /** @param {HTMLElement} host */
  constructor(host) {
    this.facts = new Facts(host);
  }

  /**
   * @param {Snapshot} snapshot
   * @param {Pick<Info, "prefix_caching">} info
   */
  frame(snapshot, info) {
    const { pool, rates, store, scheduling, transfers } = snapshot;
    const held = (pool.active_blocks + pool.shared_blocks) / pool.num_blocks;
    const swapped = pool.swapped_sequences ? ` + ${format.count(pool.swapped_sequences)} swapped` : "";
    this.facts.show([
      ["Pool held", format.percent(held)],
      ...(pool.quarantined_blocks ? inQuarantine(pool) : []),
      ["Tokens", format.compact(pool.tokens)],
      ["Sequences", format.count(pool.sequences - pool.swapped_sequences) + swapped],
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
      ...(store && !hasTiers(snapshot) ? storeFigures(store) : []),
      ...(transfers ? transferFigures(transfers) : []),
      ...(scheduling ? schedulingFigures(scheduling) : []),
    ]);
  }
}

/**
 * Blocks that a process may still write whose session was lost.
 * @param {Snapshot["pool"]} pool
 * @returns {[string, string][]}
 */
function inQuarantine({ quarantined_blocks }) {
  return [["In quarantine", format.plural(quarantined_blocks, "block")]];
}

/**
 * @param {NonNullable<Snapshot["store"]>} store
 * @returns {[string, string][]}
 */
function storeFigures(store) {
  const missed = missReasons(store);
  return [
    ["Store", `${format.bytes(store.used_bytes)} of ${format.bytes(store.num_bytes)}`],
    ...(missed ? /** @type {[string, string][]} */ ([["Lookups missed", missed]]) : []),
  ];
}

/**
 * @param {Transfers} transfers
 * @returns {[string, string][]}
 */
function transferFigures({ engines, regions, p99_s, ...recent }) {
  const faults = recent.failed_in + recent.failed_out + recent.engine_failures + recent.damaged_blocks;
  return [
    ["Transfer engines", `${format.count(engines)} of ${format.count(regions)}`],
    ["Transfers in/s", format.bytes(recent.in_bytes_per_s)],
    ["Transfers out/s", format.bytes(recent.out_bytes_per_s)],
    ["In messages instead/s", format.bytes(recent.fallback_bytes_per_s)],
    ["Transfers, p99", format.latency(p99_s)],
    ["Transfer faults", format.count(faults)],
  ];
}

/**
 * @param {Scheduling} scheduling
 * @returns {[string, string][]}
 */
function schedulingFigures({ totals, ...recent }) {
  return [
    ["Requests waiting", format.count(totals.waiting)],
    ["Running", format.count(totals.running) + (totals.swapped ? ` + ${format.count(totals.swapped)} swapped` : "")],
    ["Generated/s", format.compact(recent.generated_tokens_per_s)],
    ["Preempted/s", format.compact(recent.preemptions_per_s)],
    ["First token, p99", format.latency(recent.first_token_p99_s)],
    ["Between tokens, p99", format.latency(recent.between_tokens_p99_s)],
    ["Proposals right", format.percent(recent.accepted_share)],
  ];
}

/**
 * What the daemon took over at its start, and whether something was lost. Empty if there is nothing to say.
 * @param {Pick<Snapshot, "restart" | "uptime_s">} snapshot
 */
export function restartOf({ restart, uptime_s }) {
  const { num_restarts, outcome, lost, summary } = restart;
  const times = num_restarts === 1 ? "once" : `${format.count(num_restarts)} times`;
  const last = num_restarts ? `Restarted ${times}, last ${format.age(Math.floor(uptime_s))} ago ` : "";
  return { text: summary && `${last}${summary}`, bad: outcome === "refused" || lost.sequences > 0 };
}

/** @param {Info} info */
export function shapeOf({ version, device, dtype, kv_cache_dtype, num_layers, num_kv_heads, head_size }) {
  const stored = ["auto", dtype].includes(kv_cache_dtype) ? dtype : `${dtype} stored as ${kv_cache_dtype}`;
  const layers = `${format.plural(num_layers, "layer")} × ${format.plural(num_kv_heads, "KV head")} × ${head_size}`;
  return [version, device, layers, stored].join(" · ");
}
