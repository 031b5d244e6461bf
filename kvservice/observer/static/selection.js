// What is chosen, as it stands in the address: #block/device/17, #blocks/device/512/245, #sequence/1/42.

export function parse(hash) {
  const [kind, ...parts] = hash.replace(/^#/, "").split("/");
  const numbers = parts.every((part, index) => (kind !== "sequence" && index === 0 ? true : /^\d{1,19}$/.test(part)));
  const tier = ["device", "swap"].includes(parts[0]) ? parts[0] : null;
  if (!numbers) return null;
  if (kind === "sequence" && parts.length === 2) return { kind, session_id: parts[0], sequence_id: parts[1] };
  if (kind === "block" && parts.length === 2 && tier) return { kind, tier, id: Number(parts[1]) };
  if (kind === "blocks" && parts.length === 3 && tier) return { kind, tier, start: Number(parts[1]), count: Number(parts[2]) };
  return null;
}

export const blockHash = (tier, id) => `#block/${tier}/${id}`;
export const blocksHash = (tier, start, count) => (count === 1 ? blockHash(tier, start) : `#blocks/${tier}/${start}/${count}`);
export const sequenceHash = ({ session_id, sequence_id }) => `#sequence/${session_id}/${sequence_id}`;

export function go(hash) {
  location.hash = hash;
}
