// The detail panel beside the map. It shows one block, the blocks of a cell, or a sequence, and refreshes while shown.

import { Cells } from "./cells.js";
import { Facts, make, reconcile, say } from "./dom.js";
import * as format from "./format.js";
import { DEVICE, MEANING, SWAP } from "./paint.js";
import { blockHash, go, sequenceHash } from "./selection.js";
import { ask } from "./stream.js";

const HINT = "Choose a block on the map, or a sequence in its table. On the map the arrow keys move, Enter chooses.";

export class Detail {
  #view = null;
  #asked = false;

  /** `mark({tier, ids, only})` gets the blocks to highlight on the map. */
  constructor(host, mark) {
    this.mark = mark;
    this.title = make("h2", { id: "detail-title" }, "Nothing chosen");
    this.line = make("p", { class: "line", id: "chosen", role: "status" }, HINT);
    this.clear = make("button", { type: "button", class: "quiet", hidden: true, onclick: () => go("") }, "Clear");
    this.body = make("div", { class: "body" });
    host.append(make("div", { class: "head" }, this.title, this.clear), this.line, this.body);
  }

  /** Show a selection from parse(). */
  choose(selection) {
    this.#view = selection && new VIEWS[selection.kind](selection);
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
      if (view === this.#view) say(this.line, error.message);
    } finally {
      if (view === this.#view) this.#asked = false;
    }
  }
}

class BlockView {
  constructor({ tier, id }) {
    Object.assign(this, { tier, id });
    this.title = `${tier === "swap" ? "Swap block" : "Block"} ${format.count(id)}`;
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

  line(block) {
    const state = shown(this.tier, block.state);
    return `${state}: ${MEANING[state]}`;
  }

  show(block) {
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

class BlocksView {
  constructor({ tier, start, count }) {
    Object.assign(this, { tier, start, count, refCounts: [] });
    const last = start + count - 1;
    this.title = `${tier === "swap" ? "Swap blocks" : "Blocks"} ${format.count(start)} to ${format.count(last)}`;
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

  line({ states }) {
    return tally(this.tier, states);
  }

  show({ states, ref_counts }) {
    this.refCounts = ref_counts;
    this.cells.show(asCells(this.tier, states));
  }

  #describe(index) {
    return describeBlock(this.start + index, this.cells.stateOf(index), this.refCounts[index]);
  }
}

class SequenceView {
  #ids = [];
  #refCounts = [];
  #tier = "device";

  constructor({ session_id, sequence_id }) {
    this.title = `Sequence ${sequence_id}`;
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

  line(sequence) {
    return tally(sequence.tier, sequence.states);
  }

  show(sequence) {
    [this.#ids, this.#refCounts, this.#tier] = [sequence.block_ids, sequence.ref_counts, sequence.tier];
    const { number, text } = format.runs(sequence.block_ids);
    const total = sequence.block_ids.length + sequence.blocks_left_out;
    this.facts.show([
      ["Session", sequence.session_name || sequence.session_id],
      ["Tokens", `${format.count(sequence.length)}, ${format.count(sequence.computed)} computed`],
      ["Tier", sequence.tier],
      ["Blocks", `${format.count(total)}, in ${format.plural(number, "run")}`],
    ]);
    const more = sequence.blocks_left_out ? `, and ${format.count(sequence.blocks_left_out)} more` : "";
    say(this.ids, text + more);
    this.cells.show(asCells(sequence.tier, sequence.states));
  }

  #describe(index) {
    const block = describeBlock(this.#ids[index], this.cells.stateOf(index), this.#refCounts[index]);
    return `Place ${format.count(index)}. ${block}`;
  }
}

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

const VIEWS = { block: BlockView, blocks: BlocksView, sequence: SequenceView };

function describeBlock(id, state, references) {
  const held = references > 1 ? `, ${format.plural(references, "reference")}` : "";
  return `Block ${format.count(id)}: ${state}${held}`;
}

function tally(tier, states) {
  const counts = Map.groupBy(states, (state) => shown(tier, state));
  return [...counts].map(([state, found]) => `${format.count(found.length)} ${state}`).join(", ") || "no blocks";
}

/** The displayed state. A swap block is free or swapped; its reference count shows how many tables hold it. */
function shown(tier, state) {
  return tier === "swap" && state !== "free" ? "swapped" : state;
}

function asCells(tier, states) {
  const names = tier === "swap" ? SWAP : DEVICE;
  const shares = new Uint8Array(states.length * names.length);
  states.forEach((state, index) => (shares[index * names.length + names.indexOf(shown(tier, state))] = 255));
  return { states: names, shares, grouped: false };
}
