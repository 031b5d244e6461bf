// The panel of the tiers: the pool, the block store and what lies below it, from the fastest to the largest.

import { inner, make, say } from "./dom.js";
import * as format from "./format.js";
import { Table } from "./tables.js";

/**
 * A row of the panel. `state` is the pool's and the store's as well, so that all rows read alike.
 * @typedef {object} Rung
 * @property {string} name
 * @property {string} state
 * @property {string} [said]  in place of the state
 * @property {number} used_bytes
 * @property {number} capacity_bytes  0 if it is not known
 * @property {number} [values]
 * @property {number} [hit_share]
 * @property {number} [down_bytes_per_s]
 * @property {number} [up_bytes_per_s]
 * @property {number} [latency_s]
 * @property {number} [faults]
 */

/** @type {Record<string, string>} */
const NAMES = { disk: "Disk", mooncake: "Mooncake" };

export class Tiers {
  /** @param {HTMLElement} host */
  constructor(host) {
    this.host = host;
    this.table = ladder(host);
    this.notes = make("p", { class: "note notes" });
    host.append(this.notes);
  }

  /**
   * Show the tiers, or nothing if there is none below the pool.
   * @param {Snapshot} snapshot
   * @param {Info} info
   */
  frame(snapshot, info) {
    const shown = hasTiers(snapshot);
    this.host.hidden = !shown;
    if (!shown) return;
    const found = rungs(snapshot, info);
    this.table.show(found, found.length);
    const notes = [missNote(snapshot.store), spillNote(snapshot.spill), savedNote(snapshot.saved)];
    say(this.notes, notes.filter(Boolean).join(" "));
  }
}

/**
 * Whether anything of the pool can go below it.
 * @param {Pick<Snapshot, "tiers" | "spill" | "saved">} snapshot
 */
export function hasTiers({ tiers, spill, saved }) {
  return tiers.length > 0 || spill !== undefined || saved !== undefined;
}

/** @param {Snapshot["store"]} store */
function missNote(store) {
  const missed = store ? missReasons(store) : "";
  return missed && `Blocks that lookups missed first: ${missed}.`;
}

/**
 * How many lookups missed a block, by why the first of the missing ones was not there. Empty if none did.
 * @param {StoreFigures} store
 */
export function missReasons(store) {
  const { evicted_misses, not_whole_misses, other_namespace_misses, never_stored_misses } = store;
  const reasons = /** @type {[number, string][]} */ ([
    [evicted_misses, "evicted"],
    [not_whole_misses, "not whole"],
    [other_namespace_misses, "in another namespace"],
    [never_stored_misses, "never stored"],
  ]);
  const counted = reasons.filter(([number]) => number);
  return counted.map(([number, why]) => `${format.count(number)} ${why}`).join(", ");
}

/** @param {Snapshot["spill"]} spill */
function spillNote(spill) {
  if (!spill) return "";
  const { saved_blocks, loaded_blocks, hit_tokens, down_bytes_per_s, up_bytes_per_s } = spill;
  const saved = `${format.plural(saved_blocks, "block")} (${format.bytes(down_bytes_per_s)}/s)`;
  const loaded = `${format.plural(loaded_blocks, "block")} (${format.bytes(up_bytes_per_s)}/s)`;
  return `The pool has saved ${saved} below and loaded ${loaded}, with ${format.plural(hit_tokens, "token")} of prompts.`;
}

/** @param {Snapshot["saved"]} saved */
function savedNote(saved) {
  if (!saved) return "";
  const { num_sessions, used_bytes, capacity_bytes, damaged, errors } = saved;
  const bad =
    (damaged ? `; ${format.count(damaged)} damaged` : "") + (errors ? `; ${format.plural(errors, "disk error")}` : "");
  return `Saved sessions: ${format.count(num_sessions)}, ${format.bytes(used_bytes)} of ${format.bytes(capacity_bytes)}${bad}.`;
}

