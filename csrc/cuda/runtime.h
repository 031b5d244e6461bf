// Shared by all CUDA code: errors, device properties, device selection.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvservice {

// A CUDA call failed. After most errors the process can no longer use its device.
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
  cudaGetLastError();  // clears the error, or the next check_launch() would report it
  throw CudaError(code, what);
}

// For places that cannot report an error, such as destructors. Clears the error, so that the next check_launch() does
// not report it.
inline void clear_error(cudaError_t code) {
  if (code != cudaSuccess) cudaGetLastError();
}

inline void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

// Properties of a device, read once. Throws CudaError.
struct DeviceProperties {
  int major = 0;
  int minor = 0;
  int num_sms = 0;
  int max_shared_bytes_per_block = 0;  // the most that a kernel may request
  int max_shared_bytes_per_sm = 0;
};

const DeviceProperties& current_device_properties();

// Whether the code of a kernel on the current device was compiled for Hopper or later, and not for an older device and
// translated by the driver. Throws CudaError.
bool has_hopper_code(const void* kernel);

// Returns how many clusters of a kernel fit on the current device at once, none if the kernel has no code for clusters
// or the device has none of this size. Throws CudaError.
int max_active_clusters(const void* kernel, int threads, int shared_bytes, int cluster);

// Selects a device for the calling thread, for the lifetime of the object.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
};

// Waits for all streams of the device. For places that cannot report an error, such as destructors.
void synchronize_device(int device);

}  // namespace kvservice
