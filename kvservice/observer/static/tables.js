// Tables of sequences, sessions, schedulers and calls. A row keeps its element while it exists.

import { kept, make, reconcile, say } from "./dom.js";
import * as format from "./format.js";
import { stroke } from "./charts.js";

/**
 * `number` aligns the texts to the right, `press` makes the text a button with the name `label`, `before` fills a span
 * before the text.
 * @template Item
 * @typedef {object} Column
 * @property {string} title
 * @property {(item: Item) => string} text
 * @property {boolean} [number]
 * @property {(item: Item) => string} [label]
 * @property {(item: Item) => void} [press]
 * @property {(item: Item, cell: Element) => void} [before]
 */

/** @template Item */
export class Table {
  /** @type {WeakMap<Element, Item>} */
  #items = new WeakMap();

  /**
   * The first column is the row's header.
   * @param {HTMLElement} host
   * @param {{id: string, title: string, columns: Column<Item>[], key: (item: Item) => string, empty: string}} options
   */
  constructor(host, { id, title, columns, key, empty }) {
    this.columns = columns;
    this.key = key;
    this.note = make("p", { class: "note" });
    this.body = make("tbody");
    const heads = columns.map((column) => make("th", { scope: "col", class: column.number && "number" }, column.title));
    const head = make("thead", {}, make("tr", {}, ...heads));
    const table = make("table", { "aria-labelledby": `${id}-title` }, head, this.body);
    // Until the first items are shown nobody knows whether there are any.
    this.none = make("p", { class: "none", hidden: true }, empty);
    host.append(
      make("div", { class: "head" }, make("h2", { id: `${id}-title` }, title), this.note),
      make("div", { class: "scroll", role: "group", tabindex: "0", "aria-labelledby": `${id}-title` }, table),
      this.none,
    );
  }

  /**
   * Show the items, of `total` that there are.
   * @param {Item[]} items
   * @param {number} total
   */
  show(items, total) {
    this.none.hidden = items.length > 0;
    const left = total > items.length;
    say(this.note, left ? `${format.count(items.length)} of ${format.count(total)}, the largest` : format.count(total));
    reconcile(this.body, items, {
      key: this.key,
      create: () => this.#row(),
      update: (row, item) => this.#fill(row, item),
    });
  }

