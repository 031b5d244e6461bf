#include "bindings/store.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/gil.h"
#include "bindings/packed.h"
#include "store/copy.h"
#include "store/index.h"
#include "store/mirror.h"

namespace kvservice {
namespace {

constexpr int64_t kMaxCopyThreads = 256;

Keys as_keys(const py::object& object) {
  const std::string_view bytes = as_key_bytes(object);
  return {bytes.data(), bytes.size() / kKeyBytes};
}

uint32_t as_number(const py::object& object) {
  const int64_t number = as_int(object, "namespace");
  require(number >= 0 && number <= std::numeric_limits<uint32_t>::max(), "namespace", "is out of range");
  return static_cast<uint32_t>(number);
}

// The lowest bit of a byte first. Elements are 0 or 1.
py::bytes bitmap(const std::vector<char>& bits) {
  std::string packed((bits.size() + 7) / 8, '\0');
  for (size_t i = 0; i < bits.size(); ++i) packed[i / 8] = static_cast<char>(packed[i / 8] | bits[i] << i % 8);
  return packed;
}

struct Stats {
  BlockCounts counts;
  int64_t used_bytes = 0;
  uint64_t num_evicted = 0;
  uint64_t num_unoffered = 0;
  int64_t num_offered = 0;

  void add(const Namespace& space) {
    counts.committed += space.counts.committed;
    counts.leased += space.counts.leased;
    counts.reserved += space.counts.reserved;
    counts.condemned += space.counts.condemned;
    counts.slabs += space.counts.slabs;
    counts.busy_slabs += space.counts.busy_slabs;
    used_bytes += space.counts.used() * space.block_bytes;
    num_evicted += space.num_evicted;
    num_unoffered += space.num_unoffered;
    num_offered += space.num_offered;
  }
};

// The index.

std::unique_ptr<StoreIndex> make_index(const py::object& address, const py::object& num_bytes,
                                       const py::object& slab_bytes, uint64_t seed, const py::object& kept) {
  return std::make_unique<StoreIndex>(as_address(address, "address"), as_positive(num_bytes, "num_bytes"),
                                      as_positive(slab_bytes, "slab_bytes"), seed, as_address(kept, "kept"));
}

int64_t kept_bytes(const py::object& num_bytes, const py::object& slab_bytes) {
  return StoreIndex::kept_bytes(as_positive(num_bytes, "num_bytes"), as_positive(slab_bytes, "slab_bytes"));
}

int64_t as_quota(const py::object& object) {
  const int64_t quota_bytes = as_int(object, "quota_bytes");
  require(quota_bytes >= 0, "quota_bytes", "is negative");
  return quota_bytes;
}

py::tuple recover(StoreIndex& index, const std::vector<std::tuple<uint32_t, int64_t, int64_t>>& namespaces) {
  std::vector<NamespaceSize> sizes;
  sizes.reserve(namespaces.size());
  for (const auto& [number, block_bytes, quota_bytes] : namespaces) sizes.push_back({number, block_bytes, quota_bytes});
  const Recovered recovered = index.recover(sizes);
  return py::make_tuple(to_bytes(recovered.reserved), to_bytes(recovered.condemned));
}

uint32_t open(StoreIndex& index, const py::object& block_bytes, const py::object& quota_bytes) {
  return index.open(as_int(block_bytes, "block_bytes"), as_quota(quota_bytes));
}

void set_quota(StoreIndex& index, const py::object& number, const py::object& quota_bytes) {
  index.set_quota(as_number(number), as_quota(quota_bytes));
}

py::tuple geometry(const StoreIndex& index, const py::object& number) {
  const SlabLayout layout = index.find_namespace(as_number(number)).layout;
  return py::make_tuple(layout.first_block, layout.block_stride, layout.blocks_per_slab);
}

py::tuple lookup(StoreIndex& index, const py::object& number, const py::object& keys) {
  const std::vector<char> found = index.lookup(as_number(number), as_keys(keys));
  size_t num_leading = 0;
  while (num_leading < found.size() && found[num_leading] != 0) ++num_leading;
  return py::make_tuple(num_leading, bitmap(found));
}

py::tuple needed(StoreIndex& index, const py::object& number, const py::object& keys) {
  const Needed found = index.needed(as_number(number), as_keys(keys));
  return py::make_tuple(found.missing, found.evictable);
}

py::tuple empty_slabs(StoreIndex& index, const py::object& number, const py::object& most_slabs,
                      const py::object& most_blocks) {
  const Emptied emptied =
      index.empty_slabs(as_number(number), as_int(most_slabs, "most_slabs"), as_int(most_blocks, "most_blocks"));
  return py::make_tuple(emptied.slabs, emptied.blocks);
}

py::tuple acquire(StoreIndex& index, const py::object& number, const py::object& keys, bool leading_only,
                  bool counted) {
  const Acquired acquired = index.acquire(as_number(number), as_keys(keys), leading_only, counted);
  return py::make_tuple(bitmap(acquired.found), to_bytes(acquired.slots), to_bytes(acquired.offsets),
                        to_bytes(acquired.versions));
}

py::tuple coldest(StoreIndex& index, const py::object& number, const py::object& most, bool newest_first) {
  const Coldest found = index.coldest(as_number(number), as_int(most, "most"), newest_first);
  return py::make_tuple(to_bytes(found.slots), py::bytes(found.keys), to_bytes(found.offsets),
                        to_bytes(found.checksums), to_bytes(found.uses));
}

py::tuple reserve(StoreIndex& index, const py::object& number, const py::object& keys) {
  const Reserved reserved = index.reserve(as_number(number), as_keys(keys));
  const py::bytes statuses(reinterpret_cast<const char*>(reserved.statuses.data()), reserved.statuses.size());
  return py::make_tuple(statuses, to_bytes(reserved.slots), to_bytes(reserved.offsets));
}

void commit(StoreIndex& index, const py::object& slots, const py::object& checksums) {
  const Packed numbers = as_packed(slots, "slots"), sums = as_packed(checksums, "checksums");
  require(numbers.size() == sums.size(), "checksums", "has another length than slots");
  index.commit(numbers, sums);
}

py::list take_removed(StoreIndex& index) {
  const std::vector<RemovedKey> removed = index.take_removed();
  py::list grouped;
  for (size_t begin = 0, end = 0; begin < removed.size(); begin = end) {
    std::string keys;
    for (; end < removed.size() && removed[end].namespace_number == removed[begin].namespace_number; ++end) {
      keys.append(reinterpret_cast<const char*>(&removed[end].key), kKeyBytes);
    }
    grouped.append(py::make_tuple(removed[begin].namespace_number, py::bytes(keys)));
  }
  return grouped;
}

Stats stats(StoreIndex& index, const py::object& number) {
  index.end_lingering();
  Stats result;
  result.add(index.find_namespace(as_number(number)));
  return result;
}

Stats totals(StoreIndex& index) {
  index.end_lingering();
  Stats result;
  for (const auto& [number, space] : index.namespaces()) result.add(*space);
  result.num_evicted = index.num_evicted();
  result.num_unoffered = index.num_unoffered();
  return result;
}

// The copies. The arrays belong to this object, so that the interpreter lock can be released.

struct CopyArguments {
  Packed offsets, places, piece_bytes;
  BlockPlaces view;
  int num_threads = 1;

