// hello ─▶ the daemon's configuration, charts    map ─▶ pool
// frame ─▶ figures, counts, charts, tables       URL fragment ─▶ detail ─▶ highlights on the map

import { say } from "./dom.js";
import { Detail } from "./detail.js";
import { Figures, restartOf, shapeOf } from "./figures.js";
import * as format from "./format.js";
import { History } from "./history.js";
import { PoolPanel } from "./map.js";
import { blockHash, blocksHash, go, parse, sequenceHash } from "./selection.js";
import { Stream, ask } from "./stream.js";
import * as tables from "./tables.js";
import { Tiers } from "./tiers.js";

const SEARCH_PAUSE_MS = 200;
const REFRESH_EVERY = 2;
/** @type {Record<string, string>} */
const STATES = {
  live: "Live",
  draining: "Draining: no new work is taken",
  late: "Nothing heard for seconds",
  lost: "Connection lost, trying again",
  refused: "Refused",
};

/** @param {string} id */
const part = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const query = /** @type {HTMLInputElement} */ (part("query"));
const figures = new Figures(part("figures"));
const pool = new PoolPanel(part("pool"), ({ tier, start, count }) => {
  go(count === 1 ? blockHash(tier, start) : blocksHash(tier, start, count));
});
const detail = new Detail(part("detail"), (marks) => pool.mark(marks));
const history = new History(part("charts"), part("tier-charts"), part("scheduler-charts"));
const tiers = new Tiers(part("tiers"));
const sequences = tables.sequences(part("sequences"), (row) => go(sequenceHash(row)));
const sessions = tables.sessions(part("sessions"), (row) => search(row.name || row.session_id));
const schedulers = tables.schedulers(part("schedulers"));
const engines = tables.engines(part("engines"));
const calls = tables.calls(part("calls"), history.tones);

/** @type {Info | null} */
let info = null;
let frames = 0;
let searching = false;
let pause = 0;

/** @param {Snapshot} snapshot */
function rows(snapshot) {
  sequences.show(snapshot.sequences, snapshot.num_sequences);
  sessions.show(snapshot.sessions, snapshot.num_sessions);
  const scheduling = snapshot.sessions.flatMap(({ scheduler, ...row }) => (scheduler ? [{ ...row, scheduler }] : []));
  schedulers.show(scheduling, scheduling.length);
  part("schedulers").hidden = !snapshot.scheduling;
  const storing = snapshot.sessions.flatMap(({ engine, ...row }) => (engine ? [{ ...row, engine }] : []));
  engines.show(storing, storing.length);
  part("engines").hidden = !storing.length;
  markRow();
}

function markRow() {
  const chosen = parse(location.hash);
  sequences.mark(chosen?.kind === "sequence" ? tables.sequenceKey(chosen) : null);
}

/** @param {string} text */
function search(text) {
  query.value = text;
  find();
}

/** Fill the tables with the matches of the search. Each frame repeats the search. */
async function find() {
  const text = query.value.trim();
  if (!text) say(part("found"), "");
  if (!text || searching) return;
  searching = true;
  try {
    const { snapshot } = await ask("search", { q: text });
    if (query.value.trim() !== text) return;
    rows(snapshot);
    const { num_sequences, num_sessions } = snapshot;
    say(part("found"), `${format.plural(num_sequences, "sequence")}, ${format.plural(num_sessions, "session")}`);
  } catch {
    state("lost");
  } finally {
    searching = false;
    if (query.value.trim() !== text) find();
  }
}

/**
 * @param {string} name
 * @param {string} reason
 */
function state(name, reason = "") {
  part("status").dataset.state = name;
  say(part("status-text"), STATES[name] + reason);
}

/** @param {Snapshot} snapshot */
function restart(snapshot) {
  const { text, bad } = restartOf(snapshot);
  part("restart").hidden = !text;
  part("restart").dataset.state = bad ? "bad" : "good";
  say(part("restart"), text);
}

/** @param {Frame} frame */
function showFrame({ snapshot, sample }) {
  if (info === null) return;
  state(snapshot.pool.draining ? "draining" : "live");
  say(part("uptime"), `up ${format.age(Math.floor(snapshot.uptime_s))}`);
  figures.frame(snapshot, info);
  restart(snapshot);
  pool.frame(snapshot);
  tiers.frame(snapshot, info);
  history.frame(sample, snapshot);
  calls.show(snapshot.calls, snapshot.calls.length);
  if (query.value.trim()) find();
  else rows(snapshot);
  if (++frames % REFRESH_EVERY === 0) detail.refresh();
}

query.addEventListener("input", () => {
  clearTimeout(pause);
  pause = setTimeout(find, SEARCH_PAUSE_MS);
});
part("search").addEventListener("submit", (event) => {
  event.preventDefault();
  find();
});
addEventListener("hashchange", () => {
  markRow();
  detail.choose(parse(location.hash));
});

new Stream({
  state,
  hello: (hello) => {
    const first = info === null;
    info = hello.info;
    say(part("shape"), shapeOf(info));
    pool.hello(info);
    history.hello(hello.history);
    if (first) detail.choose(parse(location.hash));
  },
  map: (map) => pool.map(map),
  frame: showFrame,
});
