// Creation and update of the page's elements, without markup in strings.

/**
 * Create an element with attributes and children (texts or elements): make("td", {class: "number"}, "12"). A function
 * is a listener: {onclick: () => ...}.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, string | number | boolean | null | undefined | (() => void)>} attributes
 * @param {(Node | string)[]} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, `${value}`);
  }
  element.append(...children);
  return element;
}

/**
 * Return the element below `parent` that a CSS selector finds first. There must be one.
 * @param {Element} parent
 * @param {string} selector
 */
export function inner(parent, selector) {
  return /** @type {Element} */ (parent.querySelector(selector));
}

/**
 * Set the text of an element only if it changed, so that it is not laid out or read out again.
 * @param {Element} element
 * @param {string} text
 */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** @type {WeakMap<Element, Map<string, HTMLElement>>} */
const keptChildren = new WeakMap();

/**
 * The children that reconcile() keeps in `parent`, by key.
 * @param {Element} parent
 */
export function kept(parent) {
  let known = keptChildren.get(parent);
  if (!known) keptChildren.set(parent, (known = new Map()));
  return known;
}

/**
 * Keep one child of `parent` per item, in order. A child stays with its key, and so does the focus.
 * @template Item
 * @template {HTMLElement} Child
 * @param {Element} parent
 * @param {Item[]} items
 * @param {{key: (item: Item) => string, create: (item: Item) => Child, update: (child: Child, item: Item) => void}} how
 */
export function reconcile(parent, items, { key, create, update }) {
  const known = kept(parent);
  const wanted = new Map(items.map((item) => [key(item), item]));
  for (const [name, child] of known) {
    if (wanted.has(name)) continue;
    child.remove();
    known.delete(name);
  }
  let next = parent.firstElementChild;
  for (const [name, item] of wanted) {
    let child = /** @type {Child | undefined} */ (known.get(name));
    if (!child) known.set(name, (child = create(item)));
    update(child, item);
    if (child === next) next = next.nextElementSibling;
    else place(parent, child, next);
  }
}

/**
 * @param {Element} parent
 * @param {HTMLElement} child
 * @param {Element | null} before
 */
function place(parent, child, before) {
  if (child.isConnected && parent.moveBefore) {
    parent.moveBefore(child, before);
    return;
  }
  const focused = document.activeElement;
  parent.insertBefore(child, before);
  if (focused instanceof HTMLElement && child.contains(focused)) focused.focus();
}

/** A list of terms and values. `show([[term, text], ...])` updates it. */
export class Facts {
  /** @param {HTMLElement} element */
  constructor(element = make("dl", { class: "facts" })) {
    this.element = element;
  }

  /** @param {[term: string, text: string][]} facts */
  show(facts) {
    reconcile(this.element, facts, {
      key: ([term]) => term,
      create: ([term]) => make("div", {}, make("dt", {}, term), make("dd")),
      update: (row, [, text]) => say(inner(row, "dd"), text),
    });
  }
}
