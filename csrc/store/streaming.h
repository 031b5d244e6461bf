// Stores that bypass the caches: a large copy then does not read the memory that it overwrites.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace kvservice {

// Orders streaming stores of this thread, and all its earlier stores, before its later ones.
inline void fence_streaming_stores() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// Copies with streaming stores, if the processor has them. The caller fences them.
inline void copy_streaming(char* to, const char* from, int64_t num_bytes) {
#ifdef __SSE2__
  constexpr int64_t kVector = sizeof(__m128i), kStep = 4 * kVector;
  const int64_t to_aligned = -reinterpret_cast<intptr_t>(to) & (kVector - 1);
  const int64_t head = to_aligned < num_bytes ? to_aligned : num_bytes;
  std::memcpy(to, from, static_cast<size_t>(head));
  int64_t at = head;
  for (; at + kStep <= num_bytes; at += kStep) {
    const auto* const source = reinterpret_cast<const __m128i*>(from + at);
    auto* const target = reinterpret_cast<__m128i*>(to + at);
    const __m128i vectors[] = {_mm_loadu_si128(source), _mm_loadu_si128(source + 1), _mm_loadu_si128(source + 2),
                               _mm_loadu_si128(source + 3)};
    for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, vectors[i]);
  }
  std::memcpy(to + at, from + at, static_cast<size_t>(num_bytes - at));
#else
  std::memcpy(to, from, static_cast<size_t>(num_bytes));
#endif
}

}  // namespace kvservice
