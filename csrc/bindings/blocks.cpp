#include "bindings/blocks.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
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
template <class Number>
py::array vector_of(const py::handle& object, const char* field, int type_num, const char* type_name) {
  py::array array = as_array(object, field, type_num, type_name);
  require(array.ndim() == 1, field, "has the wrong number of dimensions");
  return is_plain(array) ? array : py::array_t<Number, py::array::c_style>::ensure(array);
}

py::array int64_vector(const py::handle& object, const char* field) {
  return vector_of<int64_t>(object, field, int64_num(), "int64");
}

py::array int32_vector(const py::handle& object, const char* field) {
  return vector_of<int32_t>(object, field, kInt32, "int32");
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

int block_shift(const py::array& token_ids) {
  int shift = 0;
  while (shift < kMaxShift && int64_t{1} << shift < token_ids.shape(1)) ++shift;
  require(int64_t{1} << shift == token_ids.shape(1), "token_ids", "has blocks whose size is no power of two");
  return shift;
}

void fill(const py::object& tables, const py::object& token_ids, const std::vector<int64_t>& rows,
          const py::list& found, const py::list& tokens, const py::object& blocks) {
  py::array table = plain(tables, "tables", kInt32, "int32", 2);
  py::array pool = plain(token_ids, "token_ids", kInt32, "int32", 2);
  require(found.size() == rows.size(), "found", "has another length than rows");
  require(tokens.size() == rows.size(), "tokens", "has another length than rows");
  const py::array added = int64_vector(blocks, "blocks");
  std::vector<py::array> kept;  // the arrays that the sequences point to
  std::vector<NewSequence> sequences;
  kept.reserve(2 * rows.size());
  sequences.reserve(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const py::array& hits = kept.emplace_back(int64_vector(found[i], "found"));
    const py::array& prompt = kept.emplace_back(int32_vector(tokens[i], "tokens"));
    sequences.push_back(
        {rows[i], int64_of(hits), hits.shape(0), static_cast<const int32_t*>(prompt.data()), prompt.shape(0)});
  }
  fill_sequences(static_cast<int32_t*>(table.mutable_data()), table.shape(0), table.shape(1),
                 static_cast<int32_t*>(pool.mutable_data()), pool.shape(0), block_shift(pool), sequences,
                 int64_of(added), added.shape(0));
}

py::tuple add(const py::object& ref_count, const py::object& blocks) {
  py::array counted = plain(ref_count, "ref_count", kInt32, "int32", 1);
  const py::array referenced = int64_vector(blocks, "blocks");
  const AddedReferences added = add_references(static_cast<int32_t*>(counted.mutable_data()), counted.shape(0),
                                               int64_of(referenced), referenced.shape(0));
  return py::make_tuple(to_array(added.first), added.num_shared);
}

// An element of `index` is read after all look-ups, so that the processor loads many of them at a time.
py::tuple match(const py::dict& index, const py::list& hashes, size_t limit, const py::object& ref_count) {
  const py::array counted = plain(ref_count, "ref_count", kInt32, "int32", 1);
  const auto* counts = static_cast<const int32_t*>(counted.data());
  const size_t most = std::min(limit, hashes.size());
  std::vector<PyObject*> found;
  found.reserve(most);
  for (size_t i = 0; i < most; ++i) {
    PyObject* key = PyList_GET_ITEM(hashes.ptr(), static_cast<Py_ssize_t>(i));
    require(PyBytes_CheckExact(key), "hashes", "is not bytes");
    PyObject* block = PyDict_GetItemWithError(index.ptr(), key);
    if (block == nullptr) break;
    __builtin_prefetch(block);
    found.push_back(block);
  }
  py::array_t<int64_t> blocks(static_cast<py::ssize_t>(found.size()));
  int64_t* out = blocks.mutable_data();
  int64_t num_held = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    out[i] = as_int(found[i], "index");
    require(out[i] >= 0 && out[i] < counted.shape(0), "index", "has a block outside the pool");
    __builtin_prefetch(counts + out[i]);
  }
  for (size_t i = 0; i < found.size(); ++i) num_held += counts[out[i]] != 0 ? 1 : 0;
  return py::make_tuple(std::move(blocks), num_held);
}

}  // namespace

void define_blocks(py::module_& m) {
  m.def("slot_mapping", &slots, py::arg("tables"), py::arg("rows"), py::arg("starts"), py::arg("counts"),
        py::arg("shift"));
  m.def("shared_entries", &shared, py::arg("tables"), py::arg("rows"), py::arg("starts"), py::arg("counts"),
        py::arg("ref_count"), py::arg("indexed"));
  m.def("fill_sequences", &fill, py::arg("tables"), py::arg("token_ids"), py::arg("rows"), py::arg("found"),
        py::arg("tokens"), py::arg("blocks"));
  m.def("match_hashes", &match, py::arg("index"), py::arg("hashes"), py::arg("limit"), py::arg("ref_count"));
  m.def("add_references", &add, py::arg("ref_count"), py::arg("blocks"));
}

}  // namespace kvservice
