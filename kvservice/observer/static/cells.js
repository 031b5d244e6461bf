// A grid of cells on a canvas, with a keyboard cursor. Assistive technology sees a grid with one tab stop, in which only
// the cell under the cursor is an element of the document, because thousands of elements would be too slow.

import { make } from "./dom.js";
import { colours, contextOf, paintBlock, paintGroup } from "./paint.js";

const GAP = 1;
// Padding around the cells, for the ring of a cell at the edge. parts.css compensates it with a negative margin.
const EDGE = 3;
const LEAST_PITCH = 4;
const PAGE_ROWS = 8;
let cellsMade = 0;

/**
 * Cells to show: per cell the share of its blocks in each of `states`, of 255. Ungrouped cells are single blocks.
 * @typedef {{states: string[], shares: Uint8Array, grouped: boolean}} Content
 */

export class Cells {
  /** @type {Content & {count: number}} */
  #cells = { count: 0, states: [], shares: new Uint8Array(), grouped: false };
  #cursor = 0;
  /** @type {number | null} */
  #hover = null;
  /** @type {Set<number>} */
  #selected = new Set();
  /** @type {Set<number> | null} */
  #only = null;
  columns = 0;
  pitch = 0;

  /**
   * `describe` returns a cell's text. `choose` is called when a cell is chosen, `hover` when the pointer or the cursor
   * moves. The grid is about `maxHeight` pixels high, a cell at most `maxCell` pixels.
   * @param {object} options
   * @param {string} options.label
   * @param {number} options.maxHeight
   * @param {number} options.maxCell
   * @param {(index: number) => string} options.describe
   * @param {(index: number) => void} options.choose
   * @param {(index: number | null) => void} options.hover
   */
  constructor({ label, maxHeight, maxCell, describe, choose, hover }) {
    this.maxHeight = maxHeight;
    this.maxCell = maxCell;
    this.describe = describe;
    this.choose = choose;
    this.hover = hover;
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.row = make("div", { role: "row" });
    this.grid = make("div", { role: "grid", class: "grid", tabindex: "0", "aria-label": label }, this.row);
    this.cell = this.#newCell();
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

  /** @param {Content} content */
  show({ states, shares, grouped }) {
    this.#cells = { count: shares.length / states.length, states, shares, grouped };
    this.#cursor = Math.min(this.#cursor, Math.max(0, this.#cells.count - 1));
    this.draw();
  }

  /**
   * Draw rings around the cells of `selected`. If `only` is given, all other cells fade.
   * @param {number[]} selected
   * @param {number[] | null} only
   */
  mark(selected, only = null) {
    this.#selected = new Set(selected);
    this.#only = only && new Set(only);
    this.draw();
  }

  /**
   * The state of an ungrouped cell.
   * @param {number} index
   */
  stateOf(index) {
    const { states } = this.#cells;
    return states[this.sharesOf(index).indexOf(255)] ?? states[0];
  }

  /** @param {number} index */
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
    const wide = this.columns * this.pitch + 2 * EDGE;
    const high = Math.ceil(count / this.columns) * this.pitch + 2 * EDGE;
    const [pixelsWide, pixelsHigh] = [Math.round(wide * ratio), Math.round(high * ratio)];
    if (this.canvas.width !== pixelsWide || this.canvas.height !== pixelsHigh) {
      Object.assign(this.canvas, { width: pixelsWide, height: pixelsHigh });
      const size = { width: `${wide}px`, height: `${high}px` };
      for (const element of [this.canvas, this.grid]) Object.assign(element.style, size);
    }
    const context = contextOf(this.canvas, ratio);
    context.clearRect(0, 0, wide, high);
    const colour = colours(this.element);
    for (let index = 0; index < count; index++) this.#paint(context, colour, states, index);
    this.#rings(context, colour);
    this.#describeCursor();
  }

