// The selection in the URL fragment: #block/device/17, #blocks/device/512/245, #sequence/1/42.

/**
 * @typedef {{kind: "block", tier: Tier, id: number}} BlockSelection
 * @typedef {{kind: "blocks", tier: Tier, start: number, count: number}} BlocksSelection
 * @typedef {{kind: "sequence"} & SequenceId} SequenceSelection
 * @typedef {BlockSelection | BlocksSelection | SequenceSelection} Selection
 */

/** @type {[RegExp, (found: any[]) => Selection][]} */
const KINDS = [
  [/^#block\/(device|swap)\/(\d{1,9})$/, ([tier, id]) => ({ kind: "block", tier, id: Number(id) })],
  [
    /^#blocks\/(device|swap)\/(\d{1,9})\/(\d{1,9})$/,
    ([tier, start, count]) => ({ kind: "blocks", tier, start: Number(start), count: Number(count) }),
  ],
  [
    /^#sequence\/(\d{1,19})\/(\d{1,19})$/,
    ([session_id, sequence_id]) => ({ kind: "sequence", session_id, sequence_id }),
  ],
];

/**
 * Parse the URL fragment. Returns null if nothing is selected.
 * @param {string} hash
 */
export function parse(hash) {
  for (const [pattern, selection] of KINDS) {
    const found = pattern.exec(hash);
    if (found) return selection(found.slice(1));
  }
  return null;
}

/** @type {(tier: Tier, id: number) => string} */
export const blockHash = (tier, id) => `#block/${tier}/${id}`;
/** @type {(tier: Tier, start: number, count: number) => string} */
export const blocksHash = (tier, start, count) => `#blocks/${tier}/${start}/${count}`;
/** @type {(id: SequenceId) => string} */
export const sequenceHash = ({ session_id, sequence_id }) => `#sequence/${session_id}/${sequence_id}`;

/** @param {string} hash */
export function go(hash) {
  location.hash = hash;
}
