#include "bindings/wire.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "errors.h"
#include "wire/packed.h"
#include "wire/scanner.h"

namespace kvservice {
namespace {

namespace py = pybind11;

constexpr int kWithinLimits = -1, kTooManyRecords = -2, kMalformed = -3;

// (number, kind, counter, message)
using FieldTuple = std::tuple<uint32_t, int, int, int>;

class WireScanner {
 public:
  WireScanner(const std::vector<std::vector<FieldTuple>>& messages, std::vector<uint64_t> limits,
              uint64_t max_records) {
    const auto num_messages = static_cast<int>(messages.size());
    const auto num_counters = static_cast<int>(limits.size());
    require(num_messages > 0, "messages", "is empty");
    for (const auto& fields : messages) {
      MessageRules rules;
      for (const auto& [number, kind, counter, message] : fields) {
        require(kind >= 0 && kind <= static_cast<int>(FieldKind::kMessage), "messages", "has an unknown kind");
        require(counter >= -1 && counter < num_counters, "messages", "names a counter that has no limit");
        const bool nests = kind == static_cast<int>(FieldKind::kMessage);
        require(nests ? message >= 0 && message < num_messages : message == -1, "messages", "names a wrong message");
        rules.push_back({number, static_cast<FieldKind>(kind), counter, message});
      }
      std::sort(rules.begin(), rules.end(), [](const auto& a, const auto& b) { return a.number < b.number; });
      rules_.messages.push_back(std::move(rules));
    }
    rules_.limits = std::move(limits);
    rules_.max_records = max_records;
  }

  int scan(const py::bytes& data) const {
    const auto view = static_cast<std::string_view>(data);
    const ScanReport report = scan_message(rules_, reinterpret_cast<const uint8_t*>(view.data()), view.size());
    switch (report.result) {
      case ScanResult::kWithinLimits:
        return kWithinLimits;
      case ScanResult::kAboveLimit:
        return report.counter;
      case ScanResult::kTooManyRecords:
        return kTooManyRecords;
      default:
        return kMalformed;
    }
  }

 private:
  ScanRules rules_;
};

// The elements are little-endian, as those of every machine that the daemon runs on.
template <class Number>
py::array_t<Number> packed(const py::bytes& data, uint32_t number) {
  const auto view = static_cast<std::string_view>(data);
  const PackedField field = find_packed(reinterpret_cast<const uint8_t*>(view.data()), view.size(), number);
  require(field.size % sizeof(Number) == 0, "data", "has elements of another size");
  py::array_t<Number> numbers(static_cast<py::ssize_t>(field.size / sizeof(Number)));
  std::memcpy(numbers.mutable_data(), field.begin, field.size);
  return numbers;
}

// Negative numbers have 10 bytes each, as in every message.
py::bytes varint_field(uint32_t number,
                       const py::array_t<int64_t, py::array::c_style | py::array::forcecast>& numbers) {
  std::string elements, data;
  elements.reserve(static_cast<size_t>(numbers.size()) * 2);
  const int64_t* first = numbers.data();
  for (py::ssize_t i = 0; i < numbers.size(); ++i) put_varint(elements, static_cast<uint64_t>(first[i]));
  put_varint(data, uint64_t{number} << 3 | 2);
  put_varint(data, elements.size());
  return data + elements;
}

// Returns None if one is no int, or is out of range.
py::object pack_fixed32(const py::list& numbers) {
  const auto size = static_cast<py::ssize_t>(numbers.size());
  auto data = py::reinterpret_steal<py::object>(PyBytes_FromStringAndSize(nullptr, size * 4));
  if (!data) throw py::error_already_set();
  char* at = PyBytes_AS_STRING(data.ptr());
  for (py::ssize_t i = 0; i < size; ++i, at += 4) {
    PyObject* number = PyList_GET_ITEM(numbers.ptr(), i);
    if (!PyLong_CheckExact(number)) return py::none();
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow);
    const auto narrow = static_cast<int32_t>(value);
    if (overflow != 0 || narrow != value) return py::none();
    std::memcpy(at, &narrow, 4);
  }
  return data;
}

}  // namespace

void define_wire(py::module_& m) {
  m.attr("WIRE_WITHIN_LIMITS") = kWithinLimits;
  m.attr("WIRE_TOO_MANY_RECORDS") = kTooManyRecords;
  m.attr("WIRE_MALFORMED") = kMalformed;
  py::class_<WireScanner>(m, "WireScanner")
      .def(py::init<const std::vector<std::vector<FieldTuple>>&, std::vector<uint64_t>, uint64_t>(),
           py::arg("messages"), py::arg("limits"), py::arg("max_records"))
      .def("scan", &WireScanner::scan, py::arg("data"));
  m.def("packed_fixed64", &packed<int64_t>, py::arg("data"), py::arg("number"));
  m.def("packed_fixed32", &packed<int32_t>, py::arg("data"), py::arg("number"));
  m.def("pack_fixed32", &pack_fixed32, py::arg("numbers"));
  m.def("varint_field", &varint_field, py::arg("number"), py::arg("numbers"));
}

}  // namespace kvservice
