#include "bindings/blocks.h"

#include <memory>
#include <vector>

#include "bindings/arguments.h"
#include "blocks/index.h"
#include "blocks/tables.h"

namespace kvservice {
namespace {

constexpr int kMaxShift = 20;

py::array plain(const py::handle& object, const char* field, int type_num, const char* type_name, int64_t ndim) {
  py::array array = as_array(object, field, type_num, type_name);
  require(array.ndim() == ndim, field, "has the wrong number of dimensions");
  require(is_plain(array), field, "is not contiguous");
  return array;
}

// Returns a copy if the vector is not contiguous.
py::array int64_vector(const py::handle& object, const char* field) {
  py::array array = as_array(object, field, int64_num(), "int64");
  require(array.ndim() == 1, field, "has the wrong number of dimensions");
  return is_plain(array) ? array : py::array_t<int64_t, py::array::c_style>::ensure(array);
}

const int64_t* int64_of(const py::array& array) { return static_cast<const int64_t*>(array.data()); }

// The arrays must outlive the view.
struct RangeArguments {
  py::array tables, rows, starts, counts;
  BlockTables view = {};
  RowRanges ranges = {};

  RangeArguments(const py::object& tables, const py::object& rows, const py::object& starts, const py::object& counts,
                 int shift)
      : tables(plain(tables, "tables", kInt32, "int32", 2)),
        rows(int64_vector(rows, "rows")),
        starts(int64_vector(starts, "starts")),
        counts(int64_vector(counts, "counts")) {
    const int64_t size = this->rows.shape(0);
    require(this->starts.shape(0) == size, "starts", "has another length than rows");
    require(this->counts.shape(0) == size, "counts", "has another length than rows");
    view = {static_cast<const int32_t*>(this->tables.data()), this->tables.shape(0), this->tables.shape(1)};
    ranges = {int64_of(this->rows), int64_of(this->starts), int64_of(this->counts), size};
    check_ranges(view, ranges, shift);
  }
};

py::array_t<int64_t> slots(const py::object& tables, const py::object& rows, const py::object& starts,
                           const py::object& counts, int shift) {
  require(shift >= 0 && shift <= kMaxShift, "shift", "is out of range");
  const RangeArguments arguments(tables, rows, starts, counts, shift);
  py::array_t<int64_t> result(arguments.ranges.total());
  slot_mapping(arguments.view, arguments.ranges, shift, result.mutable_data());
  return result;
}

py::array_t<int64_t> to_array(const std::vector<int64_t>& numbers) {
  return py::array_t<int64_t>(static_cast<py::ssize_t>(numbers.size()), numbers.data());
}

py::array_t<int64_t> shared(const py::object& tables, const py::object& rows, const py::object& starts,
                            const py::object& counts, const py::object& ref_count, const py::object& indexed) {
  const RangeArguments arguments(tables, rows, starts, counts, 0);
  const py::array counted = plain(ref_count, "ref_count", kInt32, "int32", 1);
  const py::array known = plain(indexed, "indexed", py::detail::npy_api::NPY_BOOL_, "bool", 1);
  require(known.shape(0) == counted.shape(0), "indexed", "has another length than ref_count");
  return to_array(shared_entries(arguments.view, arguments.ranges, static_cast<const int32_t*>(counted.data()),
                                 static_cast<const bool*>(known.data()), counted.shape(0)));
}

Key as_key(const py::handle& object) {
  require(PyBytes_Check(object.ptr()) && PyBytes_GET_SIZE(object.ptr()) == kKeyBytes, "hashes", "is not 32 bytes long");
  return Key::load(PyBytes_AS_STRING(object.ptr()));
}

std::vector<Key> as_keys(const py::list& hashes, size_t limit) {
  const size_t count = std::min(limit, hashes.size());
  std::vector<Key> keys;
  keys.reserve(count);
  for (size_t i = 0; i < count; ++i) keys.push_back(as_key(PyList_GET_ITEM(hashes.ptr(), static_cast<Py_ssize_t>(i))));
  return keys;
}

py::array_t<int64_t> match(const BlockIndex& index, const py::list& hashes, size_t limit) {
  std::vector<int64_t> blocks;
  index.match(as_keys(hashes, limit), blocks);
  return to_array(blocks);
}

py::object get(const BlockIndex& index, const py::object& chain_hash) {
  const int64_t block = index.find(as_key(chain_hash));
  return block == kNoBlock ? py::none() : py::object(py::int_(block));
}

py::list insert(BlockIndex& index, const py::list& blocks, const py::list& hashes) {
  require(blocks.size() == hashes.size(), "hashes", "has another length than blocks");
  const std::vector<Key> keys = as_keys(hashes, hashes.size());
  py::list inserted(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    inserted[i] = py::bool_(index.insert(keys[i], as_int(blocks[i], "blocks")));
  }
  return inserted;
}

void remove(BlockIndex& index, const py::list& hashes) {
  for (const Key& key : as_keys(hashes, hashes.size())) require(index.erase(key), "hashes", "is not in the index");
}

py::bytes to_bytes(const Key& key) { return {reinterpret_cast<const char*>(key.words), kKeyBytes}; }

py::list items(const BlockIndex& index) {
  py::list result;
  for (int64_t block = 0; block < index.num_blocks(); ++block) {
    if (const Key* key = index.hash_of(block)) result.append(py::make_tuple(to_bytes(*key), block));
  }
  return result;
}

}  // namespace

void define_blocks(py::module_& m) {
  m.def("slot_mapping", &slots, py::arg("tables"), py::arg("rows"), py::arg("starts"), py::arg("counts"),
        py::arg("shift"));
  m.def("shared_entries", &shared, py::arg("tables"), py::arg("rows"), py::arg("starts"), py::arg("counts"),
        py::arg("ref_count"), py::arg("indexed"));
  py::class_<BlockIndex>(m, "BlockIndex")
      .def(py::init<int64_t, uint64_t, uint64_t>(), py::arg("num_blocks"), py::arg("seed0"), py::arg("seed1"))
      .def("__len__", &BlockIndex::size)
      .def("get", &get, py::arg("chain_hash"))
      .def("match", &match, py::arg("hashes"), py::arg("limit"))
      .def("insert", &insert, py::arg("blocks"), py::arg("hashes"))
      .def("remove", &remove, py::arg("hashes"))
      .def("items", &items);
}

}  // namespace kvservice
