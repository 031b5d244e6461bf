#pragma once

#include <pybind11/pybind11.h>

namespace kvservice {

// Defines StoreIndex, StoreStats, and the copies of the block store.
void define_store(pybind11::module_& m);

}  // namespace kvservice
