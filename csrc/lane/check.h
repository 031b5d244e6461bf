// From what a client wrote to a call that can be computed.
#pragma once

#include <memory>
#include <vector>

#include "lane/executor.h"

namespace kvservice {

// What of an entry needs neither step nor region. Throws ArgumentError.
void check_entry(const LaneEntry& entry, uint64_t number, const LaneShape& shape);

// `entry` has passed check_entry(). The slopes, if any, are copied into `slopes`. Throws ArgumentError.
LaneCall make_call(const LaneEntry& entry, const LaneUse& use, LaneExecutor& executor, std::vector<float>& slopes);

}  // namespace kvservice
