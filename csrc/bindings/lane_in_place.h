// The fast path into a lane, for calls without options whose tensors are all in regions. It inspects the tensors in
// C++, because in Python each attribute of an array costs as much as the whole call through the ring.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "lane/ring.h"

namespace kvservice {

namespace py = pybind11;

class InPlace {
 public:
  // `regions`: tuples (number, address, num_bytes). `dtype`: NumPy dtype of the tensors.
  void set(const py::iterable& regions, int64_t num_kv_heads, int64_t head_size, py::object dtype);

  // Returns an entry with places, num_heads and flags, or nothing if the call does not qualify or is invalid. The
  // tensors are NumPy arrays, or torch tensors on any device.
  std::optional<LaneEntry> entry(int64_t num_tokens, bool decode, const py::handle& query, const py::handle& key,
                                 const py::handle& value, const py::handle& out) const;

 private:
  struct Region {
    uint32_t number;
    uintptr_t address;
    int64_t num_bytes;
  };
  struct Tensor {
    uintptr_t address = 0;
    int64_t shape[3] = {};
  };

  std::optional<Tensor> inspect(const py::handle& object, bool writable) const;
  std::optional<Tensor> inspect_torch(const py::handle& object) const;
  std::optional<LanePlace> find(const Tensor& tensor) const;

  std::vector<Region> regions_;
  int64_t num_kv_heads_ = 0;
  int64_t head_size_ = 0;
  int64_t item_size_ = 0;
  py::object dtype_;
  py::object name_;  // its name in torch
};

}  // namespace kvservice
