// The module _cuda (kvservice/_cuda.pyi). Integers become pointers, errors become exceptions. Calls that may wait for
// the device or for space in a stream release the GIL.
#include "bindings/cuda_handles.h"

#include <pybind11/numpy.h>

#include <string>
#include <tuple>

#include "bindings/exceptions.h"
#include "bindings/gil.h"
#include "cuda/attention.h"
#include "cuda/copy_blocks.h"
#include "cuda/decode_tables.h"
#include "cuda/kv_slots.h"
#include "cuda/move_blocks.h"
#include "cuda/runtime.h"

namespace py = pybind11;

namespace kvservice {
namespace {

// --- the device

int device_count() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaErrorNoDevice || code == cudaErrorInsufficientDriver || code == cudaErrorStubLibrary) {
    clear_error(code);
    return 0;
  }
  check_cuda(code, "cudaGetDeviceCount");
  return count;
}

py::dict device_facts(int device) {
  cudaDeviceProp facts;
  {
    const WithoutGil without_gil;
    check_cuda(cudaGetDeviceProperties(&facts, device), "cudaGetDeviceProperties");
  }
  py::dict result;
  result["name"] = std::string(facts.name);
  result["major"] = facts.major;
  result["minor"] = facts.minor;
  result["num_multiprocessors"] = facts.multiProcessorCount;
  result["l2_bytes"] = facts.l2CacheSize;
  result["total_bytes"] = facts.totalGlobalMem;
  return result;
}

std::tuple<size_t, size_t> memory_info(int device) {
  const DeviceScope scope(device);
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return {free, total};
}

void set_device(int device) { check_cuda(cudaSetDevice(device), "cudaSetDevice"); }

// --- kernels

template <void (*move)(const KvSlotsParams&, cudaStream_t)>
void move_kv(uintptr_t pool, int pool_dtype, int64_t num_blocks, int64_t num_layers, int64_t num_kv_heads,
             int64_t head_size, int64_t block_size, int64_t layer, int64_t num_tokens, uintptr_t slots, uintptr_t key,
             uintptr_t value, int dtype, uintptr_t k_scale, uintptr_t v_scale, uintptr_t stream) {
  KvSlotsParams p;
  p.pool = {at<char>(pool), dtype_of(pool_dtype, "pool"), num_blocks, num_layers, num_kv_heads, head_size, block_size};
  p.dtype = dtype_of(dtype, "key");
  p.k_scale = at<float>(k_scale);
  p.v_scale = at<float>(v_scale);
  p.layer = layer;
  p.num_tokens = num_tokens;
  p.slots = at<int64_t>(slots);
  p.key = at<char>(key);
  p.value = at<char>(value);
  move(p, stream_at(stream));
}

template <void (*move)(const KvSlotsParams&, cudaStream_t)>
void define_move_kv(py::module_& m, const char* name, const char* slots) {
  m.def(name, &move_kv<move>, py::arg("pool"), py::arg("pool_dtype"), py::arg("num_blocks"), py::arg("num_layers"),
        py::arg("num_kv_heads"), py::arg("head_size"), py::arg("block_size"), py::arg("layer"), py::arg("num_tokens"),
        py::arg(slots), py::arg("key"), py::arg("value"), py::arg("dtype"), py::arg("k_scale"), py::arg("v_scale"),
        py::arg("stream"), Unlocked());
}

struct Attention {
  uintptr_t pool = 0, query = 0, query_lens = 0, block_tables = 0, context_lens = 0, alibi_slopes = 0, k_scale = 0,
            v_scale = 0, out = 0, lse = 0, workspace = 0, stream = 0;
  int pool_dtype = 0, dtype = 0;
  int64_t num_blocks = 0, num_layers = 0, num_kv_heads = 0, head_size = 0, block_size = 0, layer = 0, num_tokens = 0,
          num_seqs = 0, num_heads = 0, max_blocks = 0, max_query_len = 0, num_common_blocks = 0, sliding_window = 0,
          workspace_bytes = 0;
  float scale = 1.0F, soft_cap = 0.0F;
  std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t> sparse = {0, 0, 64, 0, 0};
  bool batch_invariant = false;
  std::string kernel = "auto";

