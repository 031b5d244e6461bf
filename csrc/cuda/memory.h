// Device memory that can be handed to another process as a file descriptor, and such memory of another process.
#pragma once

#include <cstdint>

#include "cuda/runtime.h"

namespace kvservice {

// Memory of one device, made with the virtual-memory API: the driver's entry points are looked up at run time, so that
// nothing links the driver. Mapped for reading and writing for as long as the object lives.
class DeviceMemory {
 public:
  // Throws CudaError; cudaErrorMemoryAllocation where the device has not that much left.
  DeviceMemory(int device, int64_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return reinterpret_cast<void*>(address_); }
  int64_t bytes() const { return bytes_; }  // rounded up to the granularity
  int device() const { return device_; }
  // A new descriptor of the memory, the caller's to close.
  int export_fd() const;

 private:
  int device_;
  int64_t bytes_ = 0;
  unsigned long long handle_ = 0;
  unsigned long long address_ = 0;
};

// Memory of one device that another process made and handed over as a descriptor: mapped for as long as the object
// lives, and there for as long, also when the other process is gone.
class ImportedMemory {
 public:
  // `fd` stays the caller's. `bytes` is the size of all of it, as its maker's DeviceMemory has it. Throws
  // ArgumentError, field fd, where the driver takes it for no memory, field num_bytes where it has another size.
  // Read-only is how this process sees it, not how it must: a kernel of this process that writes nevertheless fails,
  // and the process can use the device no more.
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
