#pragma once

#include <pybind11/pybind11.h>

namespace kvservice {

// Defines WireScanner.
void define_wire(pybind11::module_& m);

}  // namespace kvservice
