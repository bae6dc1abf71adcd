// Products of rows with several tokens, for instruction sets with registers of four words: a tile of rows is
// unpacked once, a few units at a time, into the order in which products want it; then tokens pass, four at a
// time. What an instruction set does itself is the template parameter `Tile`:
//
//   Tile(weight, is, rows, unit)       the codes of some units of some rows (kUnits, kRows)
//   multiply<Tokens>(x, units, take)   their products: take(unit, four, token, sums) is called with sums of
//   four
//                                      rows each, in the order of rows, `four` being the first of these fours
//   activations(x)                     where `x` begins; it has kStride elements for each token
//   four_scales(bytes)                 2^-kScaleDown times the scales that four bytes stand for
//   Precision                          how codes are unpacked, and what sums of their products mean: with
//                                      `factor`, `constant` and `shift` as in `Meaning`
//
// Only unpacking differs between precisions, so that there is one instance of all else.
#pragma once

#include "rows.h"

namespace otaro::OTARO_ISA {

using FourFloats = float __attribute__((vector_size(16)));
using FourInts = int32_t __attribute__((vector_size(16)));

template <class Tile>
class ManyTokens {
  using Element = typename Tile::Element;
  using Precision = typename Tile::Precision;
  static constexpr int kFours = Tile::kRows / 4;

  const Packed& weight_;
  const Precision& is_;
  const Activations& x_;
  const float factor_;  // makes scales steps
  FourFloats steps_[Tile::kUnits][kFours];
  FourFloats lanes_[kManyTokens][kLanes][kFours];

 public:
  ManyTokens(const Packed& weight, const Precision& is, const Activations& x)
    : weight_(weight),
      is_(is),
      x_(x),
      factor_(power_of_two(weight.scale_exponent + Tile::kScaleDown - is.shift)) {}

  void rows(int64_t begin, int64_t end, float* out, int64_t stride) {
    for (int64_t row = begin; row < end; row += Tile::kRows) {
      const int count = end - row < Tile::kRows ? static_cast<int>(end - row) : Tile::kRows;
      clear();
      tile(row, count);
      for (int t = 0; t < x_.tokens; ++t) sum_lanes(t, out + t * stride + row, count);
    }
  }

 private:
  int used() const { return x_.units < kLanes ? static_cast<int>(x_.units) : kLanes; }  // other lanes are 0

  void clear() {
    for (int t = 0; t < x_.tokens; ++t)
      std::memset(lanes_[t], 0, static_cast<size_t>(used()) * sizeof lanes_[t][0]);
  }

  // From row `first` on, of which `count` are there; the last one fills up.
  void tile(int64_t first, int count) {
    int64_t rows[Tile::kRows];
    const uint8_t* scales[Tile::kRows];
    for (int r = 0; r < Tile::kRows; ++r) {
      rows[r] = first + (r < count ? r : count - 1);
      scales[r] = weight_.scales + rows[r] * weight_.groups();
    }
    const int64_t per_group = weight_.units_per_group();
    const Element* at = Tile::activations(x_);
    int64_t group = 0, left = per_group;  // units that are left of the group
    for (int64_t unit = 0; unit < x_.units; unit += Tile::kUnits, at += x_.stride * Tile::kStride) {
      const int units = x_.units - unit < Tile::kUnits ? static_cast<int>(x_.units - unit) : Tile::kUnits;
      for (int i = 0; i < units; ++i) {
        prefetch_next<Tile::kRows>(weight_, first, unit + i);
        for (int n = 0; n < kFours; ++n) {
          const uint8_t bytes[] = {scales[4 * n][group], scales[4 * n + 1][group], scales[4 * n + 2][group],
                                   scales[4 * n + 3][group]};
          steps_[i][n] = Tile::four_scales(bytes) * factor_;
        }
        if (!--left) left = per_group, ++group;
      }
      const Tile codes(weight_, is_, rows, unit);
      int t = 0;
      for (; t + 4 <= x_.tokens; t += 4) some_tokens<4>(codes, at, unit, units, t);
      if (x_.tokens & 2) some_tokens<2>(codes, at, unit, units, t), t += 2;
      if (x_.tokens & 1) some_tokens<1>(codes, at, unit, units, t);
    }
  }

  template <int Tokens>
  OTARO_INLINE void some_tokens(const Tile& codes, const Element* of_x, int64_t unit, int units, int first) {
    const int factor = is_.factor, constant = is_.constant;
    const int32_t* sums_of_x = x_.sums + first * x_.units + unit;
    const float* scales_of_x = x_.scales + first * x_.units + unit;
    const int64_t apart = x_.units;
    codes.template multiply<Tokens>(
      of_x + first * Tile::kStride, units,
      [&](int i, int four, int t, const auto& sums) __attribute__((always_inline)) {
        const int offset = constant * sums_of_x[t * apart + i];
        const float scale = scales_of_x[t * apart + i];
        FourFloats *lanes = &lanes_[first + t][(unit + i) % kLanes][four], *steps = &steps_[i][four];
        for (const FourInts& one : sums) {
          const FourInts integers = one * factor + offset;
          *lanes++ += __builtin_convertvector(integers, FourFloats) * (*steps++ * scale);
        }
      });
  }

  void sum_lanes(int t, float* out, int count) const {
    for (int n = 0; n < kFours && 4 * n < count; ++n) {
      FourFloats sums[kLanes] = {};
      for (int j = 0; j < used(); ++j) sums[j] = lanes_[t][j][n];
      for (int some = kLanes / 2; some; some /= 2)
        for (int j = 0; j < some; ++j) sums[j] += sums[j + some];
      const int some = count - 4 * n < 4 ? count - 4 * n : 4;
      std::memcpy(out + 4 * n, &sums[0], static_cast<size_t>(some) * sizeof(float));
    }
  }
};

// Tokens of several precisions, each by itself. `linear` has [mantissa bits - 3][truncate].
template <class Linear>
void each_precision(const Instances<Linear>& linear, const Packed& weight, const Activations& x,
                    const Span* spans, int count, int64_t begin, int64_t end, float* out, int64_t stride) {
  for (const Span* span = spans; span < spans + count; ++span) {
    Packed at = weight;
    at.bits = span->bits;
    linear[at.bits - kCoarsest][at.truncate](at, x.some(span->first, span->count), begin, end,
                                             out + span->first * stride, stride);
  }
}

}  // namespace otaro::OTARO_ISA
