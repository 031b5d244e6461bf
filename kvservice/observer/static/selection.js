// The selection in the URL fragment: #block/device/17, #blocks/device/512/245, #sequence/1/42.

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

/** Parse the URL fragment. Returns null if nothing is selected. */
export function parse(hash) {
  for (const [pattern, selection] of KINDS) {
    const found = pattern.exec(hash);
    if (found) return selection(found.slice(1));
  }
  return null;
}

export const blockHash = (tier, id) => `#block/${tier}/${id}`;
export const blocksHash = (tier, start, count) => `#blocks/${tier}/${start}/${count}`;
export const sequenceHash = ({ session_id, sequence_id }) => `#sequence/${session_id}/${sequence_id}`;

export function go(hash) {
  location.hash = hash;
}
