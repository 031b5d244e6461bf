// The server's events. A hidden page closes the stream; the history in the next hello fills the gap.

const RETRY_MS = 3000;
const LATE_MS = 3500;

/**
 * @typedef {object} Listener
 * @property {(hello: Hello) => void} hello
 * @property {(map: PoolMap) => void} map
 * @property {(frame: Frame) => void} frame
 * @property {(name: "late" | "lost" | "refused", reason?: string) => void} state
 */

export class Stream {
  /** @type {EventSource | null} */
  #source = null;
  #retry = 0;
  #watch = 0;

  /** @param {Listener} on */
  constructor(on) {
    this.on = on;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#close() : this.#open()));
    if (!document.hidden) this.#open();
  }

  #open() {
    this.#close();
    const source = (this.#source = new EventSource("/api/stream"));
    source.addEventListener("hello", ({ data }) => this.on.hello(JSON.parse(data)));
    source.addEventListener("map", ({ data }) => this.on.map(decoded(JSON.parse(data))));
    source.addEventListener("frame", ({ data }) => {
      this.#expect();
      this.on.frame(JSON.parse(data));
    });
    source.onerror = () => {
      clearTimeout(this.#watch);
      this.on.state("lost");
      // The browser reconnects by itself unless the server refused the stream.
      if (source.readyState === EventSource.CLOSED) this.#refused();
    };
  }

  /** Report the reason, which an EventSource does not provide, and try again later. */
  async #refused() {
    this.#retry = setTimeout(() => this.#open(), RETRY_MS);
    const answer = await fetch("/api/stream");
    if (answer.ok) answer.body?.cancel();
    else this.on.state("refused", `: ${(await answer.json()).error}`);
  }

  #expect() {
    clearTimeout(this.#watch);
    this.#watch = setTimeout(() => this.on.state("late"), LATE_MS);
  }

  #close() {
    clearTimeout(this.#retry);
    clearTimeout(this.#watch);
    this.#source?.close();
    this.#source = null;
  }
}

/** @param {{group: number, group_swap: number, device: string, swap: string}} map */
function decoded(map) {
  return { ...map, device: fromBase64(map.device), swap: fromBase64(map.swap) };
}

/** @param {string} text */
function fromBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/**
 * Return the server's JSON response. Throws an Error with its message if the request fails.
 * @param {string} path
 * @param {Record<string, string | number>} parameters
 * @returns {Promise<any>}
 */
export async function ask(path, parameters) {
  const query = new URLSearchParams(Object.entries(parameters).map(([name, value]) => [name, `${value}`]));
  const answer = await fetch(`/api/${path}?${query}`);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
}
