#pragma once

#include <pybind11/pybind11.h>

namespace kvservice {

// Defines the functions over block tables.
void define_blocks(pybind11::module_& m);

}  // namespace kvservice
