// Python bindings of the CUDA lane executor.
#include <memory>

#include "bindings/cuda_handles.h"
#include "bindings/lane.h"
#include "cuda/lane_executor.h"
#include "lane/waiting.h"

namespace py = pybind11;

namespace kvservice {
namespace {

std::unique_ptr<CudaLaneExecutor> make_executor(int device, uintptr_t stream, uintptr_t pool, int pool_dtype,
                                                int64_t num_blocks, int64_t num_layers, int64_t num_kv_heads,
                                                int64_t head_size, int64_t block_size, int dtype, uintptr_t scales,
                                                bool batch_invariant, int64_t workspace_bytes, double spin_us) {
  CudaLaneConfig config;
  config.device = device;
  config.stream = stream_at(stream);
  config.pool = {at<char>(pool), dtype_of(pool_dtype, "pool"), num_blocks, num_layers, num_kv_heads, head_size,
                 block_size};
  config.dtype = dtype_of(dtype, "dtype");
  config.scales = at<float>(scales);
  config.batch_invariant = batch_invariant;
  config.workspace_bytes = workspace_bytes;
  config.spin = spin_time(spin_us);
  return std::make_unique<CudaLaneExecutor>(config);
}

}  // namespace

void define_lane_executor(py::module_& m) {
  define_lane(m);
  py::class_<CudaLaneExecutor, LaneExecutor>(m, "CudaLaneExecutor", py::module_local())
      .def(py::init(&make_executor), py::arg("device"), py::arg("stream"), py::arg("pool"), py::arg("pool_dtype"),
           py::arg("num_blocks"), py::arg("num_layers"), py::arg("num_kv_heads"), py::arg("head_size"),
           py::arg("block_size"), py::arg("dtype"), py::arg("scales"), py::arg("batch_invariant"),
           py::arg("workspace_bytes"), py::arg("spin_us"), Unlocked());
}

}  // namespace kvservice
