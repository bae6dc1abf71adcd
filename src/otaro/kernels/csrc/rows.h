// Products of rows with a few tokens: where a row's bytes are, eight units at a time, and the care that the
// ends of rows take. (neon.h and wasm.cpp take four blocks at a time, and of this `Bytes` alone.) What an
// instruction set does itself is its machine, the template parameter `Machine`:
//
//   Sums                          the partial sums of a unit of a row with a token, and `zero()` of them
//   unit_sums<M, Truncate, ...>   them of a unit for some tokens
//   across_one                    their sum; with the sum of activations times `constant(bits, truncate)` it
//                                 makes the integer I
//   store_integers<M, Truncate>   the integers I of some units, at most eight
//   Lanes                         eight floats: `no_lanes()`, `add`, `add_first` (to the first of them),
//                                 `sum_lanes`, as step 4 of sefp.h sums them
//   Steps<Shift>                  from scale bytes to steps: `eight` as lanes, or `one`
//   some_steps<Shift>             the steps of some units, of weights or of a cache
//   terms<M, Truncate>            the terms of some units of a token, as lanes
//   linear_one<M, Truncate>       all of it for one token and whole units, where each is a group
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

  // Have the cache fetch what will be read a few hundred nanoseconds from now. Left alone, prefetchers stop
  // at the end of every page and start anew with a miss, for each of up to six streams. Addresses beyond the
  // end do no harm.
  OTARO_INLINE void prefetch(int64_t blocks) const {
    constexpr int kAhead = 4096;
    for (int64_t i = 0; i < blocks * kBaseBytes; i += 64) __builtin_prefetch(base + kAhead + i);
    for (int p = 0; p < M - kCoarsest; ++p)
      __builtin_prefetch(planes[p] + kAhead / (kBaseBytes / kPlaneBytes));
  }
};

template <class Machine, int M, bool Truncate, int Tokens, bool Pair>
OTARO_INLINE void unit_sums(const Bytes<M>& bytes, int64_t block, bool both, const Activations& x,
                            int64_t unit, typename Machine::Sums (*sums)[8], int i) {
  const int64_t at = x.first_block(unit, 0) * kBlock;
  Machine::template unit_sums<M, Truncate, Tokens, Pair>(bytes, block, both, x.digits + 2 * at, x.words + at,
                                                         Tokens ? Tokens : x.tokens, sums, i);
}

