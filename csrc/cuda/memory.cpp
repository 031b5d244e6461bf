#include "cuda/memory.h"

#include <cuda.h>  // types only: nothing of the driver is linked

#include <string>

#include "errors.h"

namespace kvservice {
namespace {

template <class Function>
void find(const char* name, Function& function) {
  constexpr unsigned kSinceVersion = 10020;  // the first with all of them
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

struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free_address;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemExportToShareableHandle) export_handle;

  Driver() {
    find("cuMemGetAllocationGranularity", granularity);
    find("cuMemCreate", create);
    find("cuMemRelease", release);
    find("cuMemAddressReserve", reserve);
    find("cuMemAddressFree", free_address);
    find("cuMemMap", map);
    find("cuMemUnmap", unmap);
    find("cuMemSetAccess", set_access);
    find("cuMemExportToShareableHandle", export_handle);
  }
};

const Driver& driver() {
  static const Driver driver;
  return driver;
}

// The runtime's codes are the driver's.
void check_driver(CUresult result, const std::string& what) {
  check_cuda(static_cast<cudaError_t>(result), what.c_str());
}

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return prop;
}

size_t round_up(int64_t bytes, const CUmemAllocationProp& prop) {
  size_t step = 0;
  check_driver(driver().granularity(&step, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
               "cuMemGetAllocationGranularity");
  return (static_cast<size_t>(bytes) + step - 1) / step * step;  // unsigned: no size from Python overflows it
}

std::string wanted_text(size_t bytes) {
  size_t free = 0, total = 0;
  forget_error(cudaMemGetInfo(&free, &total));
  return "cuMemCreate of " + std::to_string(bytes) + " bytes, where " + std::to_string(free) + " of " +
         std::to_string(total) + " are free";
}

// Physical memory and the addresses where it is seen. Gives back what it has unless it is told to keep it.
struct Mapping {
  size_t bytes = 0;
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr address = 0;
  bool mapped = false;
  bool keep = false;

  ~Mapping() {
    if (keep) return;
    if (mapped) driver().unmap(address, bytes);
    if (address != 0) driver().free_address(address, bytes);
    if (handle != 0) driver().release(handle);
  }
};

}  // namespace

DeviceMemory::DeviceMemory(int device, int64_t bytes) : device_(device) {
  require(bytes > 0, "num_bytes", "is not positive");
  const DeviceScope scope(device);
  const CUmemAllocationProp prop = properties(device);
  Mapping mapping;
  mapping.bytes = round_up(bytes, prop);
  check_driver(driver().create(&mapping.handle, mapping.bytes, &prop, 0), wanted_text(mapping.bytes));
  check_driver(driver().reserve(&mapping.address, mapping.bytes, 0, 0, 0), "cuMemAddressReserve");
  check_driver(driver().map(mapping.address, mapping.bytes, 0, mapping.handle, 0), "cuMemMap");
  mapping.mapped = true;
  CUmemAccessDesc access = {};
  access.location = prop.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check_driver(driver().set_access(mapping.address, mapping.bytes, &access, 1), "cuMemSetAccess");
  mapping.keep = true;
  bytes_ = static_cast<int64_t>(mapping.bytes);
  handle_ = mapping.handle;
  address_ = mapping.address;
}

DeviceMemory::~DeviceMemory() {
  int previous = 0;
  forget_error(cudaGetDevice(&previous));
  forget_error(cudaSetDevice(device_));
  forget_error(cudaDeviceSynchronize());  // memory must not go while a kernel uses it
  forget_error(cudaSetDevice(previous));
  Mapping mapping;
  mapping.bytes = static_cast<size_t>(bytes_);
  mapping.handle = handle_;
  mapping.address = address_;
  mapping.mapped = true;
}

int DeviceMemory::export_fd() const {
  int fd = -1;
  check_driver(driver().export_handle(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
               "cuMemExportToShareableHandle");
  return fd;
}

}  // namespace kvservice