  AttentionParams params() const {
    AttentionParams p;
    p.pool = {at<char>(pool), dtype_of(pool_dtype, "pool"), num_blocks, num_layers, num_kv_heads, head_size,
              block_size};
    p.dtype = dtype_of(dtype, "query");
    p.layer = layer;
    p.num_tokens = num_tokens;
    p.num_seqs = num_seqs;
    p.num_heads = num_heads;
    p.max_blocks = max_blocks;
    p.max_query_len = max_query_len;
    p.num_common_blocks = num_common_blocks;
    p.query = at<>(query);
    p.query_lens = at<int32_t>(query_lens);
    p.block_tables = at<int32_t>(block_tables);
    p.context_lens = at<int32_t>(context_lens);
    p.alibi_slopes = at<float>(alibi_slopes);
    p.k_scale = at<float>(k_scale);
    p.v_scale = at<float>(v_scale);
    std::tie(p.sparse.vert_stride, p.sparse.local_blocks, p.sparse.block_size, p.sparse.head_sliding_step,
             p.sparse.tp_rank) = sparse;
    p.scale = scale;
    p.soft_cap = soft_cap;
    p.sliding_window = sliding_window;
    p.out = at<>(out);
    p.lse = at<float>(lse);
    return p;
  }

  CudaLaunch how() const {
    CudaLaunch launch;
    launch.stream = stream_at(stream);
    launch.workspace = {at<>(workspace), workspace_bytes};
    launch.batch_invariant = batch_invariant;
    launch.kernel = kernel_choice();
    return launch;
  }

  KernelChoice kernel_choice() const {
    if (kernel == "auto") return KernelChoice::kAuto;
    if (kernel == "reference") return KernelChoice::kReference;
    if (kernel == "decode") return KernelChoice::kDecode;
    if (kernel == "extend") return KernelChoice::kExtend;
    if (kernel == "cascade") return KernelChoice::kCascade;
    throw ArgumentError("kernel", "is " + kernel + ", expected auto, reference, decode, extend or cascade");
  }

  int64_t wanted_workspace_bytes() const { return attention_workspace_bytes(params(), how()); }
  void launch() const { attention_cuda(params(), how()); }
};

using Ids = py::array_t<int32_t, py::array::c_style>;

Ids ids_of(const py::object& object, const char* field) {
  require(py::isinstance<py::array_t<int32_t>>(object), field, "is not a NumPy array of int32");
  auto ids = Ids::ensure(object);
  require(ids && ids.ndim() == 1, field, "is not one-dimensional");
  return ids;
}

void copy_blocks(uintptr_t src, uintptr_t dst, int64_t num_src_blocks, int64_t num_dst_blocks, int64_t block_bytes,
                 const py::object& src_ids, const py::object& dst_ids, uintptr_t stream) {
  const Ids from = ids_of(src_ids, "src_ids"), to = ids_of(dst_ids, "dst_ids");
  require(from.size() == to.size(), "dst_ids", "does not have the length of src_ids");
  CopyBlocksParams p;
  p.src = at<char>(src);
  p.dst = at<char>(dst);
  p.num_src_blocks = num_src_blocks;
  p.num_dst_blocks = num_dst_blocks;
  p.block_bytes = block_bytes;
  p.num_copies = from.size();
  p.src_ids = from.data();
  p.dst_ids = to.data();
  const WithoutGil without_gil;
  check_copy_blocks(p);
  copy_blocks_cuda(p, stream_at(stream));
}

