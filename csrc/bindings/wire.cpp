#include "bindings/wire.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "errors.h"
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

}  // namespace

void define_wire(py::module_& m) {
  m.attr("WIRE_WITHIN_LIMITS") = kWithinLimits;
  m.attr("WIRE_TOO_MANY_RECORDS") = kTooManyRecords;
  m.attr("WIRE_MALFORMED") = kMalformed;
  py::class_<WireScanner>(m, "WireScanner")
      .def(py::init<const std::vector<std::vector<FieldTuple>>&, std::vector<uint64_t>, uint64_t>(),
           py::arg("messages"), py::arg("limits"), py::arg("max_records"))
      .def("scan", &WireScanner::scan, py::arg("data"));
}

}  // namespace kvservice
