// What all CUDA code shares: errors, the facts of a device, launch arguments.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvservice {

// A CUDA call failed. After most of them the process can use its device no more.
class CudaError : public std::runtime_error {
 public:
  CudaError(cudaError_t code, const std::string& what)
      : std::runtime_error(what + ": " + cudaGetErrorName(code) + ": " + cudaGetErrorString(code)), code_(code) {}
  cudaError_t code() const { return code_; }

 private:
  cudaError_t code_;
};

inline void check_cuda(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // or the next launch that is checked would be blamed for it
  throw CudaError(code, what);
}

// Where nobody can be told, as in destructors; and the next launch that is checked is not blamed for it either.
inline void forget_error(cudaError_t code) {
  if (code != cudaSuccess) cudaGetLastError();
}

inline void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

// Facts of a device, read once. Throws CudaError.
struct DeviceFacts {
  int major = 0;
  int minor = 0;
  int num_multiprocessors = 0;
  int max_shared_bytes_per_block = 0;  // what a kernel may ask for
  int max_shared_bytes_per_multiprocessor = 0;
};

const DeviceFacts& current_device_facts();

// Makes a device the calling thread's for as long as it lives.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
};

// All of its streams. Where nobody can be told of an error, as in destructors.
void wait_for_device(int device);

}  // namespace kvservice
