// Device memory that can be passed to another process as a file descriptor, and memory received that way.
#pragma once

#include <cstdint>

#include "cuda/runtime.h"

namespace kvservice {

// Memory of one device, made with the virtual memory management API of the driver. Mapped for reading and writing for
// the lifetime of the object.
class DeviceMemory {
 public:
  // Throws CudaError; cudaErrorMemoryAllocation if the device has too little free memory.
  DeviceMemory(int device, int64_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return reinterpret_cast<void*>(address_); }
  int64_t bytes() const { return bytes_; }  // rounded up to the granularity
  int device() const { return device_; }
  // Returns a new descriptor of the memory, which the caller closes.
  int export_fd() const;

 private:
  int device_;
  int64_t bytes_ = 0;
  unsigned long long handle_ = 0;
  unsigned long long address_ = 0;
};

// Memory of one device that another process made and passed as a descriptor. It is mapped and stays valid for the
// lifetime of the object, even after the other process has exited.
class ImportedMemory {
 public:
  // `fd` stays the caller's. `bytes` is the total size, equal to bytes() of the DeviceMemory that made it. Throws
  // ArgumentError, field fd, if the driver cannot import it, and field num_bytes if the size differs.
  // `writable` false maps it read-only. That restricts this process by its own choice only: if one of its kernels
  // writes nevertheless, the kernel fails, and the process can no longer use the device.
  ImportedMemory(int device, int fd, int64_t bytes, bool writable);
  ~ImportedMemory();
  ImportedMemory(const ImportedMemory&) = delete;
  ImportedMemory& operator=(const ImportedMemory&) = delete;

  void* data() const { return reinterpret_cast<void*>(address_); }
  int64_t bytes() const { return bytes_; }

 private:
  int device_;
  int64_t bytes_ = 0;
  unsigned long long handle_ = 0;
  unsigned long long address_ = 0;
};

}  // namespace kvservice
