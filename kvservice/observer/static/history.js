// The values of the charts: the server's history, followed by the sample of each frame.

import { Chart } from "./charts.js";
import * as format from "./format.js";

const MOST = 600;
const MOST_METHODS = 6;
const COLUMNS = /** @type {const} */ ([
  "usage", "hit_share", "computed_tokens", "swapped_out_bytes", "swapped_in_bytes",
  "waiting", "running", "first_token_s", "between_tokens_s",
]);

const KEYED = /** @type {const} */ (["p99_s", "up_bytes", "down_bytes"]);

export class History {
  /** @type {Samples} */
  #data = {
    time_s: [], usage: [], hit_share: [], computed_tokens: [], swapped_out_bytes: [], swapped_in_bytes: [],
    waiting: [], running: [], first_token_s: [], between_tokens_s: [], p99_s: {}, up_bytes: {}, down_bytes: {},
  };
  /**
   * Colours of the methods that have a line.
   * @type {Map<string, number>}
   */
  tones = new Map();

  /**
   * `tiers` and `schedulers` are for charts that are hidden until there is a tier or a scheduler.
   * @param {HTMLElement} host
   * @param {HTMLElement} tiers
   * @param {HTMLElement} schedulers
   */
  constructor(host, tiers, schedulers) {
    /** @param {number | null} time */
    const hover = (time) => Object.values(this.charts).forEach((chart) => chart.point(time));
    /**
     * @param {string} title
     * @param {(value: number | null | undefined) => string} show
     * @param {import("./charts.js").Scale} scale
     */
    const chart = (title, show, scale) => new Chart({ title, show, scale, hover });
    this.charts = {
      usage: chart("Pool held by sequences", format.percent, "share"),
      hits: chart("Prefix cache hits", format.percent, "share"),
      tokens: chart("Tokens computed per second", format.compact, "linear"),
      swap: chart("Swapped per second", format.bytes, "bytes"),
      up: chart("Read from tiers per second", format.bytes, "bytes"),
      down: chart("Written to tiers per second", format.bytes, "bytes"),
      latency: chart("99th percentile of calls", format.latency, "log"),
      requests: chart("Requests", format.compact, "linear"),
      firstToken: chart("99th percentile to the first token", format.latency, "log"),
      betweenTokens: chart("99th percentile between tokens", format.latency, "log"),
    };
    const { up, down, requests, firstToken, betweenTokens, ...others } = this.charts;
    host.append(...Object.values(others).map(({ element }) => element));
    tiers.append(up.element, down.element);
    schedulers.append(requests.element, firstToken.element, betweenTokens.element);
    this.tiers = tiers;
    this.schedulers = schedulers;
  }

  /** @param {Samples} history */
  hello(history) {
    this.#data = history;
    this.#draw();
  }

  /**
   * `sample` is the latest of the history. The last sample of the hello and the first frame's may be the same.
   * @param {Sample | null} sample
   * @param {Snapshot} snapshot
   */
  frame(sample, { calls, tiers, scheduling }) {
    const data = this.#data;
    this.tiers.hidden = !tiers.length;
    this.schedulers.hidden = !scheduling;
    this.#pick(calls);
    if (sample && sample.time_s > (data.time_s.at(-1) ?? 0)) {
      for (const name of KEYED) this.#append(data[name], sample[name]);
      for (const name of COLUMNS) append(data[name], sample[name]);
      append(data.time_s, sample.time_s);
    }
    this.#draw();
  }

  /**
   * Add a value to the column of each key. A new key has no values before it.
   * @param {Record<string, (number | null)[]>} columns
   * @param {Record<string, number | null>} values
   */
  #append(columns, values) {
    for (const key of Object.keys(values)) columns[key] ??= this.#data.time_s.map(() => null);
    for (const [key, column] of Object.entries(columns)) append(column, values[key] ?? null);
  }

  /**
   * Give lines to the methods with the most calls. A method keeps its colour while it has a line.
   * @param {CallRow[]} calls
   */
  #pick(calls) {
    const byCalls = calls.toSorted((one, other) => other.calls - one.calls);
    const methods = byCalls.slice(0, MOST_METHODS).map(({ method }) => method);
    for (const method of [...this.tones.keys()]) if (!methods.includes(method)) this.tones.delete(method);
    for (const method of methods) {
      if (this.tones.has(method)) continue;
      const used = new Set(this.tones.values());
      this.tones.set(method, [0, 1, 2, 3, 4, 5].find((tone) => !used.has(tone)) ?? 0);
    }
  }

  #draw() {
    const { time_s, p99_s, up_bytes, down_bytes, ...data } = this.#data;
    const methods = [...this.tones].map(([name, tone]) => ({ name, tone, values: p99_s[name] ?? [] }));
    this.charts.usage.update(time_s, [{ name: "held", values: data.usage, tone: 0 }]);
    this.charts.hits.update(time_s, [{ name: "of tokens looked up", values: data.hit_share, tone: 2 }]);
    this.charts.tokens.update(time_s, [{ name: "tokens", values: data.computed_tokens, tone: 0 }]);
    this.charts.swap.update(time_s, [
      { name: "out", values: data.swapped_out_bytes, tone: 1 },
      { name: "in", values: data.swapped_in_bytes, tone: 0 },
    ]);
    this.charts.up.update(time_s, series(up_bytes));
    this.charts.down.update(time_s, series(down_bytes));
    this.charts.latency.update(time_s, methods);
    this.charts.requests.update(time_s, [
      { name: "waiting", values: data.waiting, tone: 1 },
      { name: "running", values: data.running, tone: 0 },
    ]);
    this.charts.firstToken.update(time_s, [{ name: "first token", values: data.first_token_s, tone: 0 }]);
    this.charts.betweenTokens.update(time_s, [{ name: "between tokens", values: data.between_tokens_s, tone: 2 }]);
  }
}

/**
 * @param {Record<string, (number | null)[]>} columns
 * @returns {import("./charts.js").Series[]}
 */
function series(columns) {
  return Object.entries(columns).map(([name, values], tone) => ({ name, values, tone }));
}

/**
 * @template Value
 * @param {Value[]} values
 * @param {Value} value
 */
function append(values, value) {
  values.push(value);
  if (values.length > MOST) values.shift();
}
