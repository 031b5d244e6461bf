// State shared by the lanes of one session: its live steps and its regions. Python threads change it; lane threads use
// it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <list>
#include <mutex>
#include <unordered_map>

#include "lane/finished_steps.h"
#include "lane/ring.h"

namespace kvservice {

// The arrays of a step. Those of the device come with two numbers that the host computes from them; see
// AttentionParams.
struct LaneTables {
  const int64_t* slot_mapping = nullptr;  // [num_tokens]
  const int32_t* query_lens = nullptr;    // [num_seqs]
  const int32_t* context_lens = nullptr;  // [num_seqs]
  const int32_t* block_tables = nullptr;  // [num_seqs, max_blocks]
  int64_t num_common_blocks = 0;
  int64_t max_query_len = 0;
};

// A step (see kvservice/blocks/steps.py). The arrays stay valid until retire() has returned.
struct LaneStep {
  int64_t id = 0;
  int64_t num_tokens = 0;
  int64_t num_seqs = 0;
  int64_t max_blocks = 0;
  LaneTables host;
  LaneTables device;           // copies on the device; empty for executors on the host
  uint8_t* written = nullptr;  // [num_layers] 1 if the layer is written; Python changes them too
};

enum class LaneMemoryKind { kHost, kPinnedHost, kDevice };

struct LaneRegion {
  char* address = nullptr;
  int64_t num_bytes = 0;
  LaneMemoryKind kind = LaneMemoryKind::kHost;
};

class LaneSession {
 public:
  // `number` identifies the session in `finished`. Unless `kept_ids` is null, a step of which all layers are written is
  // also stored at kept_ids[id % num_kept_ids], for the next process. Both outlive the session. Throws ArgumentError.
  LaneSession(int64_t num_layers, FinishedSteps& finished, int64_t number, int64_t* kept_ids, int64_t num_kept_ids);

  int64_t num_layers() const { return num_layers_; }

  // Step ids increase. Throws ArgumentError (step_id) otherwise.
  void publish(const LaneStep& step);

  // When it returns, no call uses the step or its arrays, and none will. One exception: calls that nobody waited for
  // may still read device arrays, in stream order. Unknown ids have no effect.
  void retire(int64_t step_id);

  // Signals the event loop if there are finished steps. Lanes call it after they have completed a call.
  void signal_finished() { finished_.signal(); }

  // Numbers are never reused. `address` is a multiple of 16. Throws ArgumentError.
  uint32_t add_region(char* address, int64_t num_bytes, LaneMemoryKind kind = LaneMemoryKind::kHost);

  // When it returns, no call uses the region, and none will, except calls that nobody waited for: the caller waits for
  // those before it frees the memory. Unknown numbers have no effect.
  void remove_region(uint32_t number);

  // From now on, a step without a written layer is refused.
  void set_draining() { draining_.store(true); }

 private:
  friend class LaneUse;
  struct Step {
    LaneStep step;
    int64_t users = 0;
    bool removed = false;
    bool changed = false;               // a layer was written since the last check for completeness
    std::list<FinishedStep> completed;  // one element, moved to `finished_` with the last layer
  };
  struct Region {
    LaneRegion region;
    int64_t users = 0;
    bool removed = false;
  };

  template <class Map>
  void erase_unused(Map& map, const typename Map::key_type& key, std::unique_lock<std::mutex>& lock);
  Step& find_step(int64_t step_id);
  Region* find_region(const LanePlace& place, const char* field);
  bool layers_written(const LaneStep& step, bool all) const;
  void finish(Step& step);

  const int64_t num_layers_;
  FinishedSteps& finished_;
  const int64_t number_;
  int64_t* const kept_ids_;
  const int64_t num_kept_ids_;
  std::atomic<bool> draining_{false};
  std::mutex mutex_;
  std::condition_variable unused_;
  int64_t num_waiting_ = 0;  // threads that wait for an element to become unused
  int64_t last_step_ = std::numeric_limits<int64_t>::min();
  uint32_t next_region_ = 0;
  // Elements keep their address while they have users.
  std::unordered_map<int64_t, Step> steps_;
  std::unordered_map<uint32_t, Region> regions_;
};

// A reference of one call to its step and regions, until attend() has returned.
class LaneUse {
 public:
  // Throws LaneError UNKNOWN_STEP, STALE_STEP, DRAINING or UNKNOWN_REGION.
  LaneUse(LaneSession& session, const LaneEntry& entry);
  ~LaneUse();
  LaneUse(const LaneUse&) = delete;
  LaneUse& operator=(const LaneUse&) = delete;

  const LaneStep& step() const { return step_->step; }

  // `place` is an index into the places of the entry. Null if the place is left out.
  const LaneRegion* region(int64_t place) const {
    return regions_[place] == nullptr ? nullptr : &regions_[place]->region;
  }
  LaneMemoryKind kind(int64_t place) const {
    return regions_[place] == nullptr ? LaneMemoryKind::kHost : regions_[place]->region.kind;
  }

  // Claims the layer for this call: sets its byte in `written` to 1. Throws LaneError LAYER_WRITTEN.
  void claim(int64_t layer);

  // Marks the layer as written. Without it, the destructor releases the claim.
  void keep() { keep_ = true; }

 private:
  LaneSession& session_;
  LaneSession::Step* step_ = nullptr;
  LaneSession::Region* regions_[6] = {};
  uint8_t* claimed_ = nullptr;
  bool keep_ = false;
};

}  // namespace kvservice
