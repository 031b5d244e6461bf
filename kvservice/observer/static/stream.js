// The server's events. A page that nobody sees listens to none: what it has missed is in the next hello's history.

const RETRY_MS = 3000;
const LATE_MS = 3500;

export class Stream {
  #source = null;
  #retry = 0;
  #watch = 0;

  /** `on` has hello(data), map(data), frame(data) and state("late" | "lost" | "refused", reason). */
  constructor(on) {
    this.on = on;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#close() : this.#open()));
    if (!document.hidden) this.#open();
  }

  #open() {
    this.#close();
    this.#source = new EventSource("/api/stream");
    this.#source.addEventListener("hello", ({ data }) => this.on.hello(JSON.parse(data)));
    this.#source.addEventListener("map", ({ data }) => this.on.map(decoded(JSON.parse(data))));
    this.#source.addEventListener("frame", ({ data }) => {
      this.#expect();
      this.on.frame(JSON.parse(data));
    });
    this.#source.onerror = () => {
      clearTimeout(this.#watch);
      this.on.state("lost");
      // The browser tries again by itself, but not where the server has refused.
      if (this.#source.readyState === EventSource.CLOSED) this.#refused();
    };
  }

  /** Tell why, which an EventSource does not know, and try again later. */
  async #refused() {
    this.#retry = setTimeout(() => this.#open(), RETRY_MS);
    const answer = await fetch("/api/stream");
    if (answer.ok) answer.body.cancel();
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

function decoded(map) {
  return { ...map, device: fromBase64(map.device), swap: fromBase64(map.swap) };
}

function fromBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/** What the server answers to a question, or an Error with what it said. */
export async function ask(path, parameters) {
  const answer = await fetch(`/api/${path}?${new URLSearchParams(parameters)}`);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
}
