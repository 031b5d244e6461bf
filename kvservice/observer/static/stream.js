// The server's events. A hidden page closes the stream; the history in the next hello fills the gap.

const RETRY_MS = 3000;
const LATE_MS = 3500;

export class Stream {
  #source = null;
  #retry = 0;
  #watch = 0;

  /** `on` has the callbacks hello(data), map(data), frame(data) and state("late" | "lost" | "refused", reason). */
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
      // The browser reconnects by itself unless the server refused the stream.
      if (this.#source.readyState === EventSource.CLOSED) this.#refused();
    };
  }

  /** Report the reason, which an EventSource does not provide, and try again later. */
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

/** Return the server's JSON response. Throws an Error with its message if the request fails. */
export async function ask(path, parameters) {
  const answer = await fetch(`/api/${path}?${new URLSearchParams(parameters)}`);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
}