  CopyArguments(const py::object& memory, const py::object& offsets, const py::object& block_bytes,
                const py::object& num_threads)
      : offsets(as_packed(offsets, "offsets")) {
    view.store = as_address(memory, "memory");
    view.offsets = this->offsets.data();
    view.num_blocks = static_cast<int64_t>(this->offsets.size());
    view.block_bytes = as_positive(block_bytes, "block_bytes");
    const int64_t threads = as_int(num_threads, "num_threads");
    require(threads >= 1 && threads <= kMaxCopyThreads, "num_threads", "must be between 1 and 256");
    this->num_threads = static_cast<int>(threads);
  }

  void set_pieces(char* other, const py::object& place_list, const py::object& sizes) {
    places = as_packed(place_list, "places");
    piece_bytes = as_packed(sizes, "piece_bytes");
    require(!piece_bytes.empty(), "piece_bytes", "is empty");
    auto left = static_cast<uint64_t>(view.block_bytes);
    for (const uint64_t size : piece_bytes) {
      require(size >= 1 && size <= left, "piece_bytes", "do not sum up to block_bytes, or one is 0");
      left -= size;
    }
    require(left == 0, "piece_bytes", "do not sum up to block_bytes, or one is 0");
    require(places.size() == offsets.size() * piece_bytes.size(), "places", "is not one offset per block and piece");
    view.other = other;
    view.places = places.data();
    view.piece_bytes = piece_bytes.data();
    view.num_pieces = static_cast<int64_t>(piece_bytes.size());
  }
};

py::bytes copy_in(const py::object& memory, const py::object& offsets, const py::object& block_bytes,
                  const py::object& source, const py::object& places, const py::object& piece_bytes,
                  const py::object& num_threads) {
  CopyArguments arguments(memory, offsets, block_bytes, num_threads);
  arguments.set_pieces(as_address(source, "source"), places, piece_bytes);
  Packed checksums;
  {
    const WithoutGil without_gil;
    checksums = copy_into_store(arguments.view, arguments.num_threads);
  }
  return to_bytes(checksums);
}

py::bytes copy_out(const py::object& memory, const py::object& offsets, const py::object& block_bytes,
                   const py::object& target, const py::object& places, const py::object& piece_bytes,
                   const py::object& checksums, const py::object& num_threads) {
  CopyArguments arguments(memory, offsets, block_bytes, num_threads);
  arguments.set_pieces(as_address(target, "target"), places, piece_bytes);
  const Packed expected = as_packed(checksums, "checksums");
  require(expected.empty() || expected.size() == arguments.offsets.size(), "checksums", "is not one per block");
  Packed actual;
  {
    const WithoutGil without_gil;
    if (expected.empty()) {
      move_out_of_store(arguments.view, arguments.num_threads);
    } else {
      actual = copy_out_of_store(arguments.view, arguments.num_threads);
    }
  }
  std::vector<char> right(arguments.offsets.size(), 1);
  for (size_t i = 0; i < expected.size(); ++i) right[i] = static_cast<char>(actual[i] == expected[i]);
  return bitmap(right);
}

py::bytes checksums(const py::object& memory, const py::object& offsets, const py::object& block_bytes,
                    const py::object& num_threads) {
  const CopyArguments arguments(memory, offsets, block_bytes, num_threads);
  Packed checksums;
  {
    const WithoutGil without_gil;
    checksums = store_checksums(arguments.view, arguments.num_threads);
  }
  return to_bytes(checksums);
}

py::bytes versions(const py::object& memory, const py::object& slab_bytes, const py::object& first_block,
                   const py::object& block_stride, const py::object& offsets) {
  const char* const first_slab = as_address(memory, "memory");
  const auto slab = static_cast<uint64_t>(as_positive(slab_bytes, "slab_bytes"));
  const auto first = static_cast<uint64_t>(as_positive(first_block, "first_block"));
  const auto stride = static_cast<uint64_t>(as_positive(block_stride, "block_stride"));
  Packed numbers = as_packed(offsets, "offsets");
  for (uint64_t& number : numbers) {
    const uint64_t in_slab = number % slab;
    const bool valid = in_slab >= first && (in_slab - first) % stride == 0;
    require(valid && (in_slab - first) / stride * kRecordBytes < first, "offsets", "has one that is not of a block");
    const auto index = static_cast<int64_t>((in_slab - first) / stride);
    number = current_version(first_slab + (number - in_slab), index, static_cast<int64_t>(stride));
  }
  return to_bytes(numbers);
}

void define_index(py::module_& m) {
  py::class_<Stats>(m, "StoreStats")
      .def_property_readonly("num_blocks", [](const Stats& stats) { return stats.counts.committed; })
      .def_property_readonly("num_leased", [](const Stats& stats) { return stats.counts.leased; })
      .def_property_readonly("num_reserved", [](const Stats& stats) { return stats.counts.reserved; })
      .def_property_readonly("num_condemned", [](const Stats& stats) { return stats.counts.condemned; })
      .def_property_readonly("num_slabs", [](const Stats& stats) { return stats.counts.slabs; })
      .def_property_readonly("num_busy_slabs", [](const Stats& stats) { return stats.counts.busy_slabs; })
      .def_readonly("used_bytes", &Stats::used_bytes)
      .def_readonly("num_evicted", &Stats::num_evicted)
      .def_readonly("num_unoffered", &Stats::num_unoffered)
      .def_readonly("num_offered", &Stats::num_offered);
  const py::arg space("namespace"), keys("keys"), slots("slots");
  py::class_<StoreIndex>(m, "StoreIndex")
      .def(py::init(&make_index), py::arg("address"), py::arg("num_bytes"), py::arg("slab_bytes"), py::arg("seed"),
           py::arg("kept"))
      .def_static("kept_bytes", &kept_bytes, py::arg("num_bytes"), py::arg("slab_bytes"))
      .def_property_readonly("generation", &StoreIndex::generation)
      .def("recover", &recover, py::arg("namespaces"))
      .def(
          "set_ready", [](StoreIndex& index, const py::object& size) { index.set_ready(as_int(size, "num_bytes")); },
          py::arg("num_bytes"))
      .def("open", &open, py::arg("block_bytes"), py::arg("quota_bytes"))
      .def(
          "close", [](StoreIndex& index, const py::object& number) { index.close(as_number(number)); }, space)
      .def("set_quota", &set_quota, space, py::arg("quota_bytes"))
      .def("geometry", &geometry, space)
      .def("lookup", &lookup, space, keys)
      .def("needed", &needed, space, keys)
      .def("acquire", &acquire, space, keys, py::arg("leading_only"), py::arg("counted") = true)
      .def("coldest", &coldest, space, py::arg("most"), py::arg("newest_first") = false)
      .def(
          "lease", [](StoreIndex& index, const py::object& list) { index.lease(as_packed(list, "slots")); }, slots)
      .def(
          "release", [](StoreIndex& index, const py::object& list) { index.release(as_packed(list, "slots")); }, slots)
      .def("reserve", &reserve, space, keys)
      .def("commit", &commit, slots, py::arg("checksums"))
      .def(
          "abort", [](StoreIndex& index, const py::object& list) { index.abort(as_packed(list, "slots")); }, slots)
      .def(
          "condemn", [](StoreIndex& index, const py::object& list) { index.condemn(as_packed(list, "slots")); }, slots)
      .def(
          "touch",
          [](StoreIndex& index, const py::object& number, const py::object& list) {
            return index.touch(as_number(number), as_keys(list));
          },
          space, keys)
      .def(
          "remove",
          [](StoreIndex& index, const py::object& number, const py::object& list) {
            return index.remove(as_number(number), as_keys(list));
          },
          space, keys)
      .def(
          "clear",
          [](StoreIndex& index, const py::object& number, const py::object& most) {
            return index.clear(as_number(number), as_int(most, "most"));
          },
          space, py::arg("most"))
      .def(
          "evict_blocks",
          [](StoreIndex& index, const py::object& number, const py::object& most) {
            return index.evict_blocks(as_number(number), as_int(most, "most"));
          },
          space, py::arg("most"))
      .def("empty_slabs", &empty_slabs, space, py::arg("most_slabs"), py::arg("most_blocks"))
      .def(
          "checksums",
          [](const StoreIndex& index, const py::object& list) {
            return to_bytes(index.checksums(as_packed(list, "slots")));
          },
          slots)
      .def(
          "places",
          [](const StoreIndex& index, const py::object& list) {
            const Places places = index.places(as_packed(list, "slots"));
            return py::make_tuple(py::bytes(places.keys), to_bytes(places.offsets));
          },
          slots)
      .def("record_removed", &StoreIndex::record_removed, py::arg("enabled"))
      .def("take_removed", &take_removed)
      .def("stats", &stats, space)
      .def("totals", &totals)
      .def_property_readonly("num_slabs", &StoreIndex::num_slabs)
      .def_property_readonly("num_free_slabs", &StoreIndex::num_free_slabs)
      .def(
          "check", [](StoreIndex& index, const py::object& most) { return index.check(as_int(most, "most")); },
          py::arg("most"));
}

std::unique_ptr<StoreMirror> make_mirror(const py::object& address, const py::object& num_bytes,
                                         const py::object& slab_bytes, const py::object& first_block,
                                         const py::object& block_stride, const py::object& blocks_per_slab,
                                         const py::object& number) {
  const SlabLayout layout = {as_positive(first_block, "first_block"), as_positive(block_stride, "block_stride"),
                             as_positive(blocks_per_slab, "blocks_per_slab")};
  return std::make_unique<StoreMirror>(as_address(address, "address"), as_positive(num_bytes, "num_bytes"),
                                       as_positive(slab_bytes, "slab_bytes"), layout, as_number(number));
}

py::tuple mirrored(const MirroredBlocks& blocks) {
  return py::make_tuple(bitmap(blocks.found), to_bytes(blocks.offsets), to_bytes(blocks.versions));
}

constexpr int64_t kLockedRecords = 1 << 16;

void define_mirror(py::module_& m) {
  const py::arg keys("keys"), leading_only("leading_only"), offsets("offsets");
  py::class_<StoreMirror>(m, "StoreMirror")
      .def(py::init(&make_mirror), py::arg("address"), py::arg("num_bytes"), py::arg("slab_bytes"),
           py::arg("first_block"), py::arg("block_stride"), py::arg("blocks_per_slab"), py::arg("namespace"))
      .def(
          "refresh",
          [](StoreMirror& mirror, const py::object& most) {
            const int64_t count = as_positive(most, "most");
            // Releasing the interpreter lock can cost milliseconds, until this thread has it again.
            std::optional<WithoutGil> without_gil;
            if (count > kLockedRecords) without_gil.emplace();
            return mirror.refresh(count);
          },
          py::arg("most"))
      .def(
          "find",
          [](StoreMirror& mirror, const py::object& list, bool leading) {
            const Keys packed = as_keys(list);
            return mirrored(mirror.find(packed.data, packed.size, leading));
          },
          keys, leading_only)
      .def(
          "lease",
          [](StoreMirror& mirror, const py::object& list, bool leading) {
            const Keys packed = as_keys(list);
            return mirrored(mirror.lease(packed.data, packed.size, leading));
          },
          keys, leading_only)
      .def(
          "renew",
          [](StoreMirror& mirror, const py::object& list, const py::object& numbers) {
            return mirror.renew(as_packed(list, "offsets"), as_packed(numbers, "versions"));
          },
          offsets, py::arg("versions"))
      .def(
          "release",
          [](StoreMirror& mirror, const py::object& list, const py::object& numbers) {
            mirror.release(as_packed(list, "offsets"), as_packed(numbers, "versions"));
          },
          offsets, py::arg("versions"))
      .def("take_changes", [](StoreMirror& mirror) {
        const MirrorChanges changes = mirror.take_changes();
        const auto packed = [](const std::vector<Key>& keys) {
          return py::bytes(reinterpret_cast<const char*>(keys.data()), keys.size() * kKeyBytes);
        };
        return py::make_tuple(packed(changes.gone), packed(changes.come), changes.is_all);
      });
}

}  // namespace

void define_store(py::module_& m) {
  define_index(m);
  define_mirror(m);
  const py::arg memory("memory"), offsets("offsets"), block_bytes("block_bytes"), num_threads("num_threads");
  m.def("store_copy_in", &copy_in, memory, offsets, block_bytes, py::arg("source"), py::arg("places"),
        py::arg("piece_bytes"), num_threads);
  m.def("store_copy_out", &copy_out, memory, offsets, block_bytes, py::arg("target"), py::arg("places"),
        py::arg("piece_bytes"), py::arg("checksums"), num_threads);
  m.def("store_checksums", &checksums, memory, offsets, block_bytes, num_threads);
  m.def("store_versions", &versions, memory, py::arg("slab_bytes"), py::arg("first_block"), py::arg("block_stride"),
        offsets);
}

}  // namespace kvservice
