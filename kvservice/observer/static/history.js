// The values of the charts: those that the server kept, and then those of each frame.

import { Chart } from "./charts.js";
import { make } from "./dom.js";
import * as format from "./format.js";

const MOST = 600;
const MOST_METHODS = 6;

export class History {
  #data = { time_s: [], p99_s: {} };
  /** Of the methods that have a line, the colour. */
  tones = new Map();

  constructor(host) {
    const hover = (time) => Object.values(this.charts).forEach((chart) => chart.point(time));
    const chart = (title, show, scale) => new Chart({ title, show, scale, hover });
    this.charts = {
      usage: chart("Pool held by sequences", format.percent, "share"),
      hits: chart("Prefix cache hits", format.percent, "share"),
      tokens: chart("Tokens computed per second", format.compact, "linear"),
      swap: chart("Swapped per second", format.bytes, "bytes"),
      latency: chart("99th percentile of calls", format.latency, "log"),
    };
    host.append(...Object.values(this.charts).map(({ element }) => element));
  }

  hello(history) {
    this.#data = history;
    this.#draw();
  }

  frame({ time_s, pool, rates, calls }) {
    const data = this.#data;
    // The hello holds what the first frame tells as well.
    if (time_s <= (data.time_s.at(-1) ?? 0) + 0.5) return;
    const values = {
      time_s,
      usage: (pool.active_blocks + pool.shared_blocks) / pool.num_blocks,
      hit_share: rates.hit_share ?? null,
      computed_tokens: rates.computed_tokens,
      swapped_out_bytes: rates.swapped_out_bytes,
      swapped_in_bytes: rates.swapped_in_bytes,
    };
    for (const { method } of calls) data.p99_s[method] ??= data.time_s.map(() => null);
    const p99 = new Map(calls.map((call) => [call.method, call.p99_s ?? null]));
    for (const [name, value] of Object.entries(values)) append(data[name], value);
    for (const [method, kept] of Object.entries(data.p99_s)) append(kept, p99.get(method) ?? null);
    this.#pick(calls);
    this.#draw();
  }

  /** The methods that are called most have a line, and keep their colour while they have it. */
  #pick(calls) {
    const methods = calls.toSorted((one, other) => other.calls - one.calls).slice(0, MOST_METHODS).map(({ method }) => method);
    for (const method of this.tones.keys()) if (!methods.includes(method)) this.tones.delete(method);
    for (const method of methods) {
      if (this.tones.has(method)) continue;
      const used = new Set(this.tones.values());
      this.tones.set(method, [0, 1, 2, 3, 4, 5].find((tone) => !used.has(tone)));
    }
  }

  #draw() {
    const { time_s, usage = [], hit_share = [], computed_tokens = [], swapped_out_bytes = [], swapped_in_bytes = [], p99_s } = this.#data;
    this.charts.usage.update(time_s, [{ name: "held", values: usage, tone: 0 }]);
    this.charts.hits.update(time_s, [{ name: "of tokens looked up", values: hit_share, tone: 2 }]);
    this.charts.tokens.update(time_s, [{ name: "tokens", values: computed_tokens, tone: 0 }]);
    const methods = [...this.tones].map(([name, tone]) => ({ name, tone, values: p99_s[name] ?? [] }));
    this.charts.latency.update(time_s, methods);
    this.charts.swap.update(time_s, [
      { name: "out", values: swapped_out_bytes, tone: 1 },
      { name: "in", values: swapped_in_bytes, tone: 0 },
    ]);
  }
}

export function stroke(tone) {
  return make("span", { class: tone === undefined ? "stroke none" : `stroke tone-${tone}`, "aria-hidden": "true" });
}

function append(values, value) {
  values.push(value);
  if (values.length > MOST) values.shift();
}
