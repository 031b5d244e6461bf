// The detail panel beside the map. It shows one block, the blocks of a cell, or a sequence, and refreshes while shown.

import { Cells } from "./cells.js";
import { Facts, make, reconcile, say } from "./dom.js";
import * as format from "./format.js";
import { DEVICE, MEANING, SWAP } from "./paint.js";
import { blockHash, go, sequenceHash } from "./selection.js";
import { ask } from "./stream.js";

const HINT = "Choose a block on the map, or a sequence in its table. On the map the arrow keys move, Enter chooses.";

/**
 * Shows the answer to a question. `marks()` are the blocks to highlight on the map, as known so far.
 * @typedef {object} View
 * @property {string} title
 * @property {[path: string, parameters: Record<string, string | number>]} question
 * @property {Node[]} elements
 * @property {() => import("./map.js").Marks} marks
 * @property {(answer: any) => string} line
 * @property {(answer: any) => void} show
 */

export class Detail {
  /** @type {View | null} */
  #view = null;
  #asked = false;

  /**
   * `mark` gets the blocks to highlight on the map.
   * @param {HTMLElement} host
   * @param {(marks: import("./map.js").Marks) => void} mark
   */
  constructor(host, mark) {
    this.mark = mark;
    this.title = make("h2", { id: "detail-title" }, "Nothing chosen");
    this.line = make("p", { class: "line", id: "chosen", role: "status" }, HINT);
    this.clear = make("button", { type: "button", class: "quiet", hidden: true, onclick: () => go("") }, "Clear");
    this.body = make("div", { class: "body" });
    host.append(make("div", { class: "head" }, this.title, this.clear), this.line, this.body);
  }

