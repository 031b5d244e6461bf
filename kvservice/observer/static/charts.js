// Time series of the last ten minutes as SVG, with a text alternative.

import { inner, make, say, reconcile } from "./dom.js";
const SPAN_S = 600;
const GAP_S = 5;
const HEIGHT = 132;
const MARGIN = { top: 8, right: 8, bottom: 18, left: 52 };
const TICKS_S = [0, 120, 240, 360, 480, 600];
const WIDE = 420;
const SVG = "http://www.w3.org/2000/svg";

/**
 * One value or null per time. `tone` is the number of a colour.
 * @typedef {{name: string, values: (number | null)[], tone: number}} Series
 *
 * "share" is from 0 to 1, "linear" and "bytes" are from 0.
 * @typedef {"share" | "linear" | "bytes" | "log"} Scale
 */

export class Chart {
  /** @type {Series[]} */
  #series = [];
  /** @type {number[]} */
  #times = [];
  /** @type {number | null} */
  #hover = null;
  width = 0;
  now = 0;
  range = { low: 0, high: 1, ticks: /** @type {number[]} */ ([]) };

  /**
   * `show` formats a value. `hover` is called when the pointer moves, with the time under it.
   * @param {object} options
   * @param {string} options.title
   * @param {(value: number | null | undefined) => string} options.show
   * @param {Scale} options.scale
   * @param {(time_s: number | null) => void} options.hover
   */
  constructor({ title, show, scale, hover }) {
    this.title = title;
    this.show = show;
    this.scale = scale;
    const id = `chart-${title.toLowerCase().replaceAll(/\W+/g, "-")}`;
    this.key = make("ul", { class: "key" });
    this.svg = svg("svg", { role: "img", height: HEIGHT });
    this.svg.addEventListener("pointermove", (event) => hover(this.#timeAt(event)));
    this.svg.addEventListener("pointerleave", () => hover(null));
    const heading = make("h2", { id }, title);
    this.element = make("section", { class: "panel chart", "aria-labelledby": id }, heading, this.key, this.svg);
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  /**
   * @param {number[]} times
   * @param {Series[]} series
   */
  update(times, series) {
    [this.#times, this.#series] = [times, series];
    this.draw();
  }

  /**
   * Show the values at a time, or the latest ones if it is null.
   * @param {number | null} time
   */
  point(time) {
    this.#hover = time;
    this.draw();
  }

  draw() {
    this.width = this.svg.clientWidth;
    if (!this.width) return;
    this.now = this.#times.at(-1) ?? 0;
    this.range = this.#range();
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const lines = this.#series.map(({ tone, values }) => {
      return svg("path", { class: `line tone-${tone}`, d: this.#path(values) });
    });
    this.svg.replaceChildren(...this.#grid(), ...lines, ...this.#crosshair());
    this.svg.setAttribute("aria-label", this.#summary());
    this.#showKey();
  }

  #range() {
    const values = this.#series.flatMap((series) => series.values.filter((value) => value !== null));
    if (this.scale === "share") return { low: 0, high: 1, ticks: [0, 0.5, 1] };
    const most = Math.max(0, ...values);
    if (this.scale !== "log") {
      const high = this.scale === "bytes" ? 2 ** Math.ceil(Math.log2(Math.max(1024, most))) : roundUp(most || 1);
      return { low: 0, high, ticks: [0, high / 2, high] };
    }
    const positive = values.filter((value) => value > 0);
    const low = Math.floor(Math.log10(Math.min(1e-3, ...positive)));
    const high = Math.max(low + 2, Math.ceil(Math.log10(Math.max(1e-3, most))));
    const ticks = Array.from({ length: high - low + 1 }, (_, index) => 10 ** (low + index));
    return { low, high, ticks: ticks.filter((_, index) => ticks.length < 5 || index % 2 === 0) };
  }

  /** @param {number} time */
  #x(time) {
    return MARGIN.left + (1 - (this.now - time) / SPAN_S) * (this.width - MARGIN.left - MARGIN.right);
  }

  /** @param {number} value */
  #y(value) {
    const { low, high } = this.range;
    const at = this.scale === "log" ? (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low) : value / high;
    return HEIGHT - MARGIN.bottom - at * (HEIGHT - MARGIN.top - MARGIN.bottom);
  }

  /** @param {(number | null)[]} values */
  #path(values) {
    let path = "";
    let last = -Infinity;
    values.forEach((value, index) => {
      const time = this.#times[index];
      if (value === null || value === undefined || this.now - time > SPAN_S) return;
      const joined = time - last < GAP_S && values[index - 1] !== null;
      path += `${joined ? "L" : "M"}${this.#x(time).toFixed(1)} ${this.#y(value).toFixed(1)}`;
      if (!joined) path += "h0.01";
      last = time;
    });
    return path;
  }

  #grid() {
    const right = this.width - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    const across = this.range.ticks.flatMap((tick) => {
      const y = this.#y(tick);
      const label = text("end", MARGIN.left - 6, y + 3.5, this.show(tick));
      return [svg("line", { class: "rule", x1: MARGIN.left, x2: right, y1: y, y2: y }), label];
    });
    const below = TICKS_S.filter((ago) => this.width > WIDE || ago % SPAN_S === 0).map((ago) => {
      const anchor = ago === 0 ? "end" : ago === SPAN_S ? "start" : "middle";
      return text(anchor, this.#x(this.now - ago), HEIGHT - 4, ago ? `−${ago / 60} min` : "now");
    });
    return [...across, ...below, svg("line", { class: "axis", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom })];
  }

  #crosshair() {
    const index = this.#index();
    if (this.#hover === null || index < 0) return [];
    const x = this.#x(this.#times[index]);
    const dots = this.#series.flatMap(({ values, tone }) => {
      const value = values[index] ?? null;
      return value === null ? [] : [svg("circle", { class: `dot tone-${tone}`, cx: x, cy: this.#y(value), r: 3 })];
    });
    return [svg("line", { class: "cross", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }), ...dots];
  }

  /** Index of the sample to show. */
  #index() {
    const hover = this.#hover;
    if (hover === null) return this.#times.length - 1;
    return this.#times.findIndex((time) => time >= hover);
  }

  /** @param {PointerEvent} event */
  #timeAt(event) {
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right);
    return this.now - (1 - Math.min(1, Math.max(0, share))) * SPAN_S;
  }

