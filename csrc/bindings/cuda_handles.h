// Shared by the bindings of _cuda: pointers, streams and closable objects.
#pragma once

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "bindings/gil.h"
#include "errors.h"
#include "pool.h"

namespace kvservice {

using Unlocked = pybind11::call_guard<WithoutGil>;

template <class T = void>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline cudaStream_t stream_at(uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

// An object that Python can close. close() takes the object while it holds the GIL, so that two threads do not close it
// twice, and destroys it without the GIL, because that may wait for the device.
template <class T>
class Owned {
 public:
  template <class... Arguments>
  explicit Owned(Arguments&&... arguments) : owned_(std::make_unique<T>(std::forward<Arguments>(arguments)...)) {}
  ~Owned() { close(); }
  void close() {
    std::unique_ptr<T> owned = std::move(owned_);
    const WithoutGil without_gil;
    owned.reset();
  }
  const T& get() const {
    require(owned_ != nullptr, "memory", "is closed");
    return *owned_;
  }

 private:
  std::unique_ptr<T> owned_;
};

// Defines pointer, num_bytes and close() of an Owned whose object has data() and bytes().
template <class T>
pybind11::class_<Owned<T>> define_owned_memory(pybind11::module_& m, const char* name) {
  return pybind11::class_<Owned<T>>(m, name)
      .def_property_readonly("pointer",
                             [](const Owned<T>& memory) { return reinterpret_cast<uintptr_t>(memory.get().data()); })
      .def_property_readonly("num_bytes", [](const Owned<T>& memory) { return memory.get().bytes(); })
      .def("close", &Owned<T>::close);
}

inline DType dtype_of(int number, const char* field) {
  require(number >= static_cast<int>(DType::kFloat32) && number <= static_cast<int>(DType::kFloat8E5M2), field,
          "is not a dtype");
  return static_cast<DType>(number);
}

// Defines the lane classes and CudaLaneExecutor.
void define_lane_executor(pybind11::module_& m);

// Defines the memory, stream and event classes.
void define_objects(pybind11::module_& m);

}  // namespace kvservice
