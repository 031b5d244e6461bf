// Python arguments that are bytes: packed keys and 64-bit numbers.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "bindings/arguments.h"
#include "store/layout.h"

namespace kvservice {

using Packed = std::vector<uint64_t>;

inline std::string_view as_bytes(const py::object& object, const char* field) {
  if (!PyBytes_Check(object.ptr())) throw ArgumentError(field, "is not bytes");
  return {PyBytes_AS_STRING(object.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(object.ptr()))};
}

inline Packed as_packed(const py::object& object, const char* field) {
  const std::string_view bytes = as_bytes(object, field);
  require(bytes.size() % sizeof(uint64_t) == 0, field, "does not consist of 64-bit numbers");
  Packed numbers(bytes.size() / sizeof(uint64_t));
  if (!bytes.empty()) __builtin_memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

inline py::bytes to_bytes(const Packed& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(uint64_t)};
}

inline std::string_view as_key_bytes(const py::object& object) {
  const std::string_view bytes = as_bytes(object, "keys");
  require(bytes.size() % kKeyBytes == 0, "keys", "is not a multiple of 32 bytes long");
  return bytes;
}

inline int64_t as_positive(const py::object& object, const char* field) {
  const int64_t number = as_int(object, field);
  require(number > 0, field, "is not positive");
  return number;
}

inline char* as_address(const py::object& object, const char* field) {
  return reinterpret_cast<char*>(static_cast<uintptr_t>(as_positive(object, field)));
}

}  // namespace kvservice
