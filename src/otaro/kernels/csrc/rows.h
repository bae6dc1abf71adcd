// Products of rows with a few tokens: where a row's bytes are, eight units at a time, and the care that the
// ends of rows take. (neon.h and wasm.cpp take four blocks at a time, and of this `Bytes` alone.) What an
// instruction set does itself is its machine, the template parameter `Machine`:
//
//   Sums                          the partial sums of a unit of a row with a token, and `zero()` of them
//   unit_sums<M>                  them of a unit for some tokens
//   integers                      the integers I of some units, at most eight
//   Lanes                         eight floats: `no_lanes()`, `add`, and `sum_lanes` as step 4 of sefp.h sums
//                                 them
//   some_steps                    the steps of some units, of weights or of a cache
//   terms                         the terms of some units of a token, as lanes
//   linear_one<M, Truncate>       all of it for one token and whole units, where each is a group; returns the
//                                 first row that it leaves to `linear_any`
#pragma once

#include "backend.h"

namespace otaro::OTARO_ISA {

// Where the bytes of a row's next blocks are.
template <int M>
struct Bytes {
  const uint8_t* base;
  const uint8_t* planes[M > kCoarsest ? M - kCoarsest : 1];

  OTARO_INLINE Bytes(const Packed& weight, int64_t row) {
    const int64_t block = row * weight.blocks();
    base = weight.base + block * kBaseBytes;
    for (int p = 0; p < M - kCoarsest; ++p) planes[p] = weight.planes[p] + block * kPlaneBytes;
  }

  OTARO_INLINE void skip(int64_t blocks) {
    base += blocks * kBaseBytes;
    for (int p = 0; p < M - kCoarsest; ++p) planes[p] += blocks * kPlaneBytes;
  }

