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

DeviceFacts read_facts(int device) {
  DeviceFacts facts;
  facts.major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  facts.minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  facts.num_sms = attribute(cudaDevAttrMultiProcessorCount, device);
  facts.max_shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  facts.max_shared_bytes_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  return facts;
}

}  // namespace

const DeviceFacts& current_device_facts() {
  static std::mutex mutex;
  static std::map<int, DeviceFacts> known;  // references to its entries stay valid
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  return known.emplace(device, read_facts(device)).first->second;
}

DeviceScope::DeviceScope(int device) {
  check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
}

DeviceScope::~DeviceScope() { forget_error(cudaSetDevice(previous_)); }

void wait_for_device(int device) {
  int previous = 0;
  forget_error(cudaGetDevice(&previous));
  forget_error(cudaSetDevice(device));
  forget_error(cudaDeviceSynchronize());
  forget_error(cudaSetDevice(previous));
}

}  // namespace kvservice
