// A small pool of native threads. Idle threads sleep; after work they spin for a few microseconds first.
#pragma once

#include <cstdint>
#include <functional>

namespace kvservice {

int num_threads();

// Throws ArgumentError unless 1 <= count <= 1024.
void set_num_threads(int64_t count);

// Runs body(index) for 0 <= index < count, each once, on the calling thread and the pool's threads. Of concurrent
// callers, the pool's threads help the one with the fewest indices left. `body` must not throw and must not call
// parallel_for.
void parallel_for(int64_t count, const std::function<void(int64_t)>& body);

}  // namespace kvservice
