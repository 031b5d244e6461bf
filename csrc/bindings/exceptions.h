// Translates ArgumentError into a Python exception.
#pragma once

#include <pybind11/pybind11.h>

#include "errors.h"

namespace kvservice {

// Raises kvservice.errors.InvalidArgumentError(message, field=...).
inline void raise_argument_error(const ArgumentError& error) {
  namespace py = pybind11;
  const py::object type = py::module_::import("kvservice.errors").attr("InvalidArgumentError");
  const py::object instance = type(error.what(), py::arg("field") = error.field());
  PyErr_SetObject(type.ptr(), instance.ptr());
}

}  // namespace kvservice
