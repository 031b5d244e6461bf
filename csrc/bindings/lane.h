#pragma once

#include <pybind11/pybind11.h>

namespace kvservice {

// LaneSession, LaneServer, LaneClient, LANE_BYTES, LANE_BUCKETS, and LaneExecutor, from which a module's own derives.
// The classes are the module's own: `_ext` and `_cuda` both have them.
void define_lane(pybind11::module_& m);

}  // namespace kvservice
