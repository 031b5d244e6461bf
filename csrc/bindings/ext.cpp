// The module _ext (kvservice/_ext.pyi): checks types, shapes and ranges, releases the GIL and calls the kernels.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention.h"
#include "bindings/arguments.h"
#include "bindings/blocks.h"
#include "bindings/disk.h"
#include "bindings/exceptions.h"
#include "bindings/gil.h"
#include "bindings/lane.h"
#include "bindings/packed.h"
#include "bindings/store.h"
#include "bindings/wire.h"
#include "copy_blocks.h"
#include "cpu/attention_kernel.h"
#include "cpu/parallel.h"
#include "errors.h"
#include "kv_slots.h"
#include "lane/cpu_executor.h"

namespace py = pybind11;

namespace kvservice {
namespace {

constexpr int64_t kHeadSizeMin = 32, kHeadSizeMax = 256, kBlockSizeMax = 256;

// NumPy assigns the type number when ml_dtypes is imported.
int bfloat16_num = -1;

enum class Access { kRead, kWrite };

// Returns an array of the given dtype and shape. Copies it if it is not contiguous.
py::array input(const py::handle& object, const char* field, int type_num, const char* type_name,
                const std::vector<int64_t>& shape) {
  py::array array = as_array(object, field, type_num, type_name);
  check_shape(array, field, shape);
  if (is_plain(array)) return array;
  return array.attr("copy")("C").cast<py::array>();
}

py::array int_vector(const py::handle& object, const char* field, int type_num, const char* type_name) {
  const py::array array = as_array(object, field, type_num, type_name);
  return input(array, field, type_num, type_name, {array.ndim() == 1 ? array.shape(0) : 0});
}

DType pool_dtype(const py::array& pool, const char* field) {
  const int num = pool.dtype().num();
  if (pool.dtype().byteorder() != '>') {
    if (num == kFloat32) return DType::kFloat32;
    if (num == kFloat16) return DType::kFloat16;
    if (num == bfloat16_num) return DType::kBFloat16;
  }
  throw ArgumentError(
      field, "has dtype " + py::str(pool.dtype()).cast<std::string>() + ", expected float32, float16 or bfloat16");
}

// Checks everything except the head size, which follows from other arguments, and the block size, which follows from
// the head size.
PoolView view_pool(const py::handle& object, const char* field, Access access) {
  if (!py::isinstance<py::array>(object)) throw ArgumentError(field, "is not a NumPy array");
  const auto pool = py::reinterpret_borrow<py::array>(object);
  PoolView view;
  view.dtype = pool_dtype(pool, field);
  require(pool.ndim() == 5, field, "expected shape [num_blocks, num_layers, 2, num_kv_heads, head_size * block_size]");
  require(pool.shape(2) == 2, field, "dimension 2 is not 2 (keys, values)");
  require(is_plain(pool), field, "is not contiguous");
  require(access == Access::kRead || pool.writeable(), field, "is read-only");
  for (int i = 0; i < 5; ++i) require(pool.shape(i) > 0, field, "has an empty dimension");
  view.data = const_cast<char*>(static_cast<const char*>(pool.data()));
  view.num_blocks = pool.shape(0);
  view.num_layers = pool.shape(1);
  view.num_kv_heads = pool.shape(3);
  view.head_size = 0;
  view.block_size = pool.shape(4);
  return view;
}

void set_head_size(PoolView& pool, int64_t head_size, const char* field) {
  require(head_size >= kHeadSizeMin && head_size <= kHeadSizeMax && head_size % 8 == 0, field,
          "head size is not a multiple of 8 between 32 and 256");
  require(pool.block_size % head_size == 0, field, "head size does not divide the pool's last dimension");
  pool.head_size = head_size;
  pool.block_size /= head_size;
  require(pool.block_size <= kBlockSizeMax && (pool.block_size & (pool.block_size - 1)) == 0, "pool",
          "block size is not a power of two up to 256");
}

int64_t check_layer(const py::handle& object, const PoolView& pool) {
  const int64_t layer = as_int(object, "layer");
  if (layer < 0 || layer >= pool.num_layers) {
    throw ArgumentError("layer",
                        std::to_string(layer) + " is outside a pool of " + std::to_string(pool.num_layers) + " layers");
  }
  return layer;
}

int type_num(DType dtype) {
  return dtype == DType::kFloat32 ? kFloat32 : dtype == DType::kFloat16 ? kFloat16 : bfloat16_num;
}

constexpr const char* kPoolsDtype = "the pool's dtype";

void write_kv(const py::object& pool, const py::object& layer, const py::object& slot_mapping, const py::object& key,
              const py::object& value) {
  KvSlotsParams p;
  p.pool = view_pool(pool, "pool", Access::kWrite);
  p.layer = check_layer(layer, p.pool);
  const py::array slots = int_vector(slot_mapping, "slot_mapping", int64_num(), "int64");
  const int num = type_num(p.pool.dtype);
  const py::array any_key = as_array(key, "key", num, kPoolsDtype);
  require(any_key.ndim() == 3, "key", "expected shape [num_tokens, num_kv_heads, head_size]");
  set_head_size(p.pool, any_key.shape(2), "key");
  p.num_tokens = slots.shape(0);
  const std::vector<int64_t> shape = {p.num_tokens, p.pool.num_kv_heads, p.pool.head_size};
  const py::array plain_key = input(key, "key", num, kPoolsDtype, shape);
  const py::array plain_value = input(value, "value", num, kPoolsDtype, shape);
  p.slots = static_cast<const int64_t*>(slots.data());
  p.key = const_cast<char*>(static_cast<const char*>(plain_key.data()));
  p.value = const_cast<char*>(static_cast<const char*>(plain_value.data()));
  const WithoutGil without_gil;
  check_slots(p, "slot_mapping");
  write_kv_cpu(p);
}

py::tuple read_kv(const py::object& pool, const py::object& layer, const py::object& slots,
                  const py::object& head_size) {
  KvSlotsParams p;
  p.pool = view_pool(pool, "pool", Access::kRead);
  p.layer = check_layer(layer, p.pool);
  set_head_size(p.pool, as_int(head_size, "head_size"), "head_size");
  const py::array plain_slots = int_vector(slots, "slots", int64_num(), "int64");
  p.num_tokens = plain_slots.shape(0);
  p.slots = static_cast<const int64_t*>(plain_slots.data());
  check_slots(p, "slots");  // before the result is allocated
  const std::vector<int64_t> shape = {p.num_tokens, p.pool.num_kv_heads, p.pool.head_size};
  const py::dtype dtype = pool.cast<py::array>().dtype();
  py::array key(dtype, shape), value(dtype, shape);
  p.key = static_cast<char*>(key.mutable_data());
  p.value = static_cast<char*>(value.mutable_data());
  {
    const WithoutGil without_gil;
    read_kv_cpu(p);
  }
  return py::make_tuple(std::move(key), std::move(value));
}

// Returns the caller's array for the result, or a new one.
py::array output(const py::object& out, const py::array& query) {
  if (out.is_none()) return {query.dtype(), shape_of(query)};
  py::array array = as_array(out, "out", query.dtype().num(), kPoolsDtype);
  check_shape(array, "out", shape_of(query));
  require(is_plain(array), "out", "is not contiguous");
  require(array.writeable(), "out", "is read-only");
  const auto* first = static_cast<const char*>(array.data());
  const auto* other = static_cast<const char*>(query.data());
  require(first + array.nbytes() <= other || other + query.nbytes() <= first || array.nbytes() == 0, "out",
          "shares memory with query");
  return array;
}

py::object attention(const py::object& pool, const py::object& layer, const py::object& query,
                     const py::object& query_lens, const py::object& block_tables, const py::object& context_lens,
                     const py::object& scale, const py::object& sliding_window, const py::object& logits_soft_cap,
                     const py::object& alibi_slopes, const py::object& out, bool return_lse) {
  AttentionParams p;
  p.pool = view_pool(pool, "pool", Access::kRead);
  p.layer = check_layer(layer, p.pool);
  const int num = type_num(p.pool.dtype);
  const py::array any_query = as_array(query, "query", num, kPoolsDtype);
  require(any_query.ndim() == 3, "query", "expected shape [num_tokens, num_heads, head_size]");
  set_head_size(p.pool, any_query.shape(2), "query");
  p.num_tokens = any_query.shape(0);
  p.num_heads = any_query.shape(1);
  require(p.num_heads > 0 && p.num_heads % p.pool.num_kv_heads == 0, "query",
          "number of heads is not a multiple of the pool's");
  const py::array plain_query = input(query, "query", num, kPoolsDtype, shape_of(any_query));
  const py::array plain_lens = int_vector(query_lens, "query_lens", kInt32, "int32");
  p.num_seqs = plain_lens.shape(0);
  const py::array any_tables = as_array(block_tables, "block_tables", kInt32, "int32");
  require(any_tables.ndim() == 2, "block_tables", "expected shape [num_seqs, max_blocks]");
  p.max_blocks = any_tables.shape(1);
  const py::array tables = input(block_tables, "block_tables", kInt32, "int32", {p.num_seqs, p.max_blocks});
  const py::array contexts = input(context_lens, "context_lens", kInt32, "int32", {p.num_seqs});
  p.scale = scale.is_none() ? 1.0F / std::sqrt(static_cast<float>(p.pool.head_size)) : as_float(scale, "scale");
  p.sliding_window = as_int(sliding_window, "sliding_window");
  p.soft_cap = as_float(logits_soft_cap, "logits_soft_cap");
  check_options(p.options(), p.pool.block_size, "");
  py::array slopes;
  if (!alibi_slopes.is_none()) {
    slopes = input(alibi_slopes, "alibi_slopes", kFloat32, "float32", {p.num_heads});
    p.alibi_slopes = static_cast<const float*>(slopes.data());
    check_slopes(p.alibi_slopes, p.num_heads, "");
  }
  p.query = plain_query.data();
  p.query_lens = static_cast<const int32_t*>(plain_lens.data());
  p.block_tables = static_cast<const int32_t*>(tables.data());
  p.context_lens = static_cast<const int32_t*>(contexts.data());
  check_attention(p);

  py::array result = output(out, plain_query);
  p.out = result.mutable_data();
  py::object lse = py::none();
  if (return_lse) {
    py::array_t<float> sums({p.num_tokens, p.num_heads});
    p.lse = sums.mutable_data();
    lse = std::move(sums);
  }
  {
    const WithoutGil without_gil;
    attention_cpu(p);
  }
  if (return_lse) return py::make_tuple(std::move(result), std::move(lse));
  return std::move(result);
}

void copy_blocks(const py::object& src_pool, const py::object& dst_pool, const py::object& src_ids,
                 const py::object& dst_ids) {
  const PoolView src = view_pool(src_pool, "src_pool", Access::kRead);
  const PoolView dst = view_pool(dst_pool, "dst_pool", Access::kWrite);
  require(src.dtype == dst.dtype && src.num_layers == dst.num_layers && src.num_kv_heads == dst.num_kv_heads &&
              src.block_size == dst.block_size,
          "dst_pool", "its blocks are not like those of src_pool");
  const py::array from = int_vector(src_ids, "src_ids", kInt32, "int32");
  const py::array to = input(dst_ids, "dst_ids", kInt32, "int32", {from.shape(0)});
  CopyBlocksParams p;
  p.src = src.data;
  p.dst = dst.data;
  p.num_src_blocks = src.num_blocks;
  p.num_dst_blocks = dst.num_blocks;
  p.block_bytes = src.num_layers * 2 * src.num_kv_heads * src.block_size * item_size(src.dtype);
  p.num_copies = from.shape(0);
  p.src_ids = static_cast<const int32_t*>(from.data());
  p.dst_ids = static_cast<const int32_t*>(to.data());
  const WithoutGil without_gil;
  check_copy_blocks(p);
  copy_blocks_cpu(p);
}

std::unique_ptr<CpuLaneExecutor> make_lane_executor(const py::object& pool, const py::object& head_size,
                                                    bool batch_invariant) {
  PoolView view = view_pool(pool, "pool", Access::kWrite);
  set_head_size(view, as_int(head_size, "head_size"), "head_size");
  return std::make_unique<CpuLaneExecutor>(view, batch_invariant);
}

// Allocates the pages of memory of this process that is mapped for writing. Returns 0 or errno. Threads that change
// mappings wait for a step, and page faults may wait for these. All steps are one call, because a thread of low
// priority that had the interpreter lock in between could be kept from giving it back.
int populate(const py::object& address, const py::object& num_bytes) {
  constexpr int64_t kStepBytes = int64_t{2} << 20;
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which C libraries before 2.35 do not name
  char* const begin = as_address(address, "address");
  const int64_t size = as_int(num_bytes, "num_bytes");
  const WithoutGil without_gil;
  for (int64_t at = 0; at < size; at += kStepBytes) {
    if (madvise(begin + at, static_cast<size_t>(std::min(kStepBytes, size - at)), kPopulateWrite) != 0) return errno;
  }
  return 0;
}

// Returns the address of the first element, or None if the array is not C-contiguous. NumPy's own attributes take a
// microsecond.
py::object address_of(const py::array& array) {
  if (!is_plain(array)) return py::none();
  return py::int_(reinterpret_cast<uintptr_t>(array.data()));
}

}  // namespace
}  // namespace kvservice

