#include "lane/session.h"

#include <string>
#include <utility>

#include "errors.h"
#include "lane/error.h"

namespace kvservice {
namespace {

constexpr const char* kPlaceFields[6] = {"query", "key", "value", "output_place", "lse_place", "options.alibi_slopes"};

// The bytes belong to a Python object, so they cannot be declared atomic.
uint8_t load(const uint8_t* byte) { return __atomic_load_n(byte, __ATOMIC_ACQUIRE); }

}  // namespace

LaneSession::LaneSession(int64_t num_layers, FinishedSteps& finished, int64_t number, int64_t* kept_ids,
                         int64_t num_kept_ids)
    : num_layers_(num_layers), finished_(finished), number_(number), kept_ids_(kept_ids), num_kept_ids_(num_kept_ids) {
  require(num_layers > 0, "num_layers", "is not positive");
  require(kept_ids == nullptr || num_kept_ids > 0, "kept_ids", "is empty");
}

void LaneSession::publish(const LaneStep& step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (step.id <= last_step_) {
    throw ArgumentError("step_id", std::to_string(step.id) + " does not follow " + std::to_string(last_step_));
  }
  std::list<FinishedStep> completed = {{number_, step.id}};
  Step& added = steps_[step.id];
  added.step = step;
  added.completed = std::move(completed);
  last_step_ = step.id;
}

void LaneSession::retire(int64_t step_id) {
  std::unique_lock<std::mutex> lock(mutex_);
  erase_unused(steps_, step_id, lock);
}

uint32_t LaneSession::add_region(char* address, int64_t num_bytes, LaneMemoryKind kind) {
  require(address != nullptr && reinterpret_cast<uintptr_t>(address) % 16 == 0, "address",
          "is not a multiple of 16 bytes");
  require(num_bytes > 0, "num_bytes", "is not positive");
  const std::lock_guard<std::mutex> lock(mutex_);
  require(next_region_ != kNoRegion, "address", "there are no more region numbers in this session");
  regions_[next_region_].region = {address, num_bytes, kind};
  return next_region_++;
}

void LaneSession::remove_region(uint32_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  erase_unused(regions_, number, lock);
}

// Several threads may remove the same element: the first one to find it unused erases it.
template <class Map>
void LaneSession::erase_unused(Map& map, const typename Map::key_type& key, std::unique_lock<std::mutex>& lock) {
  const auto gone = [&] {
    const auto found = map.find(key);
    if (found == map.end()) return true;
    found->second.removed = true;
    if (found->second.users > 0) return false;
    map.erase(found);
    return true;
  };
  ++num_waiting_;
  unused_.wait(lock, gone);
  --num_waiting_;
}

bool LaneSession::layers_written(const LaneStep& step, bool all) const {
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    if ((load(step.written + layer) != 0) != all) return !all;
  }
  return all;
}

// The id is stored before the client can see that the last call is complete.
void LaneSession::finish(Step& step) {
  const int64_t id = step.step.id;
  if (kept_ids_ != nullptr) __atomic_store_n(kept_ids_ + id % num_kept_ids_, id, __ATOMIC_RELEASE);
  finished_.add(step.completed);
}

LaneSession::Step& LaneSession::find_step(int64_t step_id) {
  const auto found = steps_.find(step_id);
  if (found == steps_.end() || found->second.removed) {
    const std::string text = "step " + std::to_string(step_id);
    if (step_id > last_step_) throw LaneError("UNKNOWN_STEP", "step_id", text + " was never opened");
    throw LaneError("STALE_STEP", "step_id", text + " was replaced by a newer operation");
  }
  if (draining_.load() && !layers_written(found->second.step, false)) {
    throw LaneError("DRAINING", "", "the daemon is shutting down");
  }
  return found->second;
}

LaneSession::Region* LaneSession::find_region(const LanePlace& place, const char* field) {
  if (place.region == kNoRegion) return nullptr;
  const auto found = regions_.find(place.region);
  if (found == regions_.end() || found->second.removed) {
    throw LaneError("UNKNOWN_REGION", field, "there is no region " + std::to_string(place.region));
  }
  return &found->second;
}

LaneUse::LaneUse(LaneSession& session, const LaneEntry& entry) : session_(session) {
  const LanePlace* places[6] = {&entry.query, &entry.key, &entry.value, &entry.output, &entry.lse, &entry.alibi_slopes};
  const std::lock_guard<std::mutex> lock(session_.mutex_);
  step_ = &session_.find_step(entry.step_id);
  for (int64_t i = 0; i < 6; ++i) regions_[i] = session_.find_region(*places[i], kPlaceFields[i]);
  ++step_->users;  // nothing throws from here on
  for (LaneSession::Region* region : regions_) {
    if (region != nullptr) ++region->users;
  }
}

void LaneUse::claim(int64_t layer) {
  uint8_t* byte = step_->step.written + layer;
  if (__atomic_exchange_n(byte, static_cast<uint8_t>(1), __ATOMIC_ACQ_REL) != 0) {
    throw LaneError("LAYER_WRITTEN", "layer",
                    "layer " + std::to_string(layer) + " of step " + std::to_string(step_->step.id) + " is written");
  }
  claimed_ = byte;
}

LaneUse::~LaneUse() {
  const std::lock_guard<std::mutex> lock(session_.mutex_);
  if (claimed_ != nullptr && !keep_) __atomic_store_n(claimed_, static_cast<uint8_t>(0), __ATOMIC_RELEASE);
  --step_->users;
  for (LaneSession::Region* region : regions_) {
    if (region != nullptr) --region->users;
  }
  step_->changed |= keep_;
  // A layer that another lane has claimed is not written yet, so the last user checks.
  if (step_->changed && step_->users == 0) {
    step_->changed = false;
    // Written layers stay written, so this happens once.
    if (session_.layers_written(step_->step, true)) session_.finish(*step_);
  }
  if (session_.num_waiting_ > 0) session_.unused_.notify_all();
}

}  // namespace kvservice
