// Python bindings of lanes. The objects keep the memory that they use alive, and wait without the GIL.
#include "bindings/lane.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/gil.h"
#include "bindings/lane_in_place.h"
#include "lane/client.h"
#include "lane/executor.h"
#include "lane/finished_steps.h"
#include "lane/server.h"
#include "lane/session.h"

namespace kvservice {
namespace {

using std::chrono::nanoseconds;

[[noreturn]] void raise(const char* type_name, const std::string& message) {
  const py::object type = py::module_::import("kvservice.errors").attr(type_name);
  PyErr_SetObject(type.ptr(), type(message).ptr());
  throw py::error_already_set();
}

template <class T>
T as_whole(const py::handle& object, const char* field) {
  const int64_t value = as_int(object, field);
  if (value < std::numeric_limits<T>::min() || value > static_cast<int64_t>(std::numeric_limits<T>::max())) {
    throw ArgumentError(field, std::to_string(value) + " is out of range");
  }
  return static_cast<T>(value);
}

// Returns a step's array without a copy, because the lane's thread reads it in place.
py::array in_place(const py::object& object, const char* field, int type_num, const char* type_name, int num_dims) {
  py::array array = as_array(object, field, type_num, type_name);
  require(array.ndim() == num_dims, field, "has a wrong number of dimensions");
  require(is_plain(array), field, "is not C-contiguous");
  return array;
}

// Parses (slot_mapping, query_lens, context_lens, block_tables, num_common_blocks, max_query_len). The first four are
// addresses.
LaneTables as_device_tables(const py::object& object) {
  constexpr const char* kField = "device_tables";
  require(PyTuple_Check(object.ptr()) && PyTuple_GET_SIZE(object.ptr()) == 6, kField, "is not a tuple of six numbers");
  const auto number = [&](Py_ssize_t i) { return as_int(PyTuple_GET_ITEM(object.ptr(), i), kField); };
  LaneTables tables;
  tables.slot_mapping = reinterpret_cast<const int64_t*>(number(0));
  tables.query_lens = reinterpret_cast<const int32_t*>(number(1));
  tables.context_lens = reinterpret_cast<const int32_t*>(number(2));
  tables.block_tables = reinterpret_cast<const int32_t*>(number(3));
  tables.num_common_blocks = number(4);
  tables.max_query_len = number(5);
  return tables;
}

// The memory of a writable, contiguous buffer.
class Memory {
 public:
  explicit Memory(const py::object& object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_CONTIG) == 0) return;
    PyErr_Clear();
    throw ArgumentError("memory", "is not a writable, contiguous buffer");
  }
  ~Memory() { release(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return view_.buf; }
  int64_t num_bytes() const { return view_.len; }
  void release() { PyBuffer_Release(&view_); }  // a second call has no effect

 private:
  Py_buffer view_ = {};
};

// A session, and the Python objects whose memory its steps use.
class PySession {
 public:
  PySession(const py::object& num_layers, FinishedSteps& finished, const py::object& number, const py::object& kept_ids)
      : kept_ids_(kept_ids.is_none() ? py::array() : in_place(kept_ids, "kept_ids", int64_num(), "int64", 1)),
        session_(as_int(num_layers, "num_layers"), finished, as_int(number, "number"),
                 kept_ids.is_none() ? nullptr : static_cast<int64_t*>(kept_ids_.mutable_data()), kept_ids_.size()) {}

  LaneSession& get() { return session_; }

