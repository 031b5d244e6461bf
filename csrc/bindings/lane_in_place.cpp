#include "bindings/lane_in_place.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "bindings/arguments.h"

namespace kvservice {
namespace {

constexpr uint64_t kAlignment = 16;

// Returns null, without a Python error, if there is no such attribute.
py::object attribute(const py::handle& object, const char* name) {
  PyObject* const found = PyObject_GetAttrString(object.ptr(), name);
  if (found == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(found);
}

py::object call(const py::handle& object, const char* name) {
  const py::object method = attribute(object, name);
  PyObject* const result = method ? PyObject_CallNoArgs(method.ptr()) : nullptr;
  if (result == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(result);
}

std::optional<int64_t> whole(const py::handle& object) {
  if (!object || !PyLong_Check(object.ptr())) return std::nullopt;
  const int64_t value = PyLong_AsLongLong(object.ptr());
  if (value != -1 || PyErr_Occurred() == nullptr) return value;
  PyErr_Clear();
  return std::nullopt;
}

}  // namespace

void InPlace::set(const py::iterable& regions, int64_t num_kv_heads, int64_t head_size, py::object dtype) {
  std::vector<Region> found;
  for (const py::handle& region : regions) {
    const auto [number, address, num_bytes] = region.cast<std::tuple<uint32_t, uintptr_t, int64_t>>();
    found.push_back({number, address, num_bytes});
  }
  item_size_ = py::cast<int64_t>(dtype.attr("itemsize"));
  name_ = py::str(dtype);
  dtype_ = std::move(dtype);
  regions_ = std::move(found);
  num_kv_heads_ = num_kv_heads;
  head_size_ = head_size;
}

std::optional<InPlace::Tensor> InPlace::inspect(const py::handle& object, bool writable) const {
  if (!py::isinstance<py::array>(object)) return inspect_torch(object);
  const auto array = py::reinterpret_borrow<py::array>(object);
  if (array.ndim() != 3 || !is_plain(array) || !array.dtype().is(dtype_) || (writable && !array.writeable())) return {};
  return Tensor{reinterpret_cast<uintptr_t>(array.data()), {array.shape(0), array.shape(1), array.shape(2)}};
}

std::optional<InPlace::Tensor> InPlace::inspect_torch(const py::handle& object) const {
  PyObject* const torch = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");  // borrowed
  if (torch == nullptr) return {};
  const py::object dtype = attribute(object, "dtype"), shape = attribute(object, "shape");
  if (!dtype || !dtype.is(attribute(torch, py::cast<std::string>(name_).c_str()))) return {};
  if (!shape || !PyTuple_Check(shape.ptr()) || PyTuple_GET_SIZE(shape.ptr()) != 3) return {};
  const py::object contiguous = call(object, "is_contiguous");
  const std::optional<int64_t> address = whole(call(object, "data_ptr"));
  if (!contiguous || !contiguous.is(py::bool_(true)) || !address) return {};
  Tensor tensor{static_cast<uintptr_t>(*address), {}};
  for (Py_ssize_t i = 0; i < 3; ++i) {
    const std::optional<int64_t> extent = whole(PyTuple_GET_ITEM(shape.ptr(), i));
    if (!extent) return {};
    tensor.shape[i] = *extent;
  }
  return tensor;
}

std::optional<LanePlace> InPlace::find(const Tensor& tensor) const {
  const int64_t num_bytes = tensor.shape[0] * tensor.shape[1] * tensor.shape[2] * item_size_;
  for (const Region& region : regions_) {
    if (tensor.address < region.address) continue;
    const uint64_t offset = tensor.address - region.address;
    if (offset % kAlignment != 0 || offset > static_cast<uint64_t>(region.num_bytes)) continue;
    if (num_bytes <= region.num_bytes - static_cast<int64_t>(offset)) return LanePlace{region.number, 0, offset};
  }
  return {};
}

std::optional<LaneEntry> InPlace::entry(int64_t num_tokens, bool decode, const py::handle& query, const py::handle& key,
                                        const py::handle& value, const py::handle& out) const {
  const auto tensors = {inspect(query, false), inspect(key, false), inspect(value, false), inspect(out, true)};
  if (!std::all_of(tensors.begin(), tensors.end(), [](const auto& tensor) { return tensor.has_value(); })) return {};
  const auto* const seen = tensors.begin();
  // NOLINTBEGIN(bugprone-unchecked-optional-access): all four have values.
  const int64_t* const shape = seen[0]->shape;
  const int64_t kv_shape[3] = {num_tokens, num_kv_heads_, head_size_};
  const bool fits = shape[0] == num_tokens && shape[1] > 0 && shape[1] % num_kv_heads_ == 0 && shape[2] == head_size_ &&
                    std::equal(kv_shape, kv_shape + 3, seen[1]->shape) &&
                    std::equal(kv_shape, kv_shape + 3, seen[2]->shape) && std::equal(shape, shape + 3, seen[3]->shape);
  if (!fits || shape[1] > 65535) return {};
  LanePlace places[4];
  for (int64_t i = 0; i < 4; ++i) {
    const std::optional<LanePlace> place = find(*seen[i]);
    if (!place) return {};
    places[i] = *place;
  }
  // NOLINTEND(bugprone-unchecked-optional-access)
  LaneEntry entry = {};
  entry.flags = decode ? kLaneDecode : 0U;
  entry.num_heads = static_cast<int32_t>(shape[1]);
  entry.query = places[0];
  entry.key = places[1];
  entry.value = places[2];
  entry.output = places[3];
  entry.lse = entry.alibi_slopes = {kNoRegion, 0, 0};
  return entry;
}

}  // namespace kvservice
