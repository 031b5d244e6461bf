// Formatting of numbers. Every function accepts null or undefined for a missing value.

const NONE = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const share = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });
const brief = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });
const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

/**
 * @param {(value: number) => string} format
 * @returns {(value: number | null | undefined) => string}
 */
const given = (format) => (value) => (value === null || value === undefined ? NONE : format(Number(value)));

export const count = given((value) => whole.format(value));
/** Format a count: 0.25, 12, 1,234, 12.3K, 4.56M. */
export const compact = given((value) => (value < 10 ? brief : value < 10_000 ? whole : short).format(value));
export const percent = given((value) => share.format(value));
export const bytes = given((value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]));

/** Format a latency: 850 µs, 1.2 ms. */
export const latency = given((seconds) => {
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${digits.format(seconds * 1e6)} µs`;
  return seconds < 1 ? `${digits.format(seconds * 1e3)} ms` : `${digits.format(seconds)} s`;
});

/** @type {[unit: string, seconds: number, smaller: string, seconds: number][]} */
const AGES = [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]];

/** Format an age: 0.4 s, 12 s, 3 min 20 s, 5 h 2 min, 3 d 4 h. */
export const age = given((seconds) => {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const rounded = Math.round(seconds);
  for (const [unit, size, smaller, part] of AGES) {
    const rest = Math.floor((rounded % size) / part);
    if (rounded >= size) return `${Math.floor(rounded / size)} ${unit} ${rest} ${smaller}`;
  }
  return `${rounded} s`;
});

/**
 * @param {number} number
 * @param {string} one
 */
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${Number(number) === 1 ? one : many}`;

/**
 * Format block ids in table order, with ranges of neighbours: "17–20, 3, 90–88". Also returns the number of ranges.
 * @param {number[]} ids
 */
export function ranges(ids) {
  /** @type {{from: number, to: number, step: number}[]} */
  const found = [];
  for (const id of ids) {
    const last = found.at(-1);
    const step = last ? id - last.to : 0;
    if (last && Math.abs(step) === 1 && (last.step === 0 || last.step === step)) Object.assign(last, { to: id, step });
    else found.push({ from: id, to: id, step: 0 });
  }
  const texts = found.map(({ from, to }) => (from === to ? `${from}` : `${from}–${to}`));
  return { number: found.length, text: texts.join(", ") };
}

/**
 * @param {number} value
 * @param {number} step
 * @param {string[]} units
 */
function scaled(value, step, units) {
  let unit = 0;
  while (value >= step && unit < units.length - 1) [value, unit] = [value / step, unit + 1];
  return `${value < 100 ? digits.format(value) : whole.format(value)} ${units[unit]}`;
}
