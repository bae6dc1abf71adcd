// One token on AVX2 and AVX-VNNI. Rows follow each other in memory, and so do their units: they are read
// eight at a time, past the ends of rows, until a whole number of rows is done. Activations begin anew with
// each row, so they are laid out for as many eights as it takes until one begins a row again. Terms go to
// memory, from where each row takes its own. How eight units are unpacked and multiplied is each one's own
// (`Eights` of avx2.cpp and avxvnni.cpp).
#pragma once

#include "x86.h"

namespace otaro::OTARO_ISA {

OTARO_INLINE __m256i every(int bits) { return _mm256_set1_epi8(static_cast<char>(bits)); }

// Sums of rows, as step 4 of sefp.h says, from the terms of their units; in the last eight of `terms` may be
// more than those of the last row.
OTARO_ONCE void sum_rows(const float* terms, int64_t units, int64_t rows, float* out) {
  const auto eight = [&](int64_t row) __attribute__((always_inline)) {  // lanes j and j + 8 are summed
    const float* at = terms + row * units;
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t k = 0;
    for (; k + 16 <= units; k += 16)
      for (int i = 0; i < 2; ++i) sums[i] = _mm256_add_ps(sums[i], _mm256_loadu_ps(at + k + 8 * i));
    for (int i = 0; i < 2 && k < units; ++i, k += 8)
      sums[i] = _mm256_add_ps(sums[i], _mm256_maskload_ps(at + k, first_lanes(static_cast<int>(units - k))));
    return _mm256_add_ps(sums[0], sums[1]);
  };
  for (; rows > 0; rows -= 8, out += 8, terms += 8 * units) {
    __m256 lanes[8], two[4], four[2];
#pragma GCC unroll 1
    for (int r = 0; r < 8; ++r) lanes[r] = r < rows ? eight(r) : _mm256_setzero_ps();
    for (int i = 0; i < 4; ++i) {
      const __m256 a = lanes[2 * i], b = lanes[2 * i + 1];
      two[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    for (int i = 0; i < 2; ++i) {
      const __m256d a = _mm256_castps_pd(two[2 * i]), b = _mm256_castps_pd(two[2 * i + 1]);
      four[i] =
        _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
    }
    const __m256 sums = _mm256_add_ps(_mm256_shuffle_ps(four[0], four[1], 0x88),
                                      _mm256_shuffle_ps(four[0], four[1], 0xdd));  // of rows 0 2 4 6 1 3 5 7
    const __m256 in_order = _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    if (rows >= 8)
      _mm256_storeu_ps(out, in_order);
    else
      _mm256_maskstore_ps(out, first_lanes(static_cast<int>(rows)), in_order);
  }
}

// Activations of eights of units, until one begins a row again. `Eights::lay_out` writes kEightBytes for
// each. Where that would take too many, rows are read one by one, and the last eight of each begins so far
// back that it ends with the row: what it computes a second time is the same.
constexpr int kEightBytes = 8 * 4 * kBlock;

struct Cycle {
  static constexpr int kMost = 64, kMany = 40, kMostTerms = 4096;

  int64_t units, rows, eights, back = 0;  // `rows` take `eights`, of which the last goes `back` so many units
  alignas(32) int8_t digits[kMost][kEightBytes];
  alignas(32) int32_t offsets[kMost][8];
  alignas(32) float scales[kMost][8];  // times what makes steps of scale bytes' halves

  explicit Cycle(int64_t units) : units(units) {
    const int64_t divisor = units & -units;  // the largest power of two that divides them
    rows = divisor < 8 ? 8 / divisor : 1;
    eights = rows * units / 8;
    if (eights > kMany) {
      rows = 1, eights = (units + 7) / 8;
      back = 8 * eights - units;
    }
  }
  bool fits() const { return eights <= kMost; }

  template <class Eights>
  OTARO_ONCE void fill(const Packed& weight, const Activations& x) {
    const float factor =
      power_of_two(weight.scale_exponent + 8 - meaning(weight.bits, weight.truncate).shift);
    for (int64_t i = 0, unit = 0; i < eights; ++i) {
      if (i + 1 == eights) unit -= back;
      int64_t eight[8];
      for (int k = 0; k < 8; ++k, unit = unit + 1 < units ? unit + 1 : 0) {
        eight[k] = unit;
        offsets[i][k] = Eights::kConstant * x.sums[unit];
        scales[i][k] = factor * x.scales[unit];
      }
      Eights::lay_out(x, eight, digits[i]);
    }
  }
};

// The machine of rows.h. `Eights<M, Truncate>` lays out activations, and has the integers I of eight units,
// but for the offset, which is kConstant times the sum of activations.
template <template <int, bool> class Eights>
struct Machine : X86<Avx2> {
  // The terms of the units of some rows.
  template <int M, bool Truncate>
  static OTARO_INLINE void all_terms(const Packed& weight, const Cycle& x, int64_t row, int64_t rows,
                                     float* out) {
    Bytes<M> bytes(weight, row);
    const uint8_t* scales = weight.scales + row * x.units;
    const float* end = out + rows * x.units;
    for (int64_t i = 0; out < end; out += 8, scales += 8, bytes.skip(16)) {
      const bool last = i + 1 == x.eights;
      if (last) out -= x.back, scales -= x.back, bytes.skip(-2 * x.back);
      bytes.prefetch(16);
      const __m256i integers =
        _mm256_add_epi32(Eights<M, Truncate>::integers(bytes, x.digits[i]), load(x.offsets[i]));
      const __m128i of_scales = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales));
      const __m256 steps =
        _mm256_mul_ps(_mm256_cvtph_ps(scale_halves(of_scales)), _mm256_load_ps(x.scales[i]));
      _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(integers), steps));
      i = last ? 0 : i + 1;
    }
  }

  template <int M, bool Truncate>
  static int64_t linear_one(const Packed& weight, const Activations& x, int64_t begin, int64_t end,
                            float* out) {
    Cycle cycle(x.units);
    if (x.stride != 1 || !cycle.fits()) return begin;
    cycle.fill<Eights<M, Truncate>>(weight, x);
    alignas(32) float terms[Cycle::kMostTerms];
    // Eight rows at a time, or as many as have a thousand terms.
    const int64_t fit = 1024 / cycle.units, most = fit < 8 ? 8 : fit / 8 * 8;
    int64_t row = begin;
    while (row + cycle.rows <= end) {
      int64_t some = (end - row) / cycle.rows * cycle.rows;
      if (some > most) some = most;
      if (some * cycle.units > Cycle::kMostTerms) some = cycle.rows;
      all_terms<M, Truncate>(weight, cycle, row, some, terms);
      sum_rows(terms, cycle.units, some, out + row);
      row += some;
    }
    return row;
  }
};

}  // namespace otaro::OTARO_ISA
