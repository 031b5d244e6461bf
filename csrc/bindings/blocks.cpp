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

py::tuple add(const py::object& ref_count, const py::object& blocks) {
  py::array counted = plain(ref_count, "ref_count", kInt32, "int32", 1);
  const py::array referenced = int64_vector(blocks, "blocks");
  const AddedReferences added = add_references(static_cast<int32_t*>(counted.mutable_data()), counted.shape(0),
                                               int64_of(referenced), referenced.shape(0));
  return py::make_tuple(to_array(added.first), added.num_shared);
}

py::tuple drop(const py::object& ref_count, const py::object& blocks) {
  py::array counted = plain(ref_count, "ref_count", kInt32, "int32", 1);
  const py::array released = int64_vector(blocks, "blocks");
  const DroppedReferences dropped = drop_references(static_cast<int32_t*>(counted.mutable_data()), counted.shape(0),
                                                    int64_of(released), released.shape(0));
  return py::make_tuple(to_array(dropped.last), dropped.num_unshared);
}

py::tuple distinct(const py::object& blocks) {
  const py::array all = int64_vector(blocks, "blocks");
  py::array_t<int64_t> inverse(all.shape(0));
  const DistinctBlocks found = distinct_blocks(int64_of(all), all.shape(0), inverse.mutable_data());
  return py::make_tuple(to_array(found.blocks), std::move(inverse), to_array(found.counts));
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

// Returns None if an id is unknown or occurs twice.
py::object rows_of(const py::dict& rows, const py::object& ids) {
  const py::array names = int64_vector(ids, "ids");
  const int64_t* name = int64_of(names);
  py::array_t<int64_t> found(names.shape(0));
  int64_t* row = found.mutable_data();
  for (py::ssize_t i = 0; i < names.shape(0); ++i) {
    const py::int_ key(name[i]);
    PyObject* value = PyDict_GetItemWithError(rows.ptr(), key.ptr());
    if (value == nullptr) return py::none();
    row[i] = as_int(value, "rows");
  }
  std::vector<int64_t> sorted(row, row + names.shape(0));
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) return py::none();
  return std::move(found);
}

// Returns -1 if there is none.
int64_t negative(const py::object& numbers) {
  const py::array all = int32_vector(numbers, "numbers");
  return first_negative(static_cast<const int32_t*>(all.data()), all.shape(0));
}

bool has_type(const py::handle& object, int type_num) {
  if (!py::isinstance<py::array>(object)) return false;
  const auto array = py::reinterpret_borrow<py::array>(object);
  return array.dtype().num() == type_num && array.dtype().byteorder() != '>' && array.ndim() == 1 && is_plain(array);
}

// See blocks/tables.h. It holds the arrays of a pool, because checking them takes longer than a step of one sequence.
class Steps {
 public:
  Steps(const py::object& tables, const py::object& states, const py::object& ref_count, const py::object& indexed,
        const py::object& token_ids, int64_t max_length)
      : tables_(plain(tables, "tables", kInt32, "int32", 2)),
        states_(plain(states, "states", int64_num(), "int64", 2)),
        ref_count_(plain(ref_count, "ref_count", kInt32, "int32", 1)),
        indexed_(plain(indexed, "indexed", py::detail::npy_api::NPY_BOOL_, "bool", 1)),
        token_ids_(plain(token_ids, "token_ids", kInt32, "int32", 2)) {
    require(indexed_.shape(0) == ref_count_.shape(0), "indexed", "has another length than ref_count");
    require(token_ids_.shape(0) == ref_count_.shape(0), "token_ids", "has another length than ref_count");
    require(states_.shape(0) == tables_.shape(0), "states", "has another length than tables");
    require(states_.shape(1) >= kStepColumns, "states", "has too few columns");
    pool_ = {static_cast<int32_t*>(tables_.mutable_data()),
             tables_.shape(0),
             tables_.shape(1),
             static_cast<int64_t*>(states_.mutable_data()),
             states_.shape(1),
             static_cast<int32_t*>(ref_count_.mutable_data()),
             static_cast<const bool*>(indexed_.data()),
             static_cast<int32_t*>(token_ids_.mutable_data()),
             ref_count_.shape(0),
             block_shift(token_ids_),
             max_length};
  }

  py::object plan_decode(const py::object& rows, const py::object& tokens, const py::object& expected,
                         const py::object& states) const {
    const py::array row = plain(rows, "rows", int64_num(), "int64", 1);
    const py::ssize_t size = row.shape(0);
    DecodeBatch batch = {int64_of(row), nullptr, nullptr, nullptr, size};
    py::array state;
    if (!states.is_none()) {
      state = plain(states, "states", int64_num(), "int64", 2);
      require(state.shape(0) == size, "states", "has another length than rows");
      require(state.shape(1) == pool_.num_columns, "states", "has another number of columns");
      batch.states = int64_of(state);
    }
    if (!has_type(tokens, kInt32) || !(expected.is_none() || has_type(expected, int64_num()))) return py::none();
    const auto token = py::reinterpret_borrow<py::array>(tokens);
    if (token.shape(0) != size) return py::none();
    batch.tokens = static_cast<const int32_t*>(token.data());
    if (!expected.is_none()) {
      const auto lengths = py::reinterpret_borrow<py::array>(expected);
      if (lengths.shape(0) != size) return py::none();
      batch.expected = int64_of(lengths);
    }
    py::array_t<int64_t> lengths(size), slots(size);
    py::array_t<int32_t> context_lens(size);
    DecodePlan plan = {lengths.mutable_data(), context_lens.mutable_data(), slots.mutable_data(), {}};
    if (!kvservice::plan_decode(pool_, batch, plan)) return py::none();
    return py::make_tuple(std::move(lengths), std::move(context_lens), std::move(slots),
                          plan.fresh.empty() ? py::none() : py::object(to_array(plan.fresh)));
  }