/**
 * @param {HTMLElement} host
 * @returns {Table<Rung>}
 */
function ladder(host) {
  /** @type {(value: number | undefined) => string} */
  const flow = (value) => (value === undefined ? format.bytes(value) : `${format.bytes(value)}/s`);
  return new Table(host, {
    id: "tiers",
    title: "Tiers",
    empty: "None.",
    key: (rung) => rung.name,
    columns: [
      { title: "Tier", text: (rung) => rung.name },
      { title: "State", text: (rung) => rung.said ?? rung.state, before: lamp },
      { title: "Filled", text: (rung) => format.percent(share(rung)), before: bar },
      { title: "In use", number: true, text: inUse },
      { title: "Values", number: true, text: (rung) => format.count(rung.values) },
      { title: "Found", number: true, text: (rung) => format.percent(rung.hit_share) },
      { title: "Written ↓", number: true, text: (rung) => flow(rung.down_bytes_per_s) },
      { title: "Read ↑", number: true, text: (rung) => flow(rung.up_bytes_per_s) },
      { title: "Latency", number: true, text: (rung) => format.latency(rung.latency_s || null) },
      { title: "Faults", number: true, text: (rung) => format.count(rung.faults), before: alarm },
    ],
  });
}

/**
 * The rows, fastest first.
 * @param {Pick<Snapshot, "pool" | "rates" | "store" | "tiers">} snapshot
 * @param {Pick<Info, "block_bytes" | "prefix_caching">} info
 * @returns {Rung[]}
 */
function rungs({ pool, rates, store, tiers: lower }, { block_bytes, prefix_caching }) {
  const used = pool.num_blocks - pool.free_blocks;
  const first = {
    name: "Pool",
    state: "open",
    used_bytes: used * block_bytes,
    capacity_bytes: pool.num_blocks * block_bytes,
    values: used,
    hit_share: prefix_caching ? rates.hit_share : undefined,
  };
  const isWhole = !store || store.ready_bytes >= store.num_bytes;
  const second = store && {
    ...store,
    name: "Block store",
    state: isWhole ? "open" : "opening",
    said: isWhole ? undefined : `${format.bytes(store.ready_bytes)} ready`,
    capacity_bytes: store.num_bytes,
    values: store.blocks,
  };
  return [first, ...(second ? [second] : []), ...lower.map(lowerRung)];
}

/**
 * @param {TierRow} tier
 * @returns {Rung}
 */
function lowerRung(tier) {
  const { name, num_values, errors, corrupt } = tier;
  const values = tier.capacity_bytes ? num_values : undefined;
  return { ...tier, name: NAMES[name] ?? name, values, faults: errors + corrupt };
}

/** @param {Rung} rung */
const share = ({ used_bytes, capacity_bytes }) => (capacity_bytes ? used_bytes / capacity_bytes : null);

/** @param {Rung} rung */
function inUse({ used_bytes, capacity_bytes }) {
  return capacity_bytes ? `${format.bytes(used_bytes)} of ${format.bytes(capacity_bytes)}` : format.bytes(undefined);
}

/**
 * @param {Rung} rung
 * @param {Element} cell
 */
function lamp({ state }, cell) {
  const row = /** @type {HTMLElement} */ (cell.parentElement);
  row.dataset.state = state;
  cell.children[0].className = "lamp";
}

/**
 * @param {Rung} rung
 * @param {Element} cell
 */
function alarm({ faults }, cell) {
  cell.classList.toggle("alarm", Boolean(faults));
}

/**
 * @param {Rung} rung
 * @param {Element} cell
 */
function bar(rung, cell) {
  const [track] = cell.children;
  if (!track.firstElementChild) track.append(make("span"));
  const filled = share(rung);
  track.className = filled === null ? "fill unbounded" : "fill";
  /** @type {HTMLElement} */ (inner(track, "span")).style.width = `${100 * Math.min(1, filled ?? 0)}%`;
}
