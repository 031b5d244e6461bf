// Python bindings of the disk tier.
#pragma once

#include <pybind11/pybind11.h>

namespace kvservice {

void define_disk(pybind11::module_& m);

}  // namespace kvservice
