// Checks of Python arguments. Each failure is an ArgumentError that names the argument.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "errors.h"

namespace kvservice {

namespace py = pybind11;

// Type numbers of NumPy.
constexpr int kInt32 = py::detail::npy_api::NPY_INT_, kFloat32 = py::detail::npy_api::NPY_FLOAT_;
constexpr int kFloat16 = 23;

inline int int64_num() {
  static const int num = py::dtype::of<int64_t>().num();
  return num;
}

inline std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

inline std::vector<int64_t> shape_of(const py::array& array) { return {array.shape(), array.shape() + array.ndim()}; }

inline bool is_plain(const py::array& array) {
  constexpr int kPlain = py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
  return (array.flags() & kPlain) == kPlain;
}

inline py::array as_array(const py::handle& object, const char* field, int type_num, const char* type_name) {
  if (!py::isinstance<py::array>(object)) throw ArgumentError(field, "is not a NumPy array");
  auto array = py::reinterpret_borrow<py::array>(object);
  if (array.dtype().num() != type_num || array.dtype().byteorder() == '>') {
    throw ArgumentError(field, "has dtype " + py::str(array.dtype()).cast<std::string>() + ", expected " + type_name);
  }
  return array;
}

inline void check_shape(const py::array& array, const char* field, const std::vector<int64_t>& shape) {
  if (static_cast<size_t>(array.ndim()) != shape.size()) {
    throw ArgumentError(
        field, "has " + std::to_string(array.ndim()) + " dimensions, expected " + std::to_string(shape.size()));
  }
  for (size_t i = 0; i < shape.size(); ++i) {
    if (array.shape(static_cast<py::ssize_t>(i)) != shape[i]) {
      throw ArgumentError(field, "has shape " + shape_text(shape_of(array)) + ", expected " + shape_text(shape));
    }
  }
}

inline int64_t as_int(const py::handle& object, const char* field) {
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
  const int64_t value = index ? PyLong_AsLongLong(index.ptr()) : -1;
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw ArgumentError(field, "is not a 64-bit integer");
  }
  return value;
}

inline float as_float(const py::handle& object, const char* field) {
  const double value = PyFloat_AsDouble(object.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw ArgumentError(field, "is not a number");
  }
  if (!std::isfinite(static_cast<float>(value))) throw ArgumentError(field, "is not finite");
  return static_cast<float>(value);
}

}  // namespace kvservice
