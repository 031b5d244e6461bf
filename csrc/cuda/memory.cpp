#include "cuda/memory.h"

#include <string>

#include "cuda/driver.h"
#include "errors.h"

namespace kvservice {
namespace {

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
  decltype(&cuMemImportFromShareableHandle) import_handle;

  Driver() {
    find_driver_function("cuMemGetAllocationGranularity", granularity);
    find_driver_function("cuMemCreate", create);
    find_driver_function("cuMemRelease", release);
    find_driver_function("cuMemAddressReserve", reserve);
    find_driver_function("cuMemAddressFree", free_address);
    find_driver_function("cuMemMap", map);
    find_driver_function("cuMemUnmap", unmap);
    find_driver_function("cuMemSetAccess", set_access);
    find_driver_function("cuMemExportToShareableHandle", export_handle);
    find_driver_function("cuMemImportFromShareableHandle", import_handle);
  }
};

const Driver& driver() {
  static const Driver driver;
  return driver;
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
  return (static_cast<size_t>(bytes) + step - 1) / step * step;  // unsigned: no size from Python overflows
}

std::string allocation_text(size_t bytes) {
  size_t free = 0, total = 0;
  clear_error(cudaMemGetInfo(&free, &total));
  return "cuMemCreate of " + std::to_string(bytes) + " bytes, where " + std::to_string(free) + " of " +
         std::to_string(total) + " are free";
}

// Physical memory and its address range. Frees them on destruction unless `keep` is set.
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

  CUresult map() {
    CUresult result = driver().reserve(&address, bytes, 0, 0, 0);
    if (result == CUDA_SUCCESS) result = driver().map(address, bytes, 0, handle, 0);
    mapped = result == CUDA_SUCCESS;
    return result;
  }

  void allow(int device, CUmemAccess_flags flags) const {
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = flags;
    check_driver(driver().set_access(address, bytes, &access, 1), "cuMemSetAccess");
  }
};

void release_memory(int device, int64_t bytes, CUmemGenericAllocationHandle handle, CUdeviceptr address) {
  synchronize_device(device);  // a kernel may still use the memory
  Mapping mapping;
  mapping.bytes = static_cast<size_t>(bytes);
  mapping.handle = handle;
  mapping.address = address;
  mapping.mapped = true;
}

}  // namespace

DeviceMemory::DeviceMemory(int device, int64_t bytes) : device_(device) {
  require(bytes > 0, "num_bytes", "is not positive");
  const DeviceScope scope(device);
  const CUmemAllocationProp prop = properties(device);
  Mapping mapping;
  mapping.bytes = round_up(bytes, prop);
  check_driver(driver().create(&mapping.handle, mapping.bytes, &prop, 0), allocation_text(mapping.bytes));
  check_driver(mapping.map(), "cuMemAddressReserve or cuMemMap");
  mapping.allow(device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  mapping.keep = true;
  bytes_ = static_cast<int64_t>(mapping.bytes);
  handle_ = mapping.handle;
  address_ = mapping.address;
}

DeviceMemory::~DeviceMemory() { release_memory(device_, bytes_, handle_, address_); }

int DeviceMemory::export_fd() const {
  int fd = -1;
  check_driver(driver().export_handle(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
               "cuMemExportToShareableHandle");
  return fd;
}

ImportedMemory::ImportedMemory(int device, int fd, int64_t bytes, bool writable) : device_(device), bytes_(bytes) {
  require(bytes > 0, "num_bytes", "is not positive");
  require(fd >= 0, "fd", "is negative");
  const DeviceScope scope(device);
  Mapping mapping;
  mapping.bytes = static_cast<size_t>(bytes);
  void* const descriptor = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  const CUresult imported =
      driver().import_handle(&mapping.handle, descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  require(imported == CUDA_SUCCESS, "fd", "is not CUDA device memory that can be imported");
  require(mapping.map() == CUDA_SUCCESS, "num_bytes", "is not the size of the memory");
  mapping.allow(device, writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ);
  mapping.keep = true;
  handle_ = mapping.handle;
  address_ = mapping.address;
}

ImportedMemory::~ImportedMemory() { release_memory(device_, bytes_, handle_, address_); }

}  // namespace kvservice
