// Driver functions, looked up at run time: nothing links the driver.
#pragma once

#include <cuda.h>  // types only

#include <string>

#include "cuda/runtime.h"

namespace kvservice {

// Throws CudaError, also if there is no driver.
template <class Function>
void find_driver_function(const char* name, Function& function) {
  constexpr unsigned kSinceVersion = 10020;  // the first version with all functions that are looked up here
  void* pointer = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  check_cuda(cudaGetDriverEntryPointByVersion(name, &pointer, kSinceVersion, cudaEnableDefault, &found), name);
#else
  check_cuda(cudaGetDriverEntryPoint(name, &pointer, cudaEnableDefault, &found), name);
#endif
  if (found != cudaDriverEntryPointSuccess || pointer == nullptr) throw CudaError(cudaErrorSymbolNotFound, name);
  function = reinterpret_cast<Function>(pointer);
}

// Runtime error codes equal driver error codes.
inline void check_driver(CUresult result, const std::string& what) {
  check_cuda(static_cast<cudaError_t>(result), what.c_str());
}

}  // namespace kvservice