PYBIND11_MODULE(_ext, m) {
  using namespace kvservice;
  bfloat16_num = py::dtype::from_args(py::module_::import("ml_dtypes").attr("bfloat16")).num();
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const ArgumentError& error) {
      raise_argument_error(error);
    }
  });
  m.def("write_kv", &write_kv);
  m.def("read_kv", &read_kv);
  m.def("attention", &attention);
  m.def("copy_blocks", &copy_blocks);
  m.def("set_num_threads", [](const py::object& count) { set_num_threads(as_int(count, "count")); });
  m.def("num_threads", &num_threads);
  m.def("cpu_isa", [] { return cpu_kernels().isa; });
  m.def("address_of", &address_of);
  m.def("populate", &populate, py::arg("address"), py::arg("num_bytes"));
  define_blocks(m);
  define_lane(m);
  define_store(m);
  define_disk(m);
  define_wire(m);
  m.attr("CPU_SIZE_CLASSES") = py::tuple(py::cast(kSizeClasses));
  py::class_<CpuLaneExecutor, LaneExecutor>(m, "CpuLaneExecutor", py::module_local())
      .def(py::init(&make_lane_executor), py::arg("pool"), py::arg("head_size"), py::arg("batch_invariant"),
           py::keep_alive<1, 2>());
}
