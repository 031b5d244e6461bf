// Checks a client's entry and makes an executable call from it.
#pragma once

#include <memory>
#include <vector>

#include "lane/executor.h"

namespace kvservice {

// Checks what depends on neither the step nor the regions. Throws ArgumentError.
void check_entry(const LaneEntry& entry, uint64_t number, const LaneShape& shape);

// `entry` has passed check_entry(). Copies the ALiBi slopes, if any, into `slopes`. Throws ArgumentError.
LaneCall make_call(const LaneEntry& entry, const LaneUse& use, LaneExecutor& executor, std::vector<float>& slopes);

}  // namespace kvservice