  #showKey() {
    const index = this.#index();
    reconcile(this.key, this.#series, {
      key: (series) => series.name,
      create: ({ name, tone }) => make("li", {}, stroke(tone), make("span", {}, name), make("b")),
      update: (entry, { values, tone }) => {
        inner(entry, ".stroke").className = stroke(tone).className;
        say(inner(entry, "b"), this.show(values[index] ?? null));
      },
    });
  }

  #summary() {
    const parts = this.#series.map(({ name, values }) => {
      const known = values.filter((value) => value !== null && value !== undefined);
      if (!known.length) return `${name}: no values`;
      const [least, most] = [Math.min(...known), Math.max(...known)];
      return `${name}: now ${this.show(values.at(-1))}, from ${this.show(least)} to ${this.show(most)}`;
    });
    return `${this.title}, last ten minutes. ${parts.join("; ") || "No values"}.`;
  }
}

/**
 * A sample of a series' line for the key. Without a tone the series has no line.
 * @param {number | undefined} tone
 */
export function stroke(tone) {
  return make("span", { class: tone === undefined ? "stroke none" : `stroke tone-${tone}`, "aria-hidden": "true" });
}

/** @param {number} value */
function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return ([1, 2, 4, 5, 8].find((step) => step * unit >= value) ?? 10) * unit;
}

/**
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, string | number>} attributes
 */
function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, `${value}`);
  return element;
}

/**
 * @param {"start" | "middle" | "end"} anchor
 * @param {number} x
 * @param {number} y
 * @param {string} content
 */
function text(anchor, x, y, content) {
  const element = svg("text", { "text-anchor": anchor, x, y });
  element.textContent = content;
  return element;
}