  void publish(const py::object& step_id, const py::object& written, const py::object& slot_mapping,
               const py::object& query_lens, const py::object& context_lens, const py::object& block_tables,
               const py::object& device_tables) {
    LaneStep step;
    step.id = as_int(step_id, "step_id");
    require(PyByteArray_Check(written.ptr()) && PyByteArray_GET_SIZE(written.ptr()) == session_.num_layers(), "written",
            "is not a bytearray with one byte per layer");
    const py::array slots = in_place(slot_mapping, "slot_mapping", int64_num(), "int64", 1);
    const py::array lens = in_place(query_lens, "query_lens", kInt32, "int32", 1);
    const py::array contexts = in_place(context_lens, "context_lens", kInt32, "int32", 1);
    const py::array tables = in_place(block_tables, "block_tables", kInt32, "int32", 2);
    require(contexts.shape(0) == lens.shape(0), "context_lens", "does not have the length of query_lens");
    require(tables.shape(0) == lens.shape(0), "block_tables", "does not have the length of query_lens");
    step.num_tokens = slots.shape(0);
    step.num_seqs = lens.shape(0);
    step.max_blocks = tables.shape(1);
    step.host.slot_mapping = static_cast<const int64_t*>(slots.data());
    step.host.query_lens = static_cast<const int32_t*>(lens.data());
    step.host.context_lens = static_cast<const int32_t*>(contexts.data());
    step.host.block_tables = static_cast<const int32_t*>(tables.data());
    if (!device_tables.is_none()) step.device = as_device_tables(device_tables);
    auto hold = std::make_unique<Memory>(written);  // also keeps the bytearray from being resized
    step.written = static_cast<uint8_t*>(hold->data());
    session_.publish(step);
    held_[step.id] = {std::move(hold), py::make_tuple(slots, lens, contexts, tables)};
  }

  void retire(const py::object& step_id) {
    const int64_t id = as_int(step_id, "step_id");
    {
      const WithoutGil without_gil;
      session_.retire(id);
    }
    held_.erase(id);
  }

  void remove_region(const py::object& number) {
    const auto checked = as_whole<uint32_t>(number, "number");
    const WithoutGil without_gil;
    session_.remove_region(checked);
  }

 private:
  py::array kept_ids_;
  LaneSession session_;
  std::unordered_map<int64_t, std::pair<std::unique_ptr<Memory>, py::tuple>> held_;
};

std::vector<std::pair<int64_t, int64_t>> take_finished(FinishedSteps& self) {
  std::vector<std::pair<int64_t, int64_t>> taken;
  for (const FinishedStep& finished : self.take()) taken.emplace_back(finished.session, finished.step_id);
  return taken;
}

LaneMemoryKind memory_kind(const std::string& name) {
  if (name == "host") return LaneMemoryKind::kHost;
  if (name == "page_locked") return LaneMemoryKind::kPinnedHost;
  require(name == "device", "kind", "is not host, page_locked or device");
  return LaneMemoryKind::kDevice;
}

uint32_t add_region(PySession& self, const py::object& address, const py::object& num_bytes, const std::string& kind) {
  return self.get().add_region(reinterpret_cast<char*>(as_int(address, "address")), as_int(num_bytes, "num_bytes"),
                               memory_kind(kind));
}

// Called from the lane's thread. Drops the callable after the call.
class FaultCall {
 public:
  explicit FaultCall(py::function function) : function_(new PyObject*(function.release().ptr()), &drop) {}

  void operator()(const std::string& text) const {
    wait_if_interpreter_ends([&] {
      const PyGILState_STATE state = PyGILState_Ensure();
      PyObject* const result = PyObject_CallFunction(*function_, "s", text.c_str());
      if (result == nullptr) PyErr_WriteUnraisable(*function_);
      Py_XDECREF(result);
      Py_CLEAR(*function_);
      PyGILState_Release(state);
    });
  }

 private:
  static void drop(PyObject** function) {
    if (*function != nullptr) {  // never called: whoever drops the server holds the lock
      Py_DECREF(*function);
    }
    delete function;
  }

  std::shared_ptr<PyObject*> function_;
};

class PyServer {
 public:
  PyServer(const py::object& memory, PySession& session, LaneExecutor& executor, const py::object& spin_us,
           py::function on_fault)
      : memory_(memory),
        server_(memory_.data(), memory_.num_bytes(), session.get(), executor, as_float(spin_us, "spin_us"),
                FaultCall(std::move(on_fault))) {}

  ~PyServer() { close(); }

  void close() {
    {
      const WithoutGil without_gil;
      server_.close();
    }
    memory_.release();
  }

  bool closed() const { return server_.closed(); }

  std::tuple<int64_t, int64_t, std::vector<int64_t>, double> stats() const {
    const LaneStats& stats = server_.stats();
    return {stats.calls(), stats.errors(), stats.buckets(), stats.seconds()};
  }

