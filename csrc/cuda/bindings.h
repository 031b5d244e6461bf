// What the files of bindings share.
#pragma once

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <cstdint>

namespace kvservice {

using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;

template <class T = void>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline cudaStream_t stream_at(uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

// Memory, streams and events.
void define_objects(pybind11::module_& m);

}  // namespace kvservice
