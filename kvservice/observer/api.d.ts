// What the server sends to the page, for the type checks of static/*.js. Ids are strings, because JavaScript's numbers
// do not have 64 bits.

type Tier = "device" | "swap";

/** The daemon's configuration. */
interface Info {
  version: string;
  device: string;
  dtype: string;
  kv_cache_dtype: string;
  num_layers: number;
  num_kv_heads: number;
  head_size: number;
  num_blocks: number;
  num_swap_blocks: number;
  block_size: number;
  block_bytes: number;
  prefix_caching: boolean;
}

interface Pool {
  num_blocks: number;
  free_blocks: number;
  active_blocks: number;
  shared_blocks: number;
  cached_blocks: number;
  pinned_blocks: number;
  quarantined_blocks: number;
  num_swap_blocks: number;
  used_swap_blocks: number;
  sequences: number;
  swapped_sequences: number;
  tokens: number;
  sessions: number;
  lanes: number;
  regions: number;
  region_bytes: number;
  draining: boolean;
}

interface Rates {
  computed_tokens: number;
  /** Missing while no tokens are looked up. */
  hit_share?: number;
  calls: number;
  lane_calls: number;
  errors: number;
  evicted_blocks: number;
  cow_copies: number;
  out_of_blocks: number;
}

/** A scheduler, or the sums over all of them. */
interface SchedulerFigures {
  waiting: number;
  running: number;
  swapped: number;
  stalled: number;
  steps: number;
  added: number;
  finished: number;
  aborted: number;
  refused: number;
  recompute_preemptions: number;
  swap_preemptions: number;
  stalls: number;
  prompt_tokens: number;
  cached_tokens: number;
  recomputed_tokens: number;
  generated_tokens: number;
  proposed_tokens: number;
  accepted_tokens: number;
}

interface Scheduling {
  totals: SchedulerFigures;
  generated_tokens_per_s: number;
  finished_per_s: number;
  preemptions_per_s: number;
  recomputed_tokens_per_s: number;
  /** Missing while no draft tokens are verified. */
  accepted_share?: number;
  first_token_p50_s?: number;
  first_token_p99_s?: number;
  between_tokens_p50_s?: number;
  between_tokens_p99_s?: number;
}

interface SessionRow {
  session_id: string;
  name: string;
  tenant: string;
  attached: boolean;
  age_s: number;
  sequences: number;
  swapped_sequences: number;
  tokens: number;
  blocks: number;
  regions: number;
  region_bytes: number;
  lane: boolean;
  computed_tokens: number;
  query_tokens: number;
  hit_tokens: number;
  /** Missing if the session has none. */
  scheduler?: SchedulerFigures;
  /** Missing if the session is not that of an engine with K/V in the block store. */
  engine?: EngineFigures;
}

/** Requests with loads in flight, and counters. */
interface EngineFigures {
  loads_in_flight: number;
  prompt_tokens: number;
  found_tokens: number;
  blocks_loaded: number;
  blocks_not_loaded: number;
  blocks_saved: number;
  blocks_not_saved: number;
  blocks_skipped: number;
}

interface EngineRow extends SessionRow {
  engine: EngineFigures;
}

interface SchedulerRow extends SessionRow {
  scheduler: SchedulerFigures;
}

interface SequenceId {
  session_id: string;
  sequence_id: string;
}

interface SequenceRow extends SequenceId {
  session_name: string;
  length: number;
  computed: number;
  blocks: number;
  swapped: boolean;
}

interface CallRow {
  method: string;
  calls: number;
  errors: number;
  calls_per_s: number;
  p50_s?: number;
  p99_s?: number;
}

interface StoreFigures {
  num_bytes: number;
  /** How much of it is there: after its start the daemon still allocates the memory of a large store. */
  ready_bytes: number;
  used_bytes: number;
  blocks: number;
  leased: number;
  reserved: number;
  hits: number;
  misses: number;
  /** Lookups that missed a block, by why the first of the missing ones was not there. */
  evicted_misses: number;
  not_whole_misses: number;
  other_namespace_misses: number;
  never_stored_misses: number;
  quarantined: number;
  up_bytes_per_s: number;
  down_bytes_per_s: number;
  /** Missing while no blocks are looked up. */
  hit_share?: number;
}