 private:
  Memory memory_;
  LaneServer server_;
};

LanePlace as_place(const py::object& object, const char* field) {
  if (object.is_none()) return {kNoRegion, 0, 0};
  require(PyTuple_Check(object.ptr()) && PyTuple_GET_SIZE(object.ptr()) == 2, field, "is not a tuple (region, offset)");
  const int64_t offset = as_int(PyTuple_GET_ITEM(object.ptr(), 1), field);
  require(offset >= 0, field, "has a negative offset");
  return {as_whole<uint32_t>(PyTuple_GET_ITEM(object.ptr(), 0), field), 0, static_cast<uint64_t>(offset)};
}

class PyClient {
 public:
  PyClient(const py::object& memory, const py::object& spin_us)
      : memory_(memory), client_(memory_.data(), memory_.num_bytes(), as_float(spin_us, "spin_us")) {}

  uint64_t submit(const py::object& step_id, const py::object& layer, bool decode, const py::object& num_heads,
                  const py::object& query, const py::object& key, const py::object& value, const py::object& output,
                  const py::object& lse, const py::object& scale, const py::object& sliding_window,
                  const py::object& logits_soft_cap, const py::object& alibi_slopes, const py::object& block_sparse) {
    LaneEntry entry = {};
    entry.step_id = as_int(step_id, "step_id");
    entry.layer = as_whole<int32_t>(layer, "layer");
    entry.flags = (decode ? kLaneDecode : 0U) | (lse.is_none() ? 0U : kLaneReturnLse);
    entry.num_heads = as_whole<int32_t>(num_heads, "num_heads");
    entry.query = as_place(query, "query");
    entry.key = as_place(key, "key");
    entry.value = as_place(value, "value");
    entry.output = as_place(output, "output_place");
    entry.lse = as_place(lse, "lse_place");
    entry.scale = as_float(scale, "options.scale");
    entry.sliding_window = as_whole<int32_t>(sliding_window, "options.sliding_window");
    entry.logits_soft_cap = as_float(logits_soft_cap, "options.logits_soft_cap");
    entry.alibi_slopes = as_place(alibi_slopes, "options.alibi_slopes");
    if (!block_sparse.is_none()) set_block_sparse(entry, block_sparse);
    return send(entry);
  }

  void set_places(const py::iterable& regions, int64_t num_kv_heads, int64_t head_size, const py::object& dtype) {
    in_place_.set(regions, num_kv_heads, head_size, dtype);
  }

  // Returns the number of the call, or None if the call does not qualify; then nothing has been sent.
  py::object submit_in_place(const py::object& step_id, int64_t num_tokens, const py::object& layer, bool decode,
                             const py::object& query, const py::object& key, const py::object& value,
                             const py::object& out) {
    std::optional<LaneEntry> entry = in_place_.entry(num_tokens, decode, query, key, value, out);
    if (!entry) return py::none();
    entry->step_id = as_int(step_id, "step_id");
    entry->layer = as_whole<int32_t>(layer, "layer");
    return py::int_(send(*entry));
  }

  // Returns (reason, field, message), or None after the timeout.
  py::object wait(const py::object& number, const py::object& timeout_s) {
    const int64_t checked = as_int(number, "number");
    require(checked >= 0, "number", "was not submitted");
    const double seconds = PyFloat_AsDouble(timeout_s.ptr());
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    require(seconds >= 0.0, "timeout_s", "is negative");
    // The timeout is capped at one year, which fits into nanoseconds.
    const nanoseconds time(static_cast<int64_t>(std::min(seconds, 365.0 * 86400.0) * 1e9));
    const auto deadline = std::chrono::steady_clock::now() + time;
    for (;;) {
      const nanoseconds left = std::max(nanoseconds(0), nanoseconds(deadline - std::chrono::steady_clock::now()));
      if (const auto completion = wait_once(static_cast<uint64_t>(checked), left)) return as_texts(*completion);
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (left.count() == 0) return py::none();
    }
  }

 private:
  uint64_t send(const LaneEntry& entry) {
    try {
      return client_.submit(entry);
    } catch (const LaneFullError& error) {
      raise("ResourceExhaustedError", error.what());
    } catch (const LaneClosedError& error) {
      raise("ConnectionLostError", error.what());
    }
  }

  static void set_block_sparse(LaneEntry& entry, const py::object& object) {
    require(PyTuple_Check(object.ptr()) && PyTuple_GET_SIZE(object.ptr()) == 5, "options.block_sparse",
            "is not a tuple of five numbers");
    for (Py_ssize_t i = 0; i < 5; ++i) {
      entry.block_sparse[i] = as_whole<int32_t>(PyTuple_GET_ITEM(object.ptr(), i), "options.block_sparse");
    }
  }

