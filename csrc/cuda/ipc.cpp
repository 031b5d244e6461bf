#include "cuda/ipc.h"

#include <cstring>
#include <mutex>
#include <set>

#include "cuda/driver.h"
#include "errors.h"

namespace kvservice {
namespace {

constexpr int64_t kGranuleBytes = 2 << 20;
constexpr int64_t kMostBytes = int64_t{1} << 60;  // more than any device has, and small enough to be rounded up

struct Range {
  void* begin = nullptr;
  size_t bytes = 0;
};

Range allocation_of(void* data) {
  static decltype(&cuMemGetAddressRange) const address_range = [] {
    decltype(&cuMemGetAddressRange) function = nullptr;
    find_driver_function("cuMemGetAddressRange", function);
    return function;
  }();
  CUdeviceptr begin = 0;
  Range range;
  check_driver(address_range(&begin, &range.bytes, reinterpret_cast<CUdeviceptr>(data)), "cuMemGetAddressRange");
  range.begin = reinterpret_cast<void*>(begin);
  return range;
}

size_t total_bytes() {
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return total;
}

// The addresses that this process has open. The driver opens the same handle any number of times, at the same address,
// and many handles name one allocation, because some of their bytes do not matter.
class OpenAddresses {
 public:
  bool add(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return open_.insert(data).second;
  }
  void remove(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_.erase(data);
  }

 private:
  std::mutex mutex_;
  std::set<void*> open_;
};

OpenAddresses& open_addresses() {
  static OpenAddresses addresses;
  return addresses;
}

// Closes the handle on destruction unless `keep` is set.
struct Opening {
  void* data = nullptr;
  bool listed = false;
  bool keep = false;

  explicit Opening(const cudaIpcMemHandle_t& handle) {
    check_cuda(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  }
  ~Opening() {
    if (keep) return;
    if (listed) open_addresses().remove(data);
    clear_error(cudaIpcCloseMemHandle(data));
  }
};

}  // namespace

IpcAllocation::IpcAllocation(int device, int64_t bytes) : device_(device) {
  require(bytes > 0 && bytes <= kMostBytes, "num_bytes", "is not in [1, 2^60]");
  const DeviceScope scope(device);
  bytes_ = (bytes + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
  const std::string what = "cudaMalloc of " + std::to_string(bytes_) + " bytes";
  check_cuda(cudaMalloc(&data_, static_cast<size_t>(bytes_)), what.c_str());
}

IpcAllocation::~IpcAllocation() {
  synchronize_device(device_);
  clear_error(cudaFree(data_));
}

std::string IpcAllocation::handle() const {
  cudaIpcMemHandle_t handle;
  check_cuda(cudaIpcGetMemHandle(&handle, data_), "cudaIpcGetMemHandle");
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

IpcMemory::IpcMemory(int device, const std::string& handle, int64_t bytes) : device_(device), bytes_(bytes) {
  cudaIpcMemHandle_t raw;
  require(handle.size() == sizeof(raw), "raw_handle", "is not 64 bytes long");
  require(bytes > 0, "byte_size", "is not positive");
  std::memcpy(&raw, handle.data(), sizeof(raw));
  const DeviceScope scope(device);
  Opening opening(raw);
  const Range range = allocation_of(opening.data);
  require(opening.data == range.begin, "raw_handle", "does not name the start of an allocation");
  // The driver trusts the size in a forged handle, and a kernel that accesses such memory makes the device unusable for
  // this process.
  require(range.bytes <= total_bytes(), "raw_handle", "names more memory than the device has");
  opening.listed = open_addresses().add(opening.data);
  require(opening.listed, "raw_handle", "names memory that is already open");
  require(static_cast<size_t>(bytes) <= range.bytes, "byte_size", "is more than the allocation has");
  opening.keep = true;
  data_ = opening.data;
}

IpcMemory::~IpcMemory() {
  synchronize_device(device_);
  open_addresses().remove(data_);  // before the close: another thread may get the address at once
  clear_error(cudaIpcCloseMemHandle(data_));
}

}  // namespace kvservice