  void append(const py::object& rows, const py::object& slots, const py::object& tokens, const py::object& fresh,
              const py::object& blocks) {
    const py::array row = plain(rows, "rows", int64_num(), "int64", 1);
    const py::array token = plain(tokens, "tokens", kInt32, "int32", 1);
    py::array slot = plain(slots, "slots", int64_num(), "int64", 1);
    require(slot.shape(0) == row.shape(0), "slots", "has another length than rows");
    require(token.shape(0) == row.shape(0), "tokens", "has another length than rows");
    py::array index, block;
    const int64_t *indices = nullptr, *added = nullptr;
    int64_t num_fresh = 0;
    if (!fresh.is_none()) {
      index = int64_vector(fresh, "fresh");
      block = int64_vector(blocks, "blocks");
      num_fresh = index.shape(0);
      require(block.shape(0) == num_fresh, "blocks", "has another length than fresh");
      indices = int64_of(index);
      added = int64_of(block);
    }
    append_tokens(pool_, int64_of(row), static_cast<int64_t*>(slot.mutable_data()),
                  static_cast<const int32_t*>(token.data()), row.shape(0), indices, added, num_fresh);
  }

  std::vector<int64_t> start(const py::object& rows, const py::object& lengths, int64_t step_id) {
    const py::array row = plain(rows, "rows", int64_num(), "int64", 1);
    const py::array length = int64_vector(lengths, "lengths");
    require(length.shape(0) == row.shape(0), "lengths", "has another length than rows");
    return start_step(pool_, int64_of(row), int64_of(length), row.shape(0), step_id);
  }

  void create(const std::vector<int64_t>& rows, const py::list& found, const py::list& tokens,
              const py::object& blocks) {
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
    create_sequences(pool_, sequences, int64_of(added), added.shape(0));
  }

  int64_t fork(int64_t parent, int64_t child) { return fork_row(pool_, parent, child); }

  py::object full_blocks(const py::object& rows, const py::object& context_lens) const {
    const py::array row = int64_vector(rows, "rows");
    const py::array length = int32_vector(context_lens, "context_lens");
    require(length.shape(0) == row.shape(0), "context_lens", "has another length than rows");
    const FullBlocks full =
        kvservice::full_blocks(pool_, int64_of(row), static_cast<const int32_t*>(length.data()), row.shape(0));
    if (full.blocks.empty()) return py::none();
    return py::make_tuple(full.rows, full.entries, to_array(full.blocks), full.before);
  }

 private:
  py::array tables_, states_, ref_count_;
  const py::array indexed_;
  py::array token_ids_;
  StepTables pool_ = {};
};

}  // namespace

void define_blocks(py::module_& m) {
  m.def("slot_mapping", &slots, py::arg("tables"), py::arg("rows"), py::arg("starts"), py::arg("counts"),
        py::arg("shift"));
  m.def("shared_entries", &shared, py::arg("tables"), py::arg("rows"), py::arg("starts"), py::arg("counts"),
        py::arg("ref_count"), py::arg("indexed"));
  m.def("match_hashes", &match, py::arg("index"), py::arg("hashes"), py::arg("limit"), py::arg("ref_count"));
  m.def("rows_of", &rows_of, py::arg("rows"), py::arg("ids"));
  m.def("first_negative", &negative, py::arg("numbers"));
  m.def("add_references", &add, py::arg("ref_count"), py::arg("blocks"));
  m.def("drop_references", &drop, py::arg("ref_count"), py::arg("blocks"));
  m.def("distinct_blocks", &distinct, py::arg("blocks"));
  py::class_<Steps>(m, "StepTables")
      .def(py::init<const py::object&, const py::object&, const py::object&, const py::object&, const py::object&,
                    int64_t>(),
           py::arg("tables"), py::arg("states"), py::arg("ref_count"), py::arg("indexed"), py::arg("token_ids"),
           py::arg("max_length"))
      .def("plan_decode", &Steps::plan_decode, py::arg("rows"), py::arg("tokens"), py::arg("expected") = py::none(),
           py::arg("states") = py::none())
      .def("append", &Steps::append, py::arg("rows"), py::arg("slots"), py::arg("tokens"), py::arg("fresh"),
           py::arg("blocks"))
      .def("start", &Steps::start, py::arg("rows"), py::arg("lengths"), py::arg("step_id"))
      .def("create", &Steps::create, py::arg("rows"), py::arg("found"), py::arg("tokens"), py::arg("blocks"))
      .def("fork", &Steps::fork, py::arg("parent"), py::arg("child"))
      .def("full_blocks", &Steps::full_blocks, py::arg("rows"), py::arg("context_lens"));
}

}  // namespace kvservice