void advance_tables(uintptr_t positions, uintptr_t growth, uintptr_t shift, uintptr_t block_tables,
                    uintptr_t context_lens, uintptr_t slot_mapping, int64_t num_rows, int64_t max_blocks,
                    int64_t block_size, uintptr_t stream) {
  DecodeTables t;
  t.positions = at<int64_t>(positions);
  t.growth = at<int64_t>(growth);
  t.shift = at<int64_t>(shift);
  t.block_tables = at<int32_t>(block_tables);
  t.context_lens = at<int32_t>(context_lens);
  t.slot_mapping = at<int64_t>(slot_mapping);
  t.num_rows = num_rows;
  t.max_blocks = max_blocks;
  t.block_size = block_size;
  const WithoutGil without_gil;
  advance_tables_cuda(t, stream_at(stream));
}

template <class T>
py::array_t<T, py::array::c_style> numbers_of(const py::object& object, const char* field) {
  using Numbers = py::array_t<T, py::array::c_style>;
  require(Numbers::check_(object), field, "has another type than a contiguous NumPy array of 64-bit numbers");
  auto numbers = py::reinterpret_borrow<Numbers>(object);
  require(numbers.ndim() == 1, field, "is not one-dimensional");
  return numbers;
}

MoveBlocksParams move_blocks_params(uintptr_t pieces, int64_t num_pieces, int64_t block_bytes,
                                    const py::array_t<uint64_t, py::array::c_style>& addresses,
                                    const py::array_t<int64_t, py::array::c_style>& block_ids) {
  require(addresses.size() == block_ids.size(), "block_ids", "does not have the length of addresses");
  MoveBlocksParams p;
  p.pieces = at<int64_t>(pieces);
  p.num_pieces = num_pieces;
  p.block_bytes = block_bytes;
  p.num_copies = addresses.size();
  p.addresses = addresses.data();
  p.block_ids = block_ids.data();
  return p;
}

// Calls `move` with a batch of copies.
template <class Move>
void move_blocks(uintptr_t pieces, int64_t num_pieces, int64_t block_bytes, const py::object& addresses,
                 const py::object& block_ids, Move move) {
  const auto places = numbers_of<uint64_t>(addresses, "addresses");
  const auto ids = numbers_of<int64_t>(block_ids, "block_ids");
  const MoveBlocksParams params = move_blocks_params(pieces, num_pieces, block_bytes, places, ids);
  const WithoutGil without_gil;
  move(params);
}

void define_block_stage(py::module_& m) {
  py::class_<BlockStage>(m, "BlockStage")
      .def(py::init<int, int64_t>(), py::arg("device"), py::arg("num_bytes"), Unlocked())
      .def(
          "load",
          [](BlockStage& stage, uintptr_t pieces, int64_t num_pieces, int64_t block_bytes, const py::object& addresses,
             const py::object& block_ids, uintptr_t stream) {
            move_blocks(pieces, num_pieces, block_bytes, addresses, block_ids,
                        [&](const MoveBlocksParams& params) { stage.load(params, stream_at(stream)); });
          },
          py::arg("pieces"), py::arg("num_pieces"), py::arg("block_bytes"), py::arg("addresses"), py::arg("block_ids"),
          py::arg("stream"))
      .def(
          "save",
          [](BlockStage& stage, uintptr_t pieces, int64_t num_pieces, int64_t block_bytes, const py::object& addresses,
             const py::object& block_ids, uintptr_t sums, uintptr_t checksums, uintptr_t stream) {
            const BlockChecksums to = {at<uint64_t>(sums), at<uint64_t>(checksums)};
            move_blocks(pieces, num_pieces, block_bytes, addresses, block_ids,
                        [&](const MoveBlocksParams& params) { stage.save(params, to, stream_at(stream)); });
          },
          py::arg("pieces"), py::arg("num_pieces"), py::arg("block_bytes"), py::arg("addresses"), py::arg("block_ids"),
          py::arg("sums"), py::arg("checksums"), py::arg("stream"))
      .def("synchronize", &BlockStage::synchronize, Unlocked());
}

// --- the module

PyObject* cuda_error_type = nullptr;  // never released

