// Painting of block states. States differ in colour and in shape, for people who cannot distinguish the colours.

export const DEVICE = ["free", "active", "shared", "cached", "pinned"];
export const SWAP = ["free", "swapped"];
/** @type {Record<string, string>} */
export const MEANING = {
  free: "not in use",
  active: "held by one sequence",
  shared: "held by several sequences",
  cached: "held by no sequence, kept in the prefix cache",
  pinned: "cached, and kept from eviction",
  swapped: "held by a sequence that is swapped out",
};
// States from the bottom of a cell to its top. The rest of the cell is free.
const STACK = ["active", "shared", "pinned", "cached", "swapped"];
const SHAPES_FROM = 7;

/** @typedef {Record<string, string>} Colours */

/**
 * Return the computed colours at `element`, by name.
 * @param {Element} element
 * @returns {Colours}
 */
export function colours(element) {
  const style = getComputedStyle(element);
  const names = [...DEVICE, "swapped", "empty", "hole", "ink"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/**
 * Return the context of a canvas whose pixels are `ratio` to a unit.
 * @param {HTMLCanvasElement} canvas
 * @param {number} ratio
 */
export function contextOf(canvas, ratio) {
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/**
 * Paint one block as a square of `size` at (x, y).
 * @param {CanvasRenderingContext2D} context
 * @param {Colours} colour
 * @param {string} state
 * @param {number} x
 * @param {number} y
 * @param {number} size
 */
export function paintBlock(context, colour, state, x, y, size) {
  const shapes = size >= SHAPES_FROM;
  const line = Math.max(1, Math.round(size / 9));
  if (state === "free") {
    context.fillStyle = shapes ? colour.hole : colour.empty;
    context.fillRect(x, y, size, size);
    context.strokeStyle = colour.free;
    context.lineWidth = 1;
    if (shapes) context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    return;
  }
  context.fillStyle = colour[state];
  context.fillRect(x, y, size, size);
  if (!shapes) return;
  context.fillStyle = colour.hole;
  if (state === "cached") {
    const edge = line + 1;
    context.fillRect(x + edge, y + edge, size - 2 * edge, size - 2 * edge);
  } else if (state === "shared") {
    const side = Math.max(2, Math.round(size / 3));
    const inset = Math.floor((size - side) / 2);
    context.fillRect(x + inset, y + inset, side, side);
  } else if (state === "pinned") {
    const corner = Math.round(size * 0.6);
    context.beginPath();
    context.moveTo(x + size, y);
    context.lineTo(x + size - corner, y);
    context.lineTo(x + size, y + corner);
    context.fill();
  }
}

/**
 * Paint many blocks as stacked shares of their states. `shares` are fractions of 255, in the order of `states`.
 * @param {CanvasRenderingContext2D} context
 * @param {Colours} colour
 * @param {string[]} states
 * @param {Uint8Array} shares
 * @param {number} x
 * @param {number} y
 * @param {number} size
 */
export function paintGroup(context, colour, states, shares, x, y, size) {
  context.fillStyle = colour.empty;
  context.fillRect(x, y, size, size);
  let sum = 0;
  let bottom = y + size;
  for (const state of STACK) {
    const index = states.indexOf(state);
    if (index < 0 || shares[index] === 0) continue;
    sum += shares[index];
    const top = y + size - Math.round((Math.min(sum, 255) / 255) * size);
    context.fillStyle = colour[state];
    context.fillRect(x, top, size, bottom - top);
    bottom = top;
  }
}
