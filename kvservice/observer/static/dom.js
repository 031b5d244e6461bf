// Creation and update of the page's elements, without markup in strings.

/** Create an element with attributes and children (texts or elements): make("td", {class: "number"}, "12"). */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Set the text of an element only if it changed, so that it is not laid out or read out again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Keep one child of `parent` per item, in order. A child stays with its key, and so does the focus. */
export function reconcile(parent, items, { key, create, update }) {
  parent.known ??= new Map();
  const wanted = new Map(items.map((item) => [key(item), item]));
  for (const [name, child] of parent.known) {
    if (wanted.has(name)) continue;
    child.remove();
    parent.known.delete(name);
  }
  let next = parent.firstElementChild;
  for (const [name, item] of wanted) {
    let child = parent.known.get(name);
    if (!child) parent.known.set(name, (child = create(item)));
    update(child, item);
    if (child === next) next = next.nextElementSibling;
    else place(parent, child, next);
  }
}

function place(parent, child, before) {
  if (child.isConnected && parent.moveBefore) {
    parent.moveBefore(child, before);
    return;
  }
  const focused = child.contains(document.activeElement) ? document.activeElement : null;
  parent.insertBefore(child, before);
  focused?.focus();
}

/** A list of terms and values. `show([[term, text], ...])` updates it. */
export class Facts {
  constructor(element = make("dl", { class: "facts" })) {
    this.element = element;
  }

  show(facts) {
    reconcile(this.element, facts, {
      key: ([term]) => term,
      create: ([term]) => make("div", {}, make("dt", {}, term), make("dd")),
      update: (row, [, text]) => say(row.lastElementChild, text),
    });
  }
}