void raise_cuda_error(const CudaError& error) {
  const py::object instance = py::reinterpret_borrow<py::object>(cuda_error_type)(error.what());
  instance.attr("code") = static_cast<int>(error.code());
  PyErr_SetObject(cuda_error_type, instance.ptr());
}

void define_errors(py::module_& m) {
  cuda_error_type = PyErr_NewException("kvservice._cuda.CudaError", PyExc_RuntimeError, nullptr);
  if (cuda_error_type == nullptr) throw py::error_already_set();
  m.attr("CudaError") = py::reinterpret_borrow<py::object>(cuda_error_type);
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const ArgumentError& error) {
      raise_argument_error(error);
    } catch (const CudaError& error) {
      raise_cuda_error(error);
    }
  });
}

void define_device(py::module_& m) {
  m.def("device_count", &device_count, Unlocked());
  m.def("device_facts", &device_facts, py::arg("device"));
  m.def("memory_info", &memory_info, py::arg("device"), Unlocked());
  m.def("set_device", &set_device, py::arg("device"), Unlocked());
}

void define_attention(py::module_& m) {
  py::class_<Attention> type(m, "Attention");
  type.def(py::init<>());
  const auto field = [&](const char* name, auto member) { type.def_readwrite(name, member); };
  field("pool", &Attention::pool);
  field("pool_dtype", &Attention::pool_dtype);
  field("num_blocks", &Attention::num_blocks);
  field("num_layers", &Attention::num_layers);
  field("num_kv_heads", &Attention::num_kv_heads);
  field("head_size", &Attention::head_size);
  field("block_size", &Attention::block_size);
  field("layer", &Attention::layer);
  field("dtype", &Attention::dtype);
  field("num_tokens", &Attention::num_tokens);
  field("num_seqs", &Attention::num_seqs);
  field("num_heads", &Attention::num_heads);
  field("max_blocks", &Attention::max_blocks);
  field("max_query_len", &Attention::max_query_len);
  field("num_common_blocks", &Attention::num_common_blocks);
  field("query", &Attention::query);
  field("query_lens", &Attention::query_lens);
  field("block_tables", &Attention::block_tables);
  field("context_lens", &Attention::context_lens);
  field("alibi_slopes", &Attention::alibi_slopes);
  field("k_scale", &Attention::k_scale);
  field("v_scale", &Attention::v_scale);
  field("scale", &Attention::scale);
  field("soft_cap", &Attention::soft_cap);
  field("sliding_window", &Attention::sliding_window);
  field("sparse", &Attention::sparse);
  field("out", &Attention::out);
  field("lse", &Attention::lse);
  field("workspace", &Attention::workspace);
  field("workspace_bytes", &Attention::workspace_bytes);
  field("batch_invariant", &Attention::batch_invariant);
  field("kernel", &Attention::kernel);
  field("stream", &Attention::stream);
  type.def("wanted_workspace_bytes", &Attention::wanted_workspace_bytes);
  type.def("launch", &Attention::launch, Unlocked());
}

}  // namespace
}  // namespace kvservice

PYBIND11_MODULE(_cuda, m) {
  using namespace kvservice;
  define_errors(m);
  define_device(m);
  define_objects(m);
  define_lane_executor(m);
  define_attention(m);
  define_move_kv<write_kv_cuda>(m, "write_kv", "slot_mapping");
  define_move_kv<read_kv_cuda>(m, "read_kv", "slots");
  define_block_stage(m);
  m.def("copy_blocks", &copy_blocks, py::arg("src"), py::arg("dst"), py::arg("num_src_blocks"),
        py::arg("num_dst_blocks"), py::arg("block_bytes"), py::arg("src_ids"), py::arg("dst_ids"), py::arg("stream"));
  m.def("advance_tables", &advance_tables, py::arg("positions"), py::arg("growth"), py::arg("shift"),
        py::arg("block_tables"), py::arg("context_lens"), py::arg("slot_mapping"), py::arg("num_rows"),
        py::arg("max_blocks"), py::arg("block_size"), py::arg("stream"));
}