  /**
   * Show a selection from parse().
   * @param {import("./selection.js").Selection | null} selection
   */
  choose(selection) {
    this.#view = selection && viewOf(selection);
    this.clear.hidden = !selection;
    say(this.title, this.#view?.title ?? "Nothing chosen");
    say(this.line, this.#view ? "" : HINT);
    this.body.replaceChildren(...(this.#view?.elements ?? []));
    this.mark(this.#view?.marks() ?? { tier: "device", ids: [], only: false });
    this.#asked = false;
    return this.refresh();
  }

  async refresh() {
    const view = this.#view;
    if (!view || this.#asked) return;
    this.#asked = true;
    try {
      const answer = await ask(...view.question);
      if (view !== this.#view) return;
      view.show(answer);
      say(this.line, view.line(answer));
      this.mark(view.marks());
    } catch (error) {
      if (view === this.#view) say(this.line, error instanceof Error ? error.message : `${error}`);
    } finally {
      if (view === this.#view) this.#asked = false;
    }
  }
}

/** @implements {View} */
class BlockView {
  /** @param {import("./selection.js").BlockSelection} selection */
  constructor({ tier, id }) {
    this.tier = tier;
    this.id = id;
    this.title = `${tier === "swap" ? "Swap block" : "Block"} ${format.count(id)}`;
    /** @type {View["question"]} */
    this.question = ["block", { tier, id }];
    this.facts = new Facts();
    this.body = make("tbody");
    const heads = ["Sequence", "Session"].map((text) => make("th", { scope: "col" }, text));
    heads.push(make("th", { scope: "col", class: "number" }, "Place in its table"));
    const head = make("thead", {}, make("tr", {}, ...heads));
    this.table = make("table", { "aria-label": "Sequences that hold it", hidden: true }, head, this.body);
    this.more = make("p", { class: "note" });
    this.elements = [this.facts.element, this.table, this.more];
  }

  marks() {
    return { tier: this.tier, ids: [this.id], only: false };
  }

  /** @param {BlockAnswer} block */
  line(block) {
    const state = shown(this.tier, block.state);
    return `${state}: ${MEANING[state]}`;
  }

  /** @param {BlockAnswer} block */
  show(block) {
    /** @type {[string, string][]} */
    const facts = [["References", format.count(block.ref_count)]];
    if (block.age_s !== null) facts.push(["Taken", `${format.age(block.age_s)} ago`]);
    if (block.idle_s !== null) facts.push(["Released", `${format.age(block.idle_s)} ago`]);
    facts.push(["Hash", block.hash ?? "none: not full, or not computed"]);
    this.facts.show(facts);
    this.table.hidden = !block.sequences.length;
    say(this.more, block.sequences_left_out ? `and ${format.plural(block.sequences_left_out, "other sequence")}` : "");
    reconcile(this.body, block.sequences, {
      key: (row) => `${row.session_id}/${row.sequence_id}/${row.position}`,
      create: holderRow,
      update: () => {},
    });
  }
}

/** @implements {View} */
class BlocksView {
  /** @type {number[]} */
  #refCounts = [];

  /** @param {import("./selection.js").BlocksSelection} selection */
  constructor({ tier, start, count }) {
    this.tier = tier;
    this.start = start;
    const last = start + count - 1;
    this.title = `${tier === "swap" ? "Swap blocks" : "Blocks"} ${format.count(start)} to ${format.count(last)}`;
    /** @type {View["question"]} */
    this.question = ["blocks", { tier, start, count }];
    this.cells = new Cells({
      label: this.title,
      maxHeight: 300,
      maxCell: 22,
      describe: (index) => this.#describe(index),
      choose: (index) => go(blockHash(tier, start + index)),
      hover: (index) => say(this.readout, index === null ? "" : this.#describe(index)),
    });
    this.readout = make("p", { class: "readout", "aria-hidden": "true" });
    this.elements = [this.cells.element, this.readout];
  }

  marks() {
    return { tier: this.tier, ids: [this.start], only: false };
  }

  /** @param {BlocksAnswer} answer */
  line({ states }) {
    return tally(this.tier, states);
  }

  /** @param {BlocksAnswer} answer */
  show({ states, ref_counts }) {
    this.#refCounts = ref_counts;
    this.cells.show(asCells(this.tier, states));
  }

  /** @param {number} index */
  #describe(index) {
    return describeBlock(this.start + index, this.cells.stateOf(index), this.#refCounts[index]);
  }
}

/** @implements {View} */
class SequenceView {
  /** @type {number[]} */
  #ids = [];
  /** @type {number[]} */
  #refCounts = [];
  /** @type {Tier} */
  #tier = "device";

  /** @param {import("./selection.js").SequenceSelection} selection */
  constructor({ session_id, sequence_id }) {
    this.title = `Sequence ${sequence_id}`;
    /** @type {View["question"]} */
    this.question = ["sequence", { session_id, sequence_id }];
    this.facts = new Facts();
    this.readout = make("p", { class: "readout", "aria-hidden": "true" });
    this.cells = new Cells({
      label: `Block table of sequence ${sequence_id}`,
      maxHeight: 220,
      maxCell: 22,
      describe: (index) => this.#describe(index),
      choose: (index) => go(blockHash(this.#tier, this.#ids[index])),
      hover: (index) => say(this.readout, index === null ? "" : this.#describe(index)),
    });
    this.ids = make("p", { class: "ids" });
    const title = make("h3", {}, "Block table");
    this.elements = [this.facts.element, title, this.cells.element, this.readout, this.ids];
  }

  marks() {
    return { tier: this.#tier, ids: this.#ids, only: true };
  }

  /** @param {SequenceAnswer} sequence */
  line(sequence) {
    return tally(sequence.tier, sequence.states);
  }

  /** @param {SequenceAnswer} sequence */
  show(sequence) {
    [this.#ids, this.#refCounts, this.#tier] = [sequence.block_ids, sequence.ref_counts, sequence.tier];
    const { number, text } = format.ranges(sequence.block_ids);
    const total = sequence.block_ids.length + sequence.blocks_left_out;
    this.facts.show([
      ["Session", sequence.session_name || sequence.session_id],
      ["Tokens", `${format.count(sequence.length)}, ${format.count(sequence.computed)} computed`],
      ["Tier", sequence.tier],
      ["Blocks", `${format.count(total)}, in ${format.plural(number, "range")}`],
    ]);
    const more = sequence.blocks_left_out ? `, and ${format.count(sequence.blocks_left_out)} more` : "";
    say(this.ids, text + more);
    this.cells.show(asCells(sequence.tier, sequence.states));
  }

  /** @param {number} index */
  #describe(index) {
    const block = describeBlock(this.#ids[index], this.cells.stateOf(index), this.#refCounts[index]);
    return `Place ${format.count(index)}. ${block}`;
  }
}

/** @param {HolderRow} holder */
function holderRow(holder) {
  const { session_id, session_name, sequence_id, position } = holder;
  const open = () => go(sequenceHash(holder));
  const label = `Sequence ${sequence_id}`;
  const button = make("button", { type: "button", "aria-label": label, onclick: open }, sequence_id);
  return make(
    "tr", {},
    make("th", { scope: "row" }, button),
    make("td", {}, session_name || session_id),
    make("td", { class: "number" }, format.count(position)),
  );
}

/**
 * @param {import("./selection.js").Selection} selection
 * @returns {View}
 */
function viewOf(selection) {
  if (selection.kind === "block") return new BlockView(selection);
  return selection.kind === "blocks" ? new BlocksView(selection) : new SequenceView(selection);
}

/**
 * @param {number} id
 * @param {string} state
 * @param {number} references
 */
function describeBlock(id, state, references) {
  const held = references > 1 ? `, ${format.plural(references, "reference")}` : "";
  return `Block ${format.count(id)}: ${state}${held}`;
}

/**
 * @param {Tier} tier
 * @param {string[]} states
 */
function tally(tier, states) {
  const counts = Map.groupBy(states, (state) => shown(tier, state));
  return [...counts].map(([state, found]) => `${format.count(found.length)} ${state}`).join(", ") || "no blocks";
}

/**
 * The displayed state. A swap block is free or swapped; its reference count shows how many tables hold it.
 * @param {Tier} tier
 * @param {string} state
 */
function shown(tier, state) {
  return tier === "swap" && state !== "free" ? "swapped" : state;
}

/**
 * @param {Tier} tier
 * @param {string[]} states
 */
function asCells(tier, states) {
  const names = tier === "swap" ? SWAP : DEVICE;
  const shares = new Uint8Array(states.length * names.length);
  states.forEach((state, index) => (shares[index * names.length + names.indexOf(shown(tier, state))] = 255));
  return { states: names, shares, grouped: false };
}
