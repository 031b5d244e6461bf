// A grid of cells on a canvas, with a keyboard cursor. Assistive technology sees a grid with one tab stop, in which only
// the cell under the cursor is an element of the document, because thousands of elements would be too slow.

import { make } from "./dom.js";
import { colours, paintBlock, paintGroup } from "./paint.js";

const GAP = 1;
// Padding around the cells, for the ring of a cell at the edge. parts.css compensates it with a negative margin.
const EDGE = 3;
const LEAST_PITCH = 4;
const PAGE_ROWS = 8;
let cellsMade = 0;

export class Cells {
  #cells = { count: 0, states: [], shares: new Uint8Array(), grouped: false };
  #cursor = 0;
  #hover = null;
  #selected = new Set();
  #only = null;

  /**
   * `describe(index)` returns a cell's text. `choose(index)` is called when a cell is chosen, `hover(index | null)`
   * when the pointer or the cursor moves. The grid is about `maxHeight` pixels high, a cell at most `maxCell` pixels.
   */
  constructor({ label, maxHeight, maxCell, describe, choose, hover = () => {} }) {
    Object.assign(this, { maxHeight, maxCell, describe, choose, hover });
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.row = make("div", { role: "row" });
    this.grid = make("div", { role: "grid", class: "grid", tabindex: "0", "aria-label": label }, this.row);
    this.#renewCell();
    this.element = make("div", { class: "cells" }, this.canvas, this.grid);
    this.grid.addEventListener("keydown", (event) => this.#key(event));
    this.grid.addEventListener("focus", () => this.#moved());
    this.grid.addEventListener("blur", () => this.draw());
    this.grid.addEventListener("click", (event) => this.#click(event));
    this.grid.addEventListener("pointermove", (event) => this.#hovered(this.#at(event)));
    this.grid.addEventListener("pointerleave", () => this.#hovered(null));
    new ResizeObserver(() => this.draw()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** `shares` has, per cell, the share of its blocks in each of `states`, of 255. Ungrouped cells are single blocks. */
  show({ states, shares, grouped }) {
    this.#cells = { count: shares.length / states.length, states, shares, grouped };
    this.#cursor = Math.min(this.#cursor, Math.max(0, this.#cells.count - 1));
    this.draw();
  }

  /** Draw rings around the cells of `selected`. If `only` is given, all other cells fade. */
  mark(selected, only = null) {
    [this.#selected, this.#only] = [new Set(selected), only && new Set(only)];
    this.draw();
  }

  /** The state of an ungrouped cell. */
  stateOf(index) {
    const { states } = this.#cells;
    return states[this.sharesOf(index).indexOf(255)] ?? states[0];
  }

  sharesOf(index) {
    const { states, shares } = this.#cells;
    return shares.subarray(index * states.length, (index + 1) * states.length);
  }

  draw() {
    const width = this.element.clientWidth - 2 * EDGE;
    const { count, states } = this.#cells;
    if (width <= 0 || !count) return;
    this.#layOut(width, count);
    const ratio = window.devicePixelRatio || 1;
    const [wide, high] = [this.columns, Math.ceil(count / this.columns)].map((cells) => cells * this.pitch + 2 * EDGE);
    const [pixelsWide, pixelsHigh] = [Math.round(wide * ratio), Math.round(high * ratio)];
    if (this.canvas.width !== pixelsWide || this.canvas.height !== pixelsHigh) {
      Object.assign(this.canvas, { width: pixelsWide, height: pixelsHigh });
      const size = { width: `${wide}px`, height: `${high}px` };
      for (const element of [this.canvas, this.grid]) Object.assign(element.style, size);
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, wide, high);
    const colour = colours(this.element);
    for (let index = 0; index < count; index++) this.#paint(context, colour, states, index);
    this.#rings(context, colour);
    this.#describeCursor();
  }

  #layOut(width, count) {
    const ideal = Math.floor(Math.sqrt((width * this.maxHeight) / count));
    this.columns = 0;
    // Of the sizes near the ideal, choose the one that leaves the least width empty.
    for (let pitch = ideal + 1; pitch >= ideal - 3; pitch--) {
      const size = Math.max(LEAST_PITCH, Math.min(this.maxCell, pitch));
      const columns = roundColumns(Math.floor(width / size));
      if (columns * size > (this.columns * this.pitch || 0)) [this.columns, this.pitch] = [columns, size];
    }
    this.columns = Math.min(count, this.columns);
  }

  #paint(context, colour, states, index) {
    const [x, y] = this.#corner(index);
    context.globalAlpha = this.#only && !this.#only.has(index) ? 0.22 : 1;
    const size = this.pitch - GAP;
    if (this.#cells.grouped) paintGroup(context, colour, states, this.sharesOf(index), x, y, size);
    else paintBlock(context, colour, this.stateOf(index), x, y, size);
    context.globalAlpha = 1;
  }

  #rings(context, colour) {
    for (const index of this.#selected) this.#ring(context, index, colour.hole, colour.ink);
    if (this.#hover !== null) this.#ring(context, this.#hover, colour.hole, colour.ink);
    if (document.activeElement === this.grid) this.#ring(context, this.#cursor, colour.hole, colour.ink);
  }

  #ring(context, index, halo, ink) {
    if (index >= this.#cells.count) return;
    const [x, y] = this.#corner(index);
    const size = this.pitch - GAP;
    for (const [colour, width, out] of [[halo, 4, 1], [ink, 2, 1]]) {
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.strokeRect(x - out, y - out, size + 2 * out, size + 2 * out);
    }
  }

  #corner(index) {
    return [index % this.columns, Math.floor(index / this.columns)].map((cells) => cells * this.pitch + EDGE);
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - EDGE) / this.pitch);
    const index = Math.floor((event.clientY - box.top - EDGE) / this.pitch) * this.columns + column;
    return column >= 0 && column < this.columns && index >= 0 && index < this.#cells.count ? index : null;
  }

  #hovered(index) {
    if (index === this.#hover) return;
    this.#hover = index;
    this.hover(index);
    this.draw();
  }

  #click(event) {
    const index = this.#at(event);
    if (index === null) return;
    this.#cursor = index;
    this.#moved();
    this.choose(index);
  }

  #key(event) {
    const last = this.#cells.count - 1;
    const rowStart = this.#cursor - (this.#cursor % this.columns);
    const rowEnd = Math.min(last, rowStart + this.columns - 1);
    const targets = {
      ArrowLeft: this.#cursor - 1,
      ArrowRight: this.#cursor + 1,
      ArrowUp: this.#cursor - this.columns,
      ArrowDown: this.#cursor + this.columns,
      PageUp: Math.max(this.#cursor % this.columns, this.#cursor - PAGE_ROWS * this.columns),
      PageDown: Math.min(last, this.#cursor + PAGE_ROWS * this.columns),
      Home: event.ctrlKey ? 0 : rowStart,
      End: event.ctrlKey ? last : rowEnd,
    };
    if (event.key === "Enter" || event.key === " ") this.choose(this.#cursor);
    else if (event.key in targets) {
      const target = targets[event.key];
      if (target >= 0 && target <= last) this.#cursor = target;
      this.#moved();
    } else return;
    event.preventDefault();
  }

  /** Replace the element of the cell. With a new text only, screen readers do not notice that the cursor moved. */
  #renewCell() {
    this.cell = make("div", { role: "gridcell", id: `cell-${++cellsMade}` });
    this.row.replaceChildren(this.cell);
    this.grid.setAttribute("aria-activedescendant", this.cell.id);
  }

  #moved() {
    this.#renewCell();
    this.hover(this.#cursor);
    this.draw();
  }

  #describeCursor() {
    if (!this.#cells.count) return;
    const row = Math.floor(this.#cursor / this.columns);
    const attributes = [
      [this.grid, "aria-rowcount", Math.ceil(this.#cells.count / this.columns)],
      [this.grid, "aria-colcount", this.columns],
      [this.row, "aria-rowindex", row + 1],
      [this.cell, "aria-colindex", (this.#cursor % this.columns) + 1],
      [this.cell, "aria-selected", this.#selected.has(this.#cursor)],
      [this.cell, "aria-label", this.describe(this.#cursor)],
    ];
    for (const [element, name, value] of attributes) {
      if (element.getAttribute(name) !== `${value}`) element.setAttribute(name, value);
    }
  }
}

/** Round to a multiple of four columns, so that a block is easy to find by counting. */
function roundColumns(fit) {
  return Math.max(1, fit < 16 ? fit : fit - (fit % 4));
}