/** A tier below the block store. */
interface TierRow {
  name: string;
  state: "open" | "opening" | "suspended" | "failed";
  num_values: number;
  used_bytes: number;
  /** 0 if it is not known. */
  capacity_bytes: number;
  corrupt: number;
  errors: number;
  /** 0 if it is not known. */
  latency_s: number;
  up_bytes_per_s: number;
  down_bytes_per_s: number;
  /** Missing while no values are looked up. */
  hit_share?: number;
}

/** The blocks of the pool that are saved in the block store, and loaded from it and the tiers below. */
interface Spill {
  saved_blocks: number;
  loaded_blocks: number;
  hit_tokens: number;
  up_bytes_per_s: number;
  down_bytes_per_s: number;
}

/** The sessions on the disk. */
interface SavedSessions {
  num_sessions: number;
  used_bytes: number;
  capacity_bytes: number;
  damaged: number;
  errors: number;
}

/** Transfers between the daemon and clients on other hosts. */
interface Transfers {
  engines: number;
  regions: number;
  failed_in: number;
  failed_out: number;
  engine_failures: number;
  damaged_blocks: number;
  in_bytes_per_s: number;
  out_bytes_per_s: number;
  fallback_bytes_per_s: number;
  /** Missing while there are no transfers. */
  p99_s?: number;
}

/** How the daemon's process began, and what it took over from the one before. */
interface Restart {
  outcome: "first start" | "taken over" | "refused";
  is_kept: boolean;
  num_restarts: number;
  lost: { sequences: number };
  /** The cause and what became of the state, in words. Empty if there is nothing to say. */
  summary: string;
}

interface Snapshot {
  time_s: number;
  uptime_s: number;
  pool: Pool;
  rates: Rates;
  calls: CallRow[];
  sessions: SessionRow[];
  sequences: SequenceRow[];
  num_sessions: number;
  num_sequences: number;
  /** Missing if the daemon has no block store. */
  store?: StoreFigures;
  /** Missing before the first request. */
  scheduling?: Scheduling;
  restart: Restart;
  /** Fastest first. */
  tiers: TierRow[];
  /** Missing if blocks of the pool are not saved in the block store. */
  spill?: Spill;
  /** Missing if the daemon has no disk for sessions. */
  saved?: SavedSessions;
  /** Missing if the daemon has no transfer engines. */
  transfers?: Transfers;
}

/** One value per chart, null where there is none. */
interface Sample {
  time_s: number;
  usage: number | null;
  hit_share: number | null;
  computed_tokens: number | null;
  swapped_out_bytes: number | null;
  swapped_in_bytes: number | null;
  waiting: number | null;
  running: number | null;
  first_token_s: number | null;
  between_tokens_s: number | null;
  /** By method. */
  p99_s: Record<string, number | null>;
  /** By tier. */
  up_bytes: Record<string, number>;
  down_bytes: Record<string, number>;
}

/** Samples as columns, oldest first. */
interface Samples {
  time_s: number[];
  usage: (number | null)[];
  hit_share: (number | null)[];
  computed_tokens: (number | null)[];
  swapped_out_bytes: (number | null)[];
  swapped_in_bytes: (number | null)[];
  waiting: (number | null)[];
  running: (number | null)[];
  first_token_s: (number | null)[];
  between_tokens_s: (number | null)[];
  p99_s: Record<string, (number | null)[]>;
  up_bytes: Record<string, (number | null)[]>;
  down_bytes: Record<string, (number | null)[]>;
}

interface Hello {
  info: Info;
  history: Samples;
}

interface Frame {
  snapshot: Snapshot;
  sample: Sample | null;
}

/** Per cell the share of its blocks in each state, of 255. */
interface PoolMap {
  group: number;
  group_swap: number;
  device: Uint8Array;
  swap: Uint8Array;
}

interface HolderRow extends SequenceId {
  session_name: string;
  position: number;
}

interface BlockAnswer {
  state: string;
  ref_count: number;
  hash: string | null;
  age_s: number | null;
  idle_s: number | null;
  sequences: HolderRow[];
  sequences_left_out: number;
}

interface BlocksAnswer {
  states: string[];
  ref_counts: number[];
}

interface SequenceAnswer extends SequenceId, BlocksAnswer {
  session_name: string;
  length: number;
  computed: number;
  tier: Tier;
  block_ids: number[];
  blocks_left_out: number;
}
