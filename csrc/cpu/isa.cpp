// Chooses the instruction set, once.
#ifdef KVSERVICE_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <string>

#include "cpu/attention_kernel.h"
#include "errors.h"

namespace kvservice {
namespace {

struct Variant {
  const char* name;
  bool supported;
  const CpuKernels& (*kernels)();
};

// The variants are in ascending order.
#ifdef KVSERVICE_X86
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// The operating system gives tile registers only to processes that have requested them.
bool has_amx_bf16() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!has_avx512_bf16() || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  const bool there = (edx & (1U << 22)) != 0 && (edx & (1U << 24)) != 0;  // AMX-BF16, AMX-TILE
  return there && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

const CpuKernels& choose() {
  const Variant variants[] = {
      {"portable", true, portable_kernels},           {"avx2", has_avx2(), avx2_kernels},
      {"avx512", has_avx512(), avx512_kernels},       {"avx512_bf16", has_avx512_bf16(), avx512_bf16_kernels},
      {"amx_bf16", has_amx_bf16(), amx_bf16_kernels},
  };
#else
const CpuKernels& choose() {
  const Variant variants[] = {{"portable", true, portable_kernels}};
#endif
  // Nothing changes the environment meanwhile.
  const char* wanted = std::getenv("KVSERVICE_CPU_ISA");  // NOLINT(concurrency-mt-unsafe)
  const Variant* best = nullptr;
  for (const Variant& variant : variants) {
    const bool named = wanted != nullptr && std::string(wanted) == variant.name;
    if (named && !variant.supported) {
      throw ArgumentError("KVSERVICE_CPU_ISA", "this processor has no " + std::string(wanted));
    }
    if (variant.supported && (wanted == nullptr || *wanted == '\0' || named)) best = &variant;
  }
  if (best == nullptr) {
    throw ArgumentError("KVSERVICE_CPU_ISA", "unknown instruction set '" + std::string(wanted) +
                                                 "', expected portable, avx2, avx512, avx512_bf16 or amx_bf16");
  }
  return best->kernels();
}

}  // namespace

const CpuKernels& cpu_kernels() {
  static const CpuKernels& kernels = choose();
  return kernels;
}

}  // namespace kvservice
