#include "cuda/runtime.h"

#include <map>
#include <mutex>

namespace kvservice {
namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

DeviceProperties read_properties(int device) {
  DeviceProperties properties;
  properties.major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  properties.minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  properties.num_sms = attribute(cudaDevAttrMultiProcessorCount, device);
  properties.max_shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  properties.max_shared_bytes_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  return properties;
}

}  // namespace

const DeviceProperties& current_device_properties() {
  static std::mutex mutex;
  static std::map<int, DeviceProperties> known;  // references to its entries stay valid
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  return known.emplace(device, read_properties(device)).first->second;
}

DeviceScope::DeviceScope(int device) {
  check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
}

DeviceScope::~DeviceScope() { clear_error(cudaSetDevice(previous_)); }

void synchronize_device(int device) {
  int previous = 0;
  clear_error(cudaGetDevice(&previous));
  clear_error(cudaSetDevice(device));
  clear_error(cudaDeviceSynchronize());
  clear_error(cudaSetDevice(previous));
}

}  // namespace kvservice
