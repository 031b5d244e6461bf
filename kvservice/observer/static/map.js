// The pool map: one cell per block, or per group of neighbours if there are too many blocks.

import { Cells } from "./cells.js";
import { inner, make, reconcile, say } from "./dom.js";
import * as format from "./format.js";
import { DEVICE, MEANING, SWAP, colours, contextOf, paintBlock } from "./paint.js";

const SWATCH = 12;

/**
 * Blocks to highlight: with a ring, or as the only ones that do not fade.
 * @typedef {{tier: Tier, ids: number[], only: boolean}} Marks
 *
 * `count` blocks of a tier, from `start` on.
 * @typedef {{tier: Tier, start: number, count: number}} BlockRange
 */

export class PoolPanel {
  #groups = { device: 1, swap: 1 };
  /** @type {Pick<Info, "num_blocks" | "num_swap_blocks" | "block_size" | "block_bytes">} */
  #info = { num_blocks: 0, num_swap_blocks: 0, block_size: 0, block_bytes: 0 };
  /** @type {Marks} */
  #marks = { tier: "device", ids: [], only: false };

  /**
   * `choose` is called with the blocks of a chosen cell.
   * @param {HTMLElement} host
   * @param {(range: BlockRange) => void} choose
   */
  constructor(host, choose) {
    this.note = make("p", { class: "note" });
    // The visible counterpart of the cell element that screen readers see.
    this.readout = make("p", { class: "readout", "aria-hidden": "true" });
    this.legend = make("ul", { class: "legend" });
    this.device = this.#cells("device", "Map of the pool", 380, 26);
    this.swap = this.#cells("swap", "Map of the swap tier", 110, 18);
    this.swapLegend = make("ul", { class: "legend" });
    this.swapNote = make("p", { class: "note" });
    const head = make("div", { class: "head" }, make("h3", {}, "Swap tier"), this.swapNote);
    this.swapPart = make("div", { class: "swap", hidden: true }, head, this.swapLegend, this.swap.element);
    this.choose = choose;
    host.append(
      make("div", { class: "head" }, make("h2", { id: "pool-title" }, "Pool"), this.note),
      this.legend, this.device.element, this.readout, this.swapPart,
    );
  }

  /** @param {Info} info */
  hello(info) {
    this.#info = info;
    this.swapPart.hidden = !info.num_swap_blocks;
  }

  /** @param {PoolMap} map */
  map({ group, group_swap, device, swap }) {
    const regrouped = group !== this.#groups.device || group_swap !== this.#groups.swap;
    this.#groups = { device: group, swap: group_swap };
    this.device.show({ states: DEVICE, shares: device, grouped: group > 1 });
    this.swap.show({ states: SWAP, shares: swap, grouped: group_swap > 1 });
    const { num_blocks, num_swap_blocks, block_size, block_bytes } = this.#info;
    const block = `of ${format.plural(block_size, "token")}, ${format.bytes(block_bytes)} each`;
    say(this.note, `${format.plural(num_blocks, "block")} ${block}${toACell(group)}`);
    say(this.swapNote, `${format.plural(num_swap_blocks, "block")}${toACell(group_swap)}`);
    if (regrouped) this.mark(this.#marks);
  }

  /** @param {Snapshot} snapshot */
  frame({ pool }) {
    const { free_blocks, active_blocks, shared_blocks, cached_blocks, pinned_blocks, num_blocks } = pool;
    const counts = [free_blocks, active_blocks, shared_blocks, cached_blocks, pinned_blocks];
    showLegend(this.legend, DEVICE.map((state, index) => [state, counts[index]]), num_blocks);
    const freeSwap = pool.num_swap_blocks - pool.used_swap_blocks;
    showLegend(this.swapLegend, [["free", freeSwap], ["swapped", pool.used_swap_blocks]], pool.num_swap_blocks);
  }

  /**
   * Draw rings around the chosen blocks, or show only the blocks of a sequence.
   * @param {Marks} marks
   */
  mark(marks) {
    const { tier, ids, only } = (this.#marks = marks);
    for (const name of /** @type {Tier[]} */ (["device", "swap"])) {
      const cells = name === tier ? ids.map((id) => Math.floor(id / this.#groups[name])) : [];
      this[name].mark(only ? [] : cells, only && name === tier ? cells : null);
    }
  }

  /**
   * @param {Tier} tier
   * @param {string} label
   * @param {number} maxHeight
   * @param {number} maxCell
   */
  #cells(tier, label, maxHeight, maxCell) {
    return new Cells({
      label, maxHeight, maxCell,
      describe: (index) => this.#describe(tier, index),
      choose: (index) => this.choose(this.#range(tier, index)),
      hover: (index) => say(this.readout, index === null ? "" : this.#describe(tier, index)),
    });
  }

  /**
   * @param {Tier} tier
   * @param {number} index
   * @returns {BlockRange}
   */
  #range(tier, index) {
    const group = this.#groups[tier];
    const total = tier === "device" ? this.#info.num_blocks : this.#info.num_swap_blocks;
    return { tier, start: index * group, count: Math.min(group, total - index * group) };
  }

  /**
   * @param {Tier} tier
   * @param {number} index
   * @returns {string}
   */
  #describe(tier, index) {
    const { start, count } = this.#range(tier, index);
    const what = tier === "swap" ? "Swap block" : "Block";
    if (count === 1) return `${what} ${format.count(start)}: ${this[tier].stateOf(index)}`;
    const shares = this[tier].sharesOf(index);
    const states = tier === "device" ? DEVICE : SWAP;
    const parts = states.flatMap((state, at) => {
      return shares[at] ? [`${format.percent(Math.round(shares[at] / 2.55) / 100)} ${state}`] : [];
    });
    return `${what}s ${format.count(start)} to ${format.count(start + count - 1)}: ${parts.join(", ")}`;
  }
}

/** @param {number} group */
function toACell(group) {
  return group > 1 ? `, ${format.count(group)} to a cell, stacked by state` : "";
}

/**
 * @param {Element} list
 * @param {[state: string, number: number][]} counts
 * @param {number} total
 */
function showLegend(list, counts, total) {
  reconcile(list, counts, {
    key: ([state]) => state,
    create: ([state]) => {
      const [number, share] = [make("span", { class: "number" }), make("span", { class: "share" })];
      return make("li", { title: MEANING[state] }, swatch(state), make("span", {}, state), number, share);
    },
    update: (entry, [, number]) => {
      say(inner(entry, ".number"), format.count(number));
      say(inner(entry, ".share"), format.percent(total ? number / total : 0));
    },
  });
}

/** @param {string} state */
function swatch(state) {
  const ratio = window.devicePixelRatio || 1;
  const canvas = make("canvas", { "aria-hidden": "true", class: "swatch" });
  Object.assign(canvas, { width: SWATCH * ratio, height: SWATCH * ratio });
  const paint = () => {
    paintBlock(contextOf(canvas, ratio), colours(document.documentElement), state, 0, 0, SWATCH);
  };
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  return canvas;
}