  // Sleeps at most once, so that the caller can check for signals.
  std::optional<LaneCompletion> wait_once(uint64_t number, nanoseconds time) {
    try {
      const WithoutGil without_gil;
      return client_.wait(number, time);
    } catch (const LaneClosedError& error) {
      raise("ConnectionLostError", error.what());
    }
  }

  static py::tuple as_texts(const LaneCompletion& completion) {
    const auto text = [](const char* from) {
      return py::reinterpret_steal<py::object>(
          PyUnicode_DecodeUTF8(from, static_cast<Py_ssize_t>(std::char_traits<char>::length(from)), "replace"));
    };
    return py::make_tuple(text(completion.reason), text(completion.field), text(completion.message));
  }

  Memory memory_;
  LaneClient client_;
  InPlace in_place_;
};

void define_client(py::module_& m) {
  const py::object zero = py::float_(0.0);
  py::class_<PyClient>(m, "LaneClient", py::module_local())
      .def(py::init<const py::object&, const py::object&>(), py::arg("memory"), py::arg("spin_us"))
      .def("submit", &PyClient::submit, py::arg("step_id"), py::arg("layer"), py::arg("decode"), py::arg("num_heads"),
           py::arg("query"), py::arg("key"), py::arg("value"), py::arg("output"), py::arg("lse"), py::kw_only(),
           py::arg("scale") = zero, py::arg("sliding_window") = py::int_(0), py::arg("logits_soft_cap") = zero,
           py::arg("alibi_slopes") = py::none(), py::arg("block_sparse") = py::none())
      .def("set_places", &PyClient::set_places, py::arg("regions"), py::arg("num_kv_heads"), py::arg("head_size"),
           py::arg("dtype"))
      .def("submit_in_place", &PyClient::submit_in_place, py::arg("step_id"), py::arg("num_tokens"), py::arg("layer"),
           py::arg("decode"), py::arg("query"), py::arg("key"), py::arg("value"), py::arg("out"))
      .def("wait", &PyClient::wait, py::arg("number"), py::arg("timeout_s"));
}

}  // namespace

void define_lane(py::module_& m) {
  m.attr("LANE_BYTES") = kLaneBytes;
  m.attr("LANE_BUCKETS") = py::tuple(py::cast(kLaneBuckets));
  py::class_<LaneExecutor>(m, "LaneExecutor", py::module_local());  // NOLINT(bugprone-unused-raii): defines the class
  py::class_<FinishedSteps>(m, "FinishedSteps", py::module_local())
      .def(py::init<>())
      .def("take", &take_finished)
      .def_property_readonly("descriptor", &FinishedSteps::descriptor);
  py::class_<PySession>(m, "LaneSession", py::module_local())
      .def(py::init<const py::object&, FinishedSteps&, const py::object&, const py::object&>(), py::arg("num_layers"),
           py::arg("finished"), py::arg("number"), py::arg("kept_ids") = py::none(), py::keep_alive<1, 3>())
      .def("publish", &PySession::publish, py::arg("step_id"), py::arg("written"), py::arg("slot_mapping"),
           py::arg("query_lens"), py::arg("context_lens"), py::arg("block_tables"),
           py::arg("device_tables") = py::none())
      .def("retire", &PySession::retire, py::arg("step_id"))
      .def("add_region", &add_region, py::arg("address"), py::arg("num_bytes"), py::arg("kind") = "host")
      .def("remove_region", &PySession::remove_region, py::arg("number"))
      .def("set_draining", [](PySession& self) { self.get().set_draining(); });
  py::class_<PyServer>(m, "LaneServer", py::module_local())
      .def(py::init<const py::object&, PySession&, LaneExecutor&, const py::object&, py::function>(), py::arg("memory"),
           py::arg("session"), py::arg("executor"), py::arg("spin_us"), py::arg("on_fault"), py::keep_alive<1, 3>(),
           py::keep_alive<1, 4>())
      .def("close", &PyServer::close)
      .def("stats", &PyServer::stats)
      .def_property_readonly("closed", &PyServer::closed);
  define_client(m);
}

}  // namespace kvservice
