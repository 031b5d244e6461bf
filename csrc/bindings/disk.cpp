#include "bindings/disk.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/gil.h"
#include "bindings/packed.h"
#include "disk/files.h"

namespace kvservice {
namespace {

using disk::DiskFiles, disk::SpaceName, disk::State;

constexpr int64_t kMaxThreads = 256;

std::unique_ptr<DiskFiles> make_files(const std::string& directory, const py::object& capacity_bytes,
                                      const py::object& slab_bytes, const py::object& memory,
                                      const py::object& memory_bytes, const py::object& num_threads,
                                      const py::object& max_queued, uint64_t seed) {
  disk::Options options{};
  options.directory = directory;
  require(!directory.empty(), "directory", "is empty");
  options.capacity_bytes = as_positive(capacity_bytes, "capacity_bytes");
  options.slab_bytes = as_positive(slab_bytes, "slab_bytes");
  require(options.slab_bytes % disk::kSectorBytes == 0, "slab_bytes", "is not a multiple of 4096");
  require(options.slab_bytes <= int64_t{1} << 32, "slab_bytes", "is more than 4 GiB");
  require(options.capacity_bytes / options.slab_bytes < int64_t{1} << 31, "capacity_bytes",
          "is too large for these slabs");
  const disk::Geometry one = {options.slab_bytes, 1};
  require(options.capacity_bytes >= one.total_slab_bytes(), "capacity_bytes", "is less than a slab with its records");
  options.memory = as_address(memory, "memory");
  options.memory_bytes = as_positive(memory_bytes, "memory_bytes");
  const int64_t threads = as_positive(num_threads, "num_threads");
  require(threads <= kMaxThreads, "num_threads", "is more than 256");
  options.num_threads = static_cast<int>(threads);
  options.max_queued = as_positive(max_queued, "max_queued");
  options.seed = seed;
  const WithoutGil without_gil;
  return std::make_unique<DiskFiles>(options);
}

SpaceName as_space(const py::object& digest, const py::object& num_bytes) {
  const std::string_view bytes = as_bytes(digest, "digest");
  require(bytes.size() == disk::kDigestBytes, "digest", "does not have 16 bytes");
  SpaceName name{};
  __builtin_memcpy(name.digest.data(), bytes.data(), bytes.size());
  name.num_bytes = as_positive(num_bytes, "value_bytes");
  return name;
}

// Values lie within the memory.
Packed as_offsets(const py::object& object, const std::string& keys, const SpaceName& space, const DiskFiles& files) {
  Packed offsets = as_packed(object, "offsets");
  require(offsets.size() * kKeyBytes == keys.size(), "offsets", "is not one per key");
  const auto size = static_cast<uint64_t>(space.num_bytes), memory = static_cast<uint64_t>(files.memory_bytes());
  for (const uint64_t offset : offsets) {
    require(size <= memory && offset <= memory - size, "offsets", "has one that is not in the memory");
  }
  return offsets;
}

uint64_t get(DiskFiles& files, const py::object& digest, const py::object& num_bytes, const py::object& keys,
             const py::object& offsets) {
  const SpaceName space = as_space(digest, num_bytes);
  std::string packed(as_key_bytes(keys));
  Packed places = as_offsets(offsets, packed, space, files);
  return files.get(space, std::move(packed), std::move(places));
}

uint64_t put(DiskFiles& files, const py::object& digest, const py::object& num_bytes, const py::object& keys,
             const py::object& offsets, const py::object& checksums) {
  const SpaceName space = as_space(digest, num_bytes);
  std::string packed(as_key_bytes(keys));
  Packed places = as_offsets(offsets, packed, space, files), sums = as_packed(checksums, "checksums");
  require(sums.size() == places.size(), "checksums", "is not one per key");
  return files.put(space, std::move(packed), std::move(places), std::move(sums));
}

py::bytes to_flags(const std::vector<char>& flags) { return {flags.data(), flags.size()}; }

py::bytes lookup(DiskFiles& files, const py::object& digest, const py::object& num_bytes, const py::object& keys) {
  return to_flags(files.lookup(as_space(digest, num_bytes), as_key_bytes(keys)));
}

py::list take_completed(DiskFiles& files) {
  py::list completed;
  for (const auto& operation : files.take_completed()) {
    completed.append(py::make_tuple(operation->id, to_flags(operation->found), to_bytes(operation->checksums),
                                    operation->count, operation->failed));
  }
  return completed;
}

const char* name_of(State state) {
  switch (state) {
    case State::kOpening:
      return "opening";
    case State::kOpen:
      return "open";
    case State::kFailed:
      return "failed";
    default:
      return "closed";
  }
}

}  // namespace

void define_disk(py::module_& m) {
  using disk::Stats;
  py::class_<Stats>(m, "DiskStats")
      .def_property_readonly("state", [](const Stats& stats) { return name_of(stats.state); })
      .def_readonly("direct", &Stats::direct)
      .def_readonly("capacity_bytes", &Stats::capacity_bytes)
      .def_property_readonly("num_values", [](const Stats& stats) { return stats.counts.num_values; })
      .def_property_readonly("used_bytes", [](const Stats& stats) { return stats.counts.used_bytes; })
      .def_property_readonly("broken_bytes", [](const Stats& stats) { return stats.counts.broken_bytes; })
      .def_property_readonly("evicted", [](const Stats& stats) { return stats.counts.evicted; })
      .def_property_readonly("removed", [](const Stats& stats) { return stats.counts.removed; })
      .def_property_readonly("corrupt", [](const Stats& stats) { return stats.counts.corrupt; })
      .def_readonly("read_values", &Stats::read_values)
      .def_readonly("read_bytes", &Stats::read_bytes)
      .def_readonly("written_values", &Stats::written_values)
      .def_readonly("written_bytes", &Stats::written_bytes)
      .def_readonly("refused", &Stats::refused)
      .def_readonly("dropped", &Stats::dropped)
      .def_readonly("errors", &Stats::errors)
      .def_readonly("reads_fail", &Stats::reads_fail)
      .def_readonly("writes_fail", &Stats::writes_fail);
  const py::arg digest("digest"), value_bytes("value_bytes"), keys("keys"), offsets("offsets");
  py::class_<DiskFiles>(m, "DiskFiles")
      .def(py::init(&make_files), py::arg("directory"), py::arg("capacity_bytes"), py::arg("slab_bytes"),
           py::arg("memory"), py::arg("memory_bytes"), py::arg("num_threads"), py::arg("max_queued"), py::arg("seed"))
      .def_property_readonly("event_fd", &DiskFiles::event_fd)
      .def("lookup", &lookup, digest, value_bytes, keys)
      .def("get", &get, digest, value_bytes, keys, offsets)
      .def("put", &put, digest, value_bytes, keys, offsets, py::arg("checksums"))
      .def(
          "remove",
          [](DiskFiles& files, const py::object& name, const py::object& num_bytes, const py::object& packed) {
            return files.remove(as_space(name, num_bytes), std::string(as_key_bytes(packed)));
          },
          digest, value_bytes, keys)
      .def(
          "clear",
          [](DiskFiles& files, const py::object& name, const py::object& num_bytes) {
            return files.clear(as_space(name, num_bytes));
          },
          digest, value_bytes)
      .def("cancel", &DiskFiles::cancel, py::arg("operation"))
      .def("take_completed", &take_completed)
      .def("stats", &DiskFiles::stats)
      .def_property_readonly("problem", &DiskFiles::problem)
      .def("close", &DiskFiles::close, py::call_guard<WithoutGil>());
}

}  // namespace kvservice