  #row() {
    const row = make("tr");
    this.columns.forEach((column, index) => {
      const cell = index ? make("td") : make("th", { scope: "row" });
      if (column.number) cell.className = "number";
      if (column.before) cell.append(make("span"));
      const { press } = column;
      const onclick = press && (() => press(/** @type {Item} */ (this.#items.get(row))));
      cell.append(onclick ? make("button", { type: "button", onclick }) : make("span"));
      row.append(cell);
    });
    return row;
  }

  /**
   * @param {Element} row
   * @param {Item} item
   */
  #fill(row, item) {
    this.#items.set(row, item);
    this.columns.forEach(({ text, label, before }, index) => {
      const cell = row.children[index];
      const content = cell.children[cell.children.length - 1];
      say(content, text(item));
      if (label) content.setAttribute("aria-label", label(item));
      if (before) before(item, cell);
    });
  }

  /**
   * Mark the selected row.
   * @param {string | null} key
   */
  mark(key) {
    for (const [name, row] of kept(this.body)) {
      if (name === key) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    }
  }
}

/** @param {SequenceId} id */
export const sequenceKey = ({ session_id, sequence_id }) => `${session_id}/${sequence_id}`;

/** @param {SequenceId} id */
const sequenceName = ({ sequence_id }) => `Sequence ${sequence_id}`;

/**
 * @param {HTMLElement} host
 * @param {(row: SequenceRow) => void} choose
 * @returns {Table<SequenceRow>}
 */
export function sequences(host, choose) {
  return new Table(host, {
    id: "sequences",
    title: "Sequences",
    empty: "None.",
    key: sequenceKey,
    columns: [
      { title: "Sequence", text: (row) => row.sequence_id, label: sequenceName, press: choose },
      { title: "Session", text: (row) => row.session_name || row.session_id },
      { title: "Tokens", number: true, text: (row) => format.count(row.length) },
      { title: "Computed", number: true, text: (row) => format.count(row.computed) },
      { title: "Blocks", number: true, text: (row) => format.count(row.blocks) },
      { title: "Tier", text: (row) => (row.swapped ? "swap" : "device") },
    ],
  });
}

/**
 * @param {HTMLElement} host
 * @param {(row: SessionRow) => void} choose
 * @returns {Table<SessionRow>}
 */
export function sessions(host, choose) {
  /** @param {SessionRow} row */
  const name = (row) => row.name || row.session_id;
  /** @param {SessionRow} row */
  const hits = (row) => (row.query_tokens ? row.hit_tokens / row.query_tokens : null);
  return new Table(host, {
    id: "sessions",
    title: "Sessions",
    empty: "None.",
    key: (row) => row.session_id,
    columns: [
      { title: "Session", text: name, label: (row) => `Find session ${name(row)}`, press: choose },
      { title: "Tenant", text: (row) => row.tenant || "–" },
      { title: "Client", text: (row) => (row.attached ? "attached" : "waiting") },
      { title: "Age", number: true, text: (row) => format.age(row.age_s) },
      { title: "Sequences", number: true, text: (row) => format.count(row.sequences) },
      { title: "Swapped", number: true, text: (row) => format.count(row.swapped_sequences) },
      { title: "Blocks", number: true, text: (row) => format.count(row.blocks) },
      { title: "Tokens", number: true, text: (row) => format.count(row.tokens) },
      { title: "Computed", number: true, text: (row) => format.compact(row.computed_tokens) },
      { title: "Hits", number: true, text: (row) => format.percent(hits(row)) },
      { title: "Regions", number: true, text: (row) => format.count(row.regions) },
      { title: "Region memory", number: true, text: (row) => format.bytes(row.region_bytes) },
      { title: "Lane", text: (row) => (row.lane ? "yes" : "no") },
    ],
  });
}

/**
 * @param {HTMLElement} host
 * @returns {Table<SchedulerRow>}
 */
export function schedulers(host) {
  /**
   * @param {number} part
   * @param {number} whole
   */
  const share = (part, whole) => format.percent(whole ? part / whole : null);
  /** @type {(title: string, of: (figures: SchedulerFigures) => string) => Column<SchedulerRow>} */
  const figure = (title, of) => ({ title, number: true, text: ({ scheduler }) => of(scheduler) });
  return new Table(host, {
    id: "schedulers",
    title: "Schedulers",
    empty: "None.",
    key: (row) => row.session_id,
    columns: [
      { title: "Session", text: (row) => row.name || row.session_id },
      figure("Waiting", (of) => format.count(of.waiting)),
      figure("Running", (of) => format.count(of.running)),
      figure("Swapped", (of) => format.count(of.swapped)),
      figure("Stalled", (of) => format.count(of.stalled)),
      figure("Finished", (of) => format.compact(of.finished)),
      figure("Generated", (of) => format.compact(of.generated_tokens)),
      figure("Prompt tokens", (of) => format.compact(of.prompt_tokens)),
      figure("Cached", (of) => share(of.cached_tokens, of.prompt_tokens)),
      figure("Preempted", (of) => format.compact(of.recompute_preemptions + of.swap_preemptions)),
      figure("Recomputed", (of) => format.compact(of.recomputed_tokens)),
      figure("Proposals right", (of) => share(of.accepted_tokens, of.proposed_tokens)),
    ],
  });
}

/**
 * Engines with K/V in the block store.
 * @param {HTMLElement} host
 * @returns {Table<EngineRow>}
 */
export function engines(host) {
  /** @type {(title: string, of: (figures: EngineFigures) => string) => Column<EngineRow>} */
  const figure = (title, of) => ({ title, number: true, text: ({ engine }) => of(engine) });
  return new Table(host, {
    id: "engines",
    title: "Engines",
    empty: "None.",
    key: (row) => row.session_id,
    columns: [
      { title: "Session", text: (row) => row.name || row.session_id },
      figure("Found", (of) => format.percent(of.prompt_tokens ? of.found_tokens / of.prompt_tokens : null)),
      figure("Of tokens", (of) => format.compact(of.prompt_tokens)),
      figure("Loads in flight", (of) => format.count(of.loads_in_flight)),
      figure("Blocks loaded", (of) => format.compact(of.blocks_loaded)),
      figure("Not loaded", (of) => format.compact(of.blocks_not_loaded)),
      figure("Saved", (of) => format.compact(of.blocks_saved)),
      figure("Not saved", (of) => format.compact(of.blocks_not_saved)),
      figure("Skipped", (of) => format.compact(of.blocks_skipped)),
    ],
  });
}

/**
 * `tones` are the colours of the methods that have a line in the chart.
 * @param {HTMLElement} host
 * @param {Map<string, number>} tones
 * @returns {Table<CallRow>}
 */
export function calls(host, tones) {
  /**
   * @param {CallRow} row
   * @param {Element} cell
   */
  const mark = (row, cell) => {
    const line = stroke(tones.get(row.method));
    if (cell.children[0].className !== line.className) cell.children[0].replaceWith(line);
  };
  return new Table(host, {
    id: "calls",
    title: "Calls",
    empty: "None yet.",
    key: (row) => row.method,
    columns: [
      { title: "Method", text: (row) => row.method, before: mark },
      { title: "Per second", number: true, text: (row) => format.compact(row.calls_per_s) },
      { title: "Median", number: true, text: (row) => format.latency(row.p50_s) },
      { title: "99th percentile", number: true, text: (row) => format.latency(row.p99_s) },
      { title: "Calls", number: true, text: (row) => format.count(row.calls) },
      { title: "Errors", number: true, text: (row) => format.count(row.errors) },
    ],
  });
}
