// Device memory and events that processes share by handle.
//
// What a handle names may be freed by the process that made it, or go with it, at any time. Memory that is open here
// stays what it is until it is closed here. An event is another matter: one that its process has recorded and not
// reached stays so for ever when that process is killed, and so does a stream that waits for it. Hence wait only for
// events of a process that is trusted; ask the others' whether they are done.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/runtime.h"

namespace kvservice {

// Allocated to be shared: whole granules, so that nothing else is shared with it.
class IpcAllocation {
 public:
  // Throws CudaError; cudaErrorMemoryAllocation where the device has not that much left.
  IpcAllocation(int device, int64_t bytes);
  ~IpcAllocation();
  IpcAllocation(const IpcAllocation&) = delete;
  IpcAllocation& operator=(const IpcAllocation&) = delete;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // A cudaIpcMemHandle_t.
  std::string handle() const;

 private:
  int device_;
  int64_t bytes_ = 0;
  void* data_ = nullptr;
};

// The first bytes of another process's allocation.
class IpcMemory {
 public:
  // Throws CudaError where the driver does not open the handle (also one of this process:
  // cudaErrorDeviceUninitialized); ArgumentError, field raw_handle, where it is none or what it names is open already,
  // field byte_size where the allocation has not that many bytes.
  IpcMemory(int device, const std::string& handle, int64_t bytes);
  // Waits for the device: what is launched may still use it.
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