  // Have the second-level cache fetch what will be read a few hundred nanoseconds from now (the first has
  // room for few misses: avx512_one.h). Left alone, prefetchers stop at the end of every page and start anew
  // with a miss, for each of up to six streams. Addresses beyond the end do no harm.
  OTARO_INLINE void prefetch(int64_t blocks) const {
    constexpr int kAhead = 4096, kLevel = 2;
    for (int64_t i = 0; i < blocks * kBaseBytes; i += 64) __builtin_prefetch(base + kAhead + i, 0, kLevel);
    for (int p = 0; p < M - kCoarsest; ++p)
      __builtin_prefetch(planes[p] + kAhead / (kBaseBytes / kPlaneBytes), 0, kLevel);
    asm volatile("" : : : "memory");  // else they move to where the compiler likes them
  }
};

// The partial sums of `count` units of a row, at most eight; the row's last may be half a pair. What is
// beyond is zero.
template <class Machine, int M>
OTARO_INLINE void some_sums(const Packed& weight, const Activations& x, int64_t row, int64_t unit, int count,
                            typename Machine::Sums (*sums)[8]) {
  const Bytes<M> bytes(weight, row);
  const bool pair = x.unit_blocks == 2;
#pragma GCC unroll 1
  for (int i = 0; i < count; ++i) {
    const int64_t block = (unit + i) * x.unit_blocks;
    Machine::template unit_sums<M>(bytes, block, pair, pair && block + 1 < weight.blocks(), weight.truncate,
                                   x, unit + i, x.tokens, sums, i);
  }
  for (int t = 0; t < x.tokens; ++t)
    for (int i = count; i < 8; ++i) sums[t][i] = Machine::zero();
}

// The scale bytes of `count` units, at most eight.
OTARO_INLINE void some_scales(const Packed& weight, const uint8_t* scales, int64_t unit, int count,
                              uint8_t (&some)[8]) {
  const int64_t per_group = weight.units_per_group();
  if (count == 8 && per_group == 1) {
    std::memcpy(some, scales + unit, sizeof some);
  } else {
    std::memset(some, 0, sizeof some);
    for (int i = 0; i < count; ++i) some[i] = scales[(unit + i) / per_group];
  }
}

// Adds the terms of `count` units of a row, at most eight, with all the care they may need.
template <class Machine, int M>
OTARO_ONCE void add_units(const Packed& weight, const Activations& x, int64_t row, int64_t unit, int count,
                          typename Machine::Lanes* lanes) {
  typename Machine::Sums sums[kMaxTokens][8];
  some_sums<Machine, M>(weight, x, row, unit, count, sums);
  const auto steps = Machine::some_steps(weight, meaning(M, weight.truncate).shift,
                                         weight.scales + row * weight.groups(), unit, count);
#pragma GCC unroll 1
  for (int t = 0; t < x.tokens; ++t)
    lanes[t] = Machine::add(lanes[t], Machine::terms(M, weight.truncate, sums[t], x, t, unit, count, steps));
}

// Any number of tokens, any shape, by `add_units` of a precision. (Several tokens of pairs are
// `Kernels::many`'s.)
template <class Machine, class AddUnits>
OTARO_ONCE void linear_any(AddUnits add_units, const Packed& weight, const Activations& x, int64_t begin,
                           int64_t end, float* out, int64_t stride) {
  for (int64_t row = begin; row < end; ++row) {
    typename Machine::Lanes lanes[2][kMaxTokens];
    for (int t = 0; t < x.tokens; ++t) lanes[0][t] = lanes[1][t] = Machine::no_lanes();
    for (int64_t unit = 0; unit < x.units; unit += 8) {
      const int count = x.units - unit < 8 ? static_cast<int>(x.units - unit) : 8;
      add_units(weight, x, row, unit, count, lanes[unit / 8 % 2]);
    }
    for (int t = 0; t < x.tokens; ++t)
      out[t * stride + row] = Machine::sum_lanes(Machine::add(lanes[0][t], lanes[1][t]));
  }
}

template <class Machine>
struct For {
  template <int M, bool Truncate>
  static void linear(const Packed& weight, const Activations& x, int64_t begin, int64_t end, float* out,
                     int64_t stride) {
    if (x.tokens == 1 && x.unit_blocks == 2 && weight.units_per_group() == 1 && weight.blocks() % 2 == 0)
      begin = Machine::template linear_one<M, Truncate>(weight, x, begin, end, out);
    linear_any<Machine>(add_units<Machine, M>, weight, x, begin, end, out, stride);
  }

  template <int M, bool Truncate>
  static void dots(const Packed& weight, const Activations& x, int64_t begin, int64_t end, int32_t* out) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t unit = 0; unit < x.units; unit += 8) {
        const int count = x.units - unit < 8 ? static_cast<int>(x.units - unit) : 8;
        typename Machine::Sums sums[kMaxTokens][8];
        some_sums<Machine, M>(weight, x, row, unit, count, sums);
        for (int64_t t = 0; t < x.tokens; ++t) {
          const auto eight = Machine::integers(M, Truncate, sums[t], x.sums + t * x.units + unit, count);
          std::memcpy(out + (t * weight.rows + row) * x.units + unit, &eight,
                      static_cast<size_t>(count) * sizeof *out);
        }
      }
  }
};

// Several tokens at once: have the cache fetch a part of the next `Rows` rows, which follow these in memory,
// while a unit is multiplied. Prefetchers do not follow so many rows at a time. Addresses beyond the end do
// no harm.
template <int Rows>
OTARO_INLINE void prefetch_next(const Packed& weight, int64_t first_row, int64_t unit) {
  const auto fetch = [&](const uint8_t* rows, int bytes) __attribute__((always_inline)) {
    const int64_t part = Rows * 2 * bytes;
    const uint8_t* from = rows + (first_row + Rows) * weight.blocks() * bytes + unit * part;
    for (int64_t i = 0; i < part; i += 64) __builtin_prefetch(from + i);
  };
  fetch(weight.base, kBaseBytes);
  for (int p = 0; p < weight.bits - kCoarsest; ++p) fetch(weight.planes[p], kPlaneBytes);
}

}  // namespace otaro::OTARO_ISA
