// Tables of sequences, sessions and calls. A row keeps its element while it exists.

import { make, reconcile, say } from "./dom.js";
import * as format from "./format.js";
import { stroke } from "./charts.js";

class Table {
  /**
   * `columns` is [{title, text(row)}]; the first column is the row's header. Optional: `number` aligns to the right,
   * `press(row)` makes the text a button with the name `label(row)`, `before(row, cell)` fills a span before the text.
   */
  constructor(host, { id, title, columns, key, empty }) {
    Object.assign(this, { columns, key, empty });
    this.note = make("p", { class: "note" });
    this.body = make("tbody");
    const heads = columns.map((column) => make("th", { scope: "col", class: column.number && "number" }, column.title));
    const head = make("thead", {}, make("tr", {}, ...heads));
    const table = make("table", { "aria-labelledby": `${id}-title` }, head, this.body);
    this.none = make("p", { class: "none" }, empty);
    host.append(
      make("div", { class: "head" }, make("h2", { id: `${id}-title` }, title), this.note),
      make("div", { class: "scroll", role: "group", tabindex: "0", "aria-labelledby": `${id}-title` }, table),
      this.none,
    );
  }

  show(rows, total) {
    this.none.hidden = rows.length > 0;
    const left = total > rows.length;
    say(this.note, left ? `${format.count(rows.length)} of ${format.count(total)}, the largest` : format.count(total));
    const update = (row, item) => this.#fill(row, item);
    reconcile(this.body, rows, { key: this.key, create: () => this.#row(), update });
  }

  #row() {
    const row = make("tr");
    this.columns.forEach((column, index) => {
      const cell = make(index ? "td" : "th", index ? {} : { scope: "row" });
      if (column.number) cell.className = "number";
      if (column.before) cell.append(make("span"));
      const press = () => column.press(row.item);
      cell.append(column.press ? make("button", { type: "button", onclick: press }) : make("span"));
      row.append(cell);
    });
    return row;
  }

  #fill(row, item) {
    row.item = item;
    this.columns.forEach(({ text, label, before }, index) => {
      const cell = row.children[index];
      const content = cell.lastElementChild;
      say(content, text(item));
      if (label) content.setAttribute("aria-label", label(item));
      if (before) before(item, cell);
    });
  }

  /** Mark the selected row. */
  mark(key) {
    for (const [name, row] of this.body.known ?? []) {
      if (name === key) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    }
  }
}

export const sequenceKey = ({ session_id, sequence_id }) => `${session_id}/${sequence_id}`;

const sequenceName = ({ sequence_id }) => `Sequence ${sequence_id}`;

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

export function sessions(host, choose) {
  const name = (row) => row.name || row.session_id;
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

/** `tones` are the colours of the methods that have a line in the chart. */
export function calls(host, tones) {
  const mark = (row, cell) => {
    const line = stroke(tones.get(row.method));
    if (cell.firstElementChild.className !== line.className) cell.firstElementChild.replaceWith(line);
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
