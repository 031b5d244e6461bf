// Python bindings of memory, streams and events, which live until they are closed or dropped, and of stream-ordered
// memory.
#include "bindings/cuda_handles.h"

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bindings/gil.h"
#include "cuda/ipc.h"
#include "cuda/memory.h"
#include "cuda/runtime.h"
#include "errors.h"

namespace py = pybind11;

namespace kvservice {
namespace {

size_t size_of(int64_t num_bytes) {
  require(num_bytes >= 0, "num_bytes", "is negative");
  return static_cast<size_t>(num_bytes);
}

class HostRegistration {
 public:
  HostRegistration(uintptr_t address, int64_t num_bytes, bool read_only) : address_(at<>(address)) {
    const unsigned flags = cudaHostRegisterPortable | (read_only ? cudaHostRegisterReadOnly : 0U);
    check_cuda(cudaHostRegister(address_, size_of(num_bytes), flags), "cudaHostRegister");
  }
  ~HostRegistration() { clear_error(unregister()); }
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;
  void close() { check_cuda(unregister(), "cudaHostUnregister"); }

 private:
  cudaError_t unregister() {
    void* address = std::exchange(address_, nullptr);
    if (address == nullptr) return cudaSuccess;
    const WithoutGil without_gil;
    return cudaHostUnregister(address);
  }

