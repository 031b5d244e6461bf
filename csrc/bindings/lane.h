#pragma once

#include <pybind11/pybind11.h>

namespace kvservice {

// Defines LaneSession, LaneServer, LaneClient, LANE_BYTES, LANE_BUCKETS and LaneExecutor, the base class of a module's
// own executor. The classes are local to the module: `_ext` and `_cuda` both have them.
void define_lane(pybind11::module_& m);

}  // namespace kvservice
