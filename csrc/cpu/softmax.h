// Online softmax of one row over one tile of keys: FlashAttention's running maximum and sum.
#pragma once

#include "cpu/attention_kernel.h"
#include "cpu/operands.h"

namespace kvservice {
namespace {

constexpr float kInfinity = __builtin_inff();

// The positions that a row sees: [begin, end). Its logits get `slope * (position - query_pos)`.
struct RowView {
  int64_t query_pos;
  int64_t begin;
  int64_t end;
  float slope;
};

inline RowView view_row(const AttentionPiece& piece, int64_t kv_head, int64_t row) {
  const AttentionParams& p = *piece.params;
  const int64_t group = p.group_size();
  RowView view;
  view.query_pos = piece.context_len - piece.query_len + row / group;
  view.begin = p.sliding_window > 0 && view.query_pos >= p.sliding_window ? view.query_pos - p.sliding_window + 1 : 0;
  if (view.begin < piece.key_begin) view.begin = piece.key_begin;
  view.end = view.query_pos + 1 < piece.key_end ? view.query_pos + 1 : piece.key_end;
  view.slope = p.alibi_slopes != nullptr ? p.alibi_slopes[kv_head * group + row % group] : 0.0F;
  return view;
}

// Returns cap * tanh(x / cap). The formula with exp loses the bits of small y = x / cap, which a large cap would then
// multiply, so small y use the series of tanh.
inline Simd::F soft_capped(Simd::F x, Simd::F cap) {
  using F = Simd::F;
  const F y = Simd::div(x, cap), one = Simd::set1(1.0F), two = Simd::set1(2.0F), square = Simd::mul(y, y);
  const F e = Simd::exp(Simd::min(Simd::set1(80.0F), Simd::add(y, y)));
  const F large = Simd::sub(one, Simd::div(two, Simd::add(e, one)));
  F series = Simd::fma(square, Simd::set1(-17.0F / 315.0F), Simd::set1(2.0F / 15.0F));
  series = Simd::fma(square, series, Simd::set1(-1.0F / 3.0F));
  const F small = Simd::mul(y, Simd::fma(square, series, one));
  return Simd::mul(cap, Simd::if_less(square, Simd::set1(0.04F), small, large));
}

// Converts products of q and k to logits, in place. Tile position i is key position start + i.
inline void make_logits(const AttentionParams& p, const RowView& view, int64_t start, int width, float* s) {
  using F = Simd::F;
  const F scale = Simd::set1(p.scale);
  for (int i = 0; i < width; i += Simd::kWidth) Simd::store(s + i, Simd::mul(Simd::load(s + i), scale));
  if (p.soft_cap > 0.0F) {
    const F cap = Simd::set1(p.soft_cap);
    for (int i = 0; i < width; i += Simd::kWidth) Simd::store(s + i, soft_capped(Simd::load(s + i), cap));
  }
  if (view.slope != 0.0F) {
    for (int i = 0; i < width; ++i) s[i] += view.slope * static_cast<float>(start + i - view.query_pos);
  }
  const int64_t from = view.begin - start, to = view.end - start;
  for (int64_t i = 0; i < from && i < width; ++i) s[i] = -kInfinity;
  for (int64_t i = to > 0 ? to : 0; i < width; ++i) s[i] = -kInfinity;
}

// Converts products to weights exp(logit - max), in place, and updates `max` and `sum`. Returns the factor by which the
// accumulators must be multiplied.
inline float softmax_tile(const AttentionParams& p, const RowView& view, int64_t start, int width, float* s, float* max,
                          float* sum) {
  using F = Simd::F;
  make_logits(p, view, start, width, s);
  F top = Simd::set1(*max);
  for (int i = 0; i < width; i += Simd::kWidth) top = Simd::max(top, Simd::load(s + i));
  const float new_max = Simd::max_lane(top);
  if (new_max == -kInfinity) {  // no key so far is visible
    for (int i = 0; i < width; i += Simd::kWidth) Simd::store(s + i, Simd::zero());
    return 1.0F;
  }
  const F shift = Simd::set1(new_max);
  F total = Simd::zero();
  for (int i = 0; i < width; i += Simd::kWidth) {
    const F weight = Simd::exp(Simd::sub(Simd::load(s + i), shift));
    total = Simd::add(total, weight);
    Simd::store(s + i, weight);
  }
  const float factor = *max == new_max ? 1.0F : __builtin_expf(*max - new_max);
  *sum = *sum * factor + Simd::sum(total);
  *max = new_max;
  return factor;
}

}  // namespace
}  // namespace kvservice