  void* address_;
};

class Event {
 public:
  Event(int device, bool timing, bool blocking) {
    const DeviceScope scope(device);
    unsigned flags = timing ? cudaEventDefault : cudaEventDisableTiming;
    if (blocking) flags |= cudaEventBlockingSync;
    check_cuda(cudaEventCreateWithFlags(&event_, flags), "cudaEventCreate");
  }
  ~Event() { clear_error(cudaEventDestroy(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  // Makes work launched on the stream after this call wait for the last recorded work.
  void wait(uintptr_t stream) const {
    check_cuda(cudaStreamWaitEvent(stream_at(stream), event_, 0), "cudaStreamWaitEvent");
  }
  void record(uintptr_t stream) const { check_cuda(cudaEventRecord(event_, stream_at(stream)), "cudaEventRecord"); }
  void synchronize() const { check_cuda(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  bool done() const {
    const cudaError_t code = cudaEventQuery(event_);
    if (code == cudaErrorNotReady) {
      clear_error(code);
      return false;
    }
    check_cuda(code, "cudaEventQuery");
    return true;
  }
  float elapsed_ms(const Event& start) const {
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, start.event_, event_), "cudaEventElapsedTime");
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// A mark stands for the work that was on a stream when it was made. Its event is used again for another mark, since
// making one takes longer than recording it: who waits for the old work still does.
class StreamMark {
 public:
  StreamMark(int device, uintptr_t stream) : device_(device) {
    std::vector<std::unique_ptr<Event>>& unused = unused_events()[device];
    if (unused.empty()) {
      event_ = std::make_unique<Event>(device, false, true);
    } else {
      event_ = std::move(unused.back());
      unused.pop_back();
    }
    event_->record(stream);
  }
  ~StreamMark() { unused_events()[device_].push_back(std::move(event_)); }
  StreamMark(const StreamMark&) = delete;
  StreamMark& operator=(const StreamMark&) = delete;
  void make_wait(uintptr_t stream) const { event_->wait(stream); }
  void synchronize() const { event_->synchronize(); }

 private:
  // By the device. The interpreter lock is held where this is used; it is never released.
  static std::map<int, std::vector<std::unique_ptr<Event>>>& unused_events() {
    static auto* const events = new std::map<int, std::vector<std::unique_ptr<Event>>>();
    return *events;
  }

  int device_;
  std::unique_ptr<Event> event_;
};

class Stream {
 public:
  Stream(int device, bool high_priority) {
    const DeviceScope scope(device);
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, high_priority ? greatest : least),
               "cudaStreamCreate");
  }
  ~Stream() { clear_error(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  uintptr_t handle() const { return reinterpret_cast<uintptr_t>(stream_); }
  void synchronize() const { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }
  bool idle() const {
    const cudaError_t code = cudaStreamQuery(stream_);
    clear_error(code);
    if (code != cudaErrorNotReady) check_cuda(code, "cudaStreamQuery");
    return code == cudaSuccess;
  }
  void wait(const Event& event) const { event.wait(handle()); }

 private:
  cudaStream_t stream_ = nullptr;
};

// --- stream-ordered memory

// Freed memory stays in the process's memory pool. Otherwise every device synchronization would return it to the
// system, to be allocated again.
void keep_freed_memory() {
  static std::mutex mutex;
  static std::set<int> done;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  if (done.count(device) != 0) return;
  cudaMemPool_t pool = nullptr;
  check_cuda(cudaDeviceGetDefaultMemPool(&pool, device), "cudaDeviceGetDefaultMemPool");
  uint64_t everything = UINT64_MAX;
  check_cuda(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &everything), "cudaMemPoolSetAttribute");
  done.insert(device);
}

uintptr_t allocate_async(int64_t num_bytes, uintptr_t stream) {
  const size_t size = size_of(num_bytes);
  keep_freed_memory();
  void* pointer = nullptr;
  const std::string what = "cudaMallocAsync of " + std::to_string(num_bytes) + " bytes";
  check_cuda(cudaMallocAsync(&pointer, size, stream_at(stream)), what.c_str());
  return reinterpret_cast<uintptr_t>(pointer);
}

void free_async(uintptr_t pointer, uintptr_t stream) {
  check_cuda(cudaFreeAsync(at<>(pointer), stream_at(stream)), "cudaFreeAsync");
}

void copy_async(uintptr_t dst, uintptr_t src, int64_t num_bytes, uintptr_t stream) {
  check_cuda(cudaMemcpyAsync(at<>(dst), at<>(src), size_of(num_bytes), cudaMemcpyDefault, stream_at(stream)),
             "cudaMemcpyAsync");
}

void fill_async(uintptr_t dst, int byte, int64_t num_bytes, uintptr_t stream) {
  check_cuda(cudaMemsetAsync(at<>(dst), byte, size_of(num_bytes), stream_at(stream)), "cudaMemsetAsync");
}

void define_memory(py::module_& m) {
  define_owned_memory<DeviceMemory>(m, "DeviceMemory")
      .def(py::init<int, int64_t>(), py::arg("device"), py::arg("num_bytes"), Unlocked())
      .def("export_fd", [](const Owned<DeviceMemory>& memory) { return memory.get().export_fd(); });
  define_owned_memory<ImportedMemory>(m, "ImportedMemory")
      .def(py::init<int, int, int64_t, bool>(), py::arg("device"), py::arg("fd"), py::arg("num_bytes"),
           py::arg("writable"), Unlocked());
  define_owned_memory<IpcAllocation>(m, "IpcAllocation")
      .def(py::init<int, int64_t>(), py::arg("device"), py::arg("num_bytes"), Unlocked())
      .def_property_readonly("handle",
                             [](const Owned<IpcAllocation>& memory) { return py::bytes(memory.get().handle()); });
  define_owned_memory<IpcMemory>(m, "IpcMemory")
      .def(py::init([](int device, const py::bytes& raw_handle, int64_t byte_size) {
             const std::string handle = raw_handle;
             const WithoutGil without_gil;
             return std::make_unique<Owned<IpcMemory>>(device, handle, byte_size);
           }),
           py::arg("device"), py::arg("raw_handle"), py::arg("byte_size"));
  py::class_<HostRegistration>(m, "HostRegistration")
      .def(py::init<uintptr_t, int64_t, bool>(), py::arg("address"), py::arg("num_bytes"), py::arg("read_only") = false,
           Unlocked())
      .def("close", &HostRegistration::close);
  m.def("allocate_async", &allocate_async, py::arg("num_bytes"), py::arg("stream"), Unlocked());
  m.def("free_async", &free_async, py::arg("pointer"), py::arg("stream"), Unlocked());
  m.def("copy_async", &copy_async, py::arg("dst"), py::arg("src"), py::arg("num_bytes"), py::arg("stream"), Unlocked());
  m.def("fill_async", &fill_async, py::arg("dst"), py::arg("byte"), py::arg("num_bytes"), py::arg("stream"),
        Unlocked());
}

void define_streams(py::module_& m) {
  py::class_<Event>(m, "Event")
      .def(py::init<int, bool, bool>(), py::arg("device"), py::arg("timing") = false, py::arg("blocking") = false,
           Unlocked())
      .def("record", &Event::record, py::arg("stream"), Unlocked())
      .def("synchronize", &Event::synchronize, Unlocked())
      .def("done", &Event::done)
      .def("elapsed_ms", &Event::elapsed_ms, py::arg("start"));
  // Without Unlocked: see _cuda.pyi.
  py::class_<StreamMark>(m, "StreamMark")
      .def(py::init<int, uintptr_t>(), py::arg("device"), py::arg("stream"))
      .def("make_wait", &StreamMark::make_wait, py::arg("stream"))
      .def("synchronize", &StreamMark::synchronize, Unlocked());
  m.def(
      "synchronize_stream",
      [](uintptr_t stream) { check_cuda(cudaStreamSynchronize(stream_at(stream)), "cudaStreamSynchronize"); },
      py::arg("stream"), Unlocked());
  py::class_<Stream>(m, "Stream")
      .def(py::init<int, bool>(), py::arg("device"), py::arg("high_priority") = false, Unlocked())
      .def_property_readonly("handle", &Stream::handle)
      .def("synchronize", &Stream::synchronize, Unlocked())
      .def("idle", &Stream::idle)
      .def("wait", &Stream::wait, py::arg("event"), Unlocked());
}

}  // namespace

void define_objects(py::module_& m) {
  define_memory(m);
  define_streams(m);
}

}  // namespace kvservice