// The partial sums of `count` units, at most eight; the row's last may be half a pair (`odd`). What is beyond
// is zero.
template <class Machine, int M, bool Truncate, int Tokens, bool Pair>
OTARO_INLINE void some_sums(const Bytes<M>& bytes, const Activations& x, int64_t unit, int count, bool odd,
                            typename Machine::Sums (*sums)[8]) {
  const int tokens = Tokens ? Tokens : x.tokens;
#pragma GCC unroll 1
  for (int i = 0; i < count; ++i) {
    const bool both = Pair && !(odd && i == count - 1);
    unit_sums<Machine, M, Truncate, Tokens, Pair>(bytes, i * (Pair ? 2 : 1), both, x, unit + i, sums, i);
  }
  for (int t = 0; t < tokens; ++t)
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

// The end of a row, out of line: `count` units with all the care they may need.
template <class Machine, int M, bool Truncate, int Tokens, bool Pair>
__attribute__((noinline)) void add_rest(const Bytes<M>& bytes, const Activations& x, const Packed& weight,
                                        const uint8_t* scales, int64_t unit, int count, bool odd,
                                        typename Machine::Lanes* lanes) {
  typename Machine::Sums sums[Tokens ? Tokens : kMaxTokens][8];
  some_sums<Machine, M, Truncate, Tokens, Pair>(bytes, x, unit, count, odd, sums);
  const auto steps = Machine::template some_steps<meaning(M, Truncate).shift>(weight, scales, unit, count);
  const int tokens = Tokens ? Tokens : x.tokens;
  for (int t = 0; t < tokens; ++t)
    lanes[t] =
      Machine::add(lanes[t], Machine::template terms<M, Truncate>(sums[t], x, t, unit, count, steps));
}

// Adds one more unit after a multiple of eight to lane 0 of each token. Common: 576 is nine units.
template <class Machine, int M, bool Truncate, int Tokens>
OTARO_INLINE void add_one(const Bytes<M>& bytes, const Activations& x, float step, int64_t unit,
                          typename Machine::Lanes* lanes) {
  constexpr Meaning means = meaning(M, Truncate);
  const int tokens = Tokens ? Tokens : x.tokens;
  typename Machine::Sums sums[Tokens ? Tokens : kMaxTokens][8];
  unit_sums<Machine, M, Truncate, Tokens, true>(bytes, 0, true, x, unit, sums, 0);
#pragma GCC unroll 1
  for (int t = 0; t < tokens; ++t) {
    const int64_t slot = t * x.units + unit;
    const int dot =
      means.factor * Machine::across_one(sums[t][0]) + Machine::constant(M, Truncate) * x.sums[slot];
    lanes[t] = Machine::add_first(lanes[t], static_cast<float>(dot) * (step * x.scales[slot]));
  }
}

// Any number of tokens, any shape. (Several tokens of whole units are `Kernels::many`'s.)
template <class Machine, int M, bool Truncate, int Tokens, bool Pair>
void linear_any(const Packed& weight, const Activations& x, int64_t begin, int64_t end, float* out,
                int64_t stride) {
  const int tokens = Tokens ? Tokens : x.tokens;
  const int64_t groups = weight.groups(), per_group = weight.units_per_group(), units = x.units;
  const bool odd = Pair && weight.blocks() % 2;
  const int64_t whole = Pair && per_group == 1 ? (units - odd) / 8 * 8 : 0;  // units that need no care
  const uint8_t* scales = weight.scales + begin * groups;
  const typename Machine::template Steps<meaning(M, Truncate).shift> of_scales(weight);
  for (int64_t row = begin; row < end; ++row, scales += groups) {
    Bytes<M> bytes(weight, row);
    typename Machine::Lanes lanes[2][Tokens ? Tokens : kMaxTokens];
    for (int t = 0; t < tokens; ++t) lanes[0][t] = lanes[1][t] = Machine::no_lanes();
    int64_t unit = 0;
    for (int side = 0; unit < whole; unit += 8, bytes.skip(16), side ^= 1) {
      typename Machine::Sums sums[Tokens ? Tokens : kMaxTokens][8];
#pragma GCC unroll 1
      for (int i = 0; i < 8; ++i)
        unit_sums<Machine, M, Truncate, Tokens, true>(bytes, 2 * i, true, x, unit + i, sums, i);
      const auto steps = of_scales.eight(scales + unit);
#pragma GCC unroll 1
      for (int t = 0; t < tokens; ++t)
        lanes[side][t] =
          Machine::add(lanes[side][t], Machine::template terms<M, Truncate>(sums[t], x, t, unit, 8, steps));
    }
    if (Pair && per_group == 1 && !odd && units - unit == 1) {
      add_one<Machine, M, Truncate, Tokens>(bytes, x, of_scales.one(scales[unit]), unit, lanes[unit / 8 % 2]);
      unit = units;
    }
    for (; unit < units; unit += 8, bytes.skip(Pair ? 16 : 8)) {
      const int count = units - unit < 8 ? static_cast<int>(units - unit) : 8;
      add_rest<Machine, M, Truncate, Tokens, Pair>(bytes, x, weight, scales, unit, count,
                                                   odd && unit + count == units, lanes[unit / 8 % 2]);
    }
    for (int t = 0; t < tokens; ++t)
      out[t * stride + row] = Machine::sum_lanes(Machine::add(lanes[0][t], lanes[1][t]));
  }
}

template <class Machine>
struct For {
  template <int M, bool Truncate>
  static void linear(const Packed& weight, const Activations& x, int64_t begin, int64_t end, float* out,
                     int64_t stride) {
    if (x.unit_blocks == 1)
      linear_any<Machine, M, Truncate, 0, false>(weight, x, begin, end, out, stride);
    else if (x.tokens == 1 && x.stride == 1 && weight.units_per_group() == 1 && weight.blocks() % 2 == 0)
      Machine::template linear_one<M, Truncate>(weight, x, begin, end, out);
    else
      linear_any<Machine, M, Truncate, 0, true>(weight, x, begin, end, out, stride);
  }

  template <int M, bool Truncate>
  static void dots(const Packed& weight, const Activations& x, int64_t begin, int64_t end, int32_t* out) {
    for (int64_t row = begin; row < end; ++row) {
      Bytes<M> bytes(weight, row);
      for (int64_t unit = 0; unit < x.units; unit += 8, bytes.skip(8 * x.unit_blocks)) {
        const int count = x.units - unit < 8 ? static_cast<int>(x.units - unit) : 8;
        typename Machine::Sums sums[kMaxTokens][8];
        if (x.unit_blocks == 1)
          some_sums<Machine, M, Truncate, 0, false>(bytes, x, unit, count, false, sums);
        else
          some_sums<Machine, M, Truncate, 0, true>(bytes, x, unit, count,
                                                   weight.blocks() % 2 && unit + count == x.units, sums);
        for (int64_t t = 0; t < x.tokens; ++t)
          Machine::template store_integers<M, Truncate>(sums[t], x.sums + t * x.units + unit, count,
                                                        out + (t * weight.rows + row) * x.units + unit);
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
