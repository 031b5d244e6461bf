// Device memory that processes share by handle.
//
// The process that made the memory behind a handle may free it or exit at any time. Memory that is open here stays
// valid until it is closed here. Events are not shared: if a process is killed before an event that it recorded
// completes, the event never completes, and neither does a stream that waits for it.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/runtime.h"

namespace kvservice {

// Memory allocated for sharing: whole granules, so that it shares a granule with nothing else.
class IpcAllocation {
 public:
  // Throws CudaError; cudaErrorMemoryAllocation if the device has too little free memory.
  IpcAllocation(int device, int64_t bytes);
  ~IpcAllocation();
  IpcAllocation(const IpcAllocation&) = delete;
  IpcAllocation& operator=(const IpcAllocation&) = delete;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Returns a cudaIpcMemHandle_t.
  std::string handle() const;

 private:
  int device_;
  int64_t bytes_ = 0;
  void* data_ = nullptr;
};

// The first bytes of an allocation of another process.
class IpcMemory {
 public:
  // Throws CudaError if the driver does not open the handle (including a handle of this process:
  // cudaErrorDeviceUninitialized); ArgumentError, field raw_handle, if the handle is invalid or its memory is open
  // already, and field byte_size if the allocation is smaller.
  IpcMemory(int device, const std::string& handle, int64_t bytes);
  // Waits for the device, because launched work may still use the memory.
  ~IpcMemory();
  IpcMemory(const IpcMemory&) = delete;
  IpcMemory& operator=(const IpcMemory&) = delete;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  int device_;
  int64_t bytes_ = 0;
  void* data_ = nullptr;
};

}  // namespace kvservice