  /**
   * @param {number} width
   * @param {number} count
   */
  #layOut(width, count) {
    const ideal = Math.floor(Math.sqrt((width * this.maxHeight) / count));
    this.columns = 0;
    // Choose the size near the ideal that leaves the least width empty.
    for (let pitch = ideal + 1; pitch >= ideal - 3; pitch--) {
      const size = Math.max(LEAST_PITCH, Math.min(this.maxCell, pitch));
      const columns = roundColumns(Math.floor(width / size));
      if (columns * size > this.columns * this.pitch) [this.columns, this.pitch] = [columns, size];
    }
    this.columns = Math.min(count, this.columns);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {import("./paint.js").Colours} colour
   * @param {string[]} states
   * @param {number} index
   */
  #paint(context, colour, states, index) {
    const [x, y] = this.#corner(index);
    context.globalAlpha = this.#only && !this.#only.has(index) ? 0.22 : 1;
    const size = this.pitch - GAP;
    if (this.#cells.grouped) paintGroup(context, colour, states, this.sharesOf(index), x, y, size);
    else paintBlock(context, colour, this.stateOf(index), x, y, size);
    context.globalAlpha = 1;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {import("./paint.js").Colours} colour
   */
  #rings(context, colour) {
    for (const index of this.#selected) this.#ring(context, colour, index);
    if (this.#hover !== null) this.#ring(context, colour, this.#hover);
    if (document.activeElement === this.grid) this.#ring(context, colour, this.#cursor);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {import("./paint.js").Colours} colour
   * @param {number} index
   */
  #ring(context, colour, index) {
    if (index >= this.#cells.count) return;
    const [x, y] = this.#corner(index);
    const size = this.pitch - GAP;
    for (const { style, width } of [{ style: colour.hole, width: 4 }, { style: colour.ink, width: 2 }]) {
      context.strokeStyle = style;
      context.lineWidth = width;
      context.strokeRect(x - 1, y - 1, size + 2, size + 2);
    }
  }

  /** @param {number} index */
  #corner(index) {
    return [index % this.columns, Math.floor(index / this.columns)].map((cells) => cells * this.pitch + EDGE);
  }

  /** @param {MouseEvent} event */
  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - EDGE) / this.pitch);
    const index = Math.floor((event.clientY - box.top - EDGE) / this.pitch) * this.columns + column;
    return column >= 0 && column < this.columns && index >= 0 && index < this.#cells.count ? index : null;
  }

  /** @param {number | null} index */
  #hovered(index) {
    if (index === this.#hover) return;
    this.#hover = index;
    this.hover(index);
    this.draw();
  }

  /** @param {MouseEvent} event */
  #click(event) {
    const index = this.#at(event);
    if (index === null) return;
    this.#cursor = index;
    this.#moved();
    this.choose(index);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const last = this.#cells.count - 1;
    const rowStart = this.#cursor - (this.#cursor % this.columns);
    const rowEnd = Math.min(last, rowStart + this.columns - 1);
    /** @type {Record<string, number>} */
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
  #newCell() {
    const cell = make("div", { role: "gridcell", id: `cell-${++cellsMade}` });
    this.row.replaceChildren(cell);
    this.grid.setAttribute("aria-activedescendant", cell.id);
    return cell;
  }

  #moved() {
    this.cell = this.#newCell();
    this.hover(this.#cursor);
    this.draw();
  }

  #describeCursor() {
    if (!this.#cells.count) return;
    const row = Math.floor(this.#cursor / this.columns);
    /** @type {[Element, string, string | number | boolean][]} */
    const attributes = [
      [this.grid, "aria-rowcount", Math.ceil(this.#cells.count / this.columns)],
      [this.grid, "aria-colcount", this.columns],
      [this.row, "aria-rowindex", row + 1],
      [this.cell, "aria-colindex", (this.#cursor % this.columns) + 1],
      [this.cell, "aria-selected", this.#selected.has(this.#cursor)],
      [this.cell, "aria-label", this.describe(this.#cursor)],
    ];
    for (const [element, name, value] of attributes) {
      if (element.getAttribute(name) !== `${value}`) element.setAttribute(name, `${value}`);
    }
  }
}

/**
 * Round to a multiple of four columns, so that a block is easy to find by counting.
 * @param {number} fit
 */
function roundColumns(fit) {
  return Math.max(1, fit < 16 ? fit : fit - (fit % 4));
}
