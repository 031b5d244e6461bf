// The panel of the tiers: the pool, the block store and what lies below it, from the fastest to the largest.

import { inner, make } from "./dom.js";
import * as format from "./format.js";
import { Table } from "./tables.js";

/**
 * A row of the panel. `state` is the pool's and the store's as well, so that all rows read alike.
 * @typedef {object} Rung
 * @property {string} name
 * @property {string} state
 * @property {number} used_bytes
 * @property {number} capacity_bytes  0 if it is not known
 * @property {number} values
 * @property {number} [hit_share]
 * @property {number} [down_bytes_per_s]
 * @property {number} [up_bytes_per_s]
 * @property {number} [latency_s]
 * @property {number} [faults]
 */

/** @type {Record<string, string>} */
const NAMES = { disk: "Disk", mooncake: "Mooncake" };

/**
 * @param {HTMLElement} host
 * @returns {Table<Rung>}
 */
export function tiers(host) {
  /** @type {(value: number | undefined) => string} */
  const flow = (value) => (value === undefined ? format.bytes(value) : `${format.bytes(value)}/s`);
  return new Table(host, {
    id: "tiers",
    title: "Tiers",
    empty: "None.",
    key: (rung) => rung.name,
    columns: [
      { title: "Tier", text: (rung) => rung.name },
      { title: "State", text: (rung) => rung.state, before: lamp },
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
 * The rows of a daemon with tiers, fastest first. Empty if there are none below the block store.
 * @param {Pick<Snapshot, "pool" | "rates" | "store" | "tiers">} snapshot
 * @param {Pick<Info, "block_bytes" | "prefix_caching">} info
 * @returns {Rung[]}
 */
export function rungs({ pool, rates, store, tiers: lower }, { block_bytes, prefix_caching }) {
  if (!lower.length) return [];
  const used = pool.num_blocks - pool.free_blocks;
  const first = {
    name: "Pool",
    state: "open",
    used_bytes: used * block_bytes,
    capacity_bytes: pool.num_blocks * block_bytes,
    values: used,
    hit_share: prefix_caching ? rates.hit_share : undefined,
  };
  const second = store && {
    ...store,
    name: "Block store",
    state: "open",
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
  return { ...tier, name: NAMES[name] ?? name, values: num_values, faults: errors + corrupt };
}

/** @param {Rung} rung */
const share = ({ used_bytes, capacity_bytes }) => (capacity_bytes ? used_bytes / capacity_bytes : null);

/** @param {Rung} rung */
function inUse({ used_bytes, capacity_bytes }) {
  const room = capacity_bytes ? ` of ${format.bytes(capacity_bytes)}` : "";
  return format.bytes(used_bytes) + room;
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
