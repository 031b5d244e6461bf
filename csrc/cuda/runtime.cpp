#include "cuda/runtime.h"

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

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

bool has_hopper_code(const void* kernel) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, bool> known;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find({device, kernel});
  if (found != known.end()) return found->second;
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  return known[{device, kernel}] = attributes.ptxVersion >= 90;
}

int max_active_clusters(const void* kernel, int threads, int shared_bytes, int cluster) {
  if (!has_hopper_code(kernel)) return 0;
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, int, int>, int> known;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find({device, kernel, shared_bytes, cluster});
  if (found != known.end()) return found->second;
  cudaLaunchAttribute dimension;
  dimension.id = cudaLaunchAttributeClusterDimension;
  dimension.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dimension.val.clusterDim.x;
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.attrs = &dimension;
  config.numAttrs = 1;
  int count = 0;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, kernel, &config);
  clear_error(error);  // the device has no clusters of this size
  if (error != cudaSuccess) count = 0;
  return known[{device, kernel, shared_bytes, cluster}] = count;
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
