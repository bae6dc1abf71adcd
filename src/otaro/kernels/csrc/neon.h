// The kernels for ARM: with plain NEON (neon.cpp), with SDOT (dotprod.cpp), with USDOT too (i8mm.cpp).
//
// A register has four blocks, a *run*: four weights of each, a quad. Eight quads are all of them.
//
//   base    64 bytes, loaded with their words transposed: word j of each block, whose nibbles are quads 2 j
//   and
//           2 j + 1 (FORMAT.md).
//   planes  16 bytes each; bit i of a byte is quad i's. Two planes become two registers of bits in pairs,
//   four
//           become four registers of nibbles, those of quads q and q + 4, by shifts and selections. One
//           instruction more, or two, and a nibble stands below that of the base.
//
// So a code is left-justified, whatever its precision, as if it were one of E5M7 with zeros below: its
// integers I are 2^up times too large, which is exact, and steps make up for it. (Only codes of E5M3 stay as
// they are.)
//
// Products. SDOT sums four of them, a quad of a block, so that a lane is a block's to the end. Activations
// are two signed bytes, high and low; codes are, too, less 128, which a constant makes up for (USDOT takes
// them without). The last bit of E5M8 is multiplied by itself. Plain NEON widens codes to 16 bits and
// multiplies at once.
#pragma once

#include <arm_neon.h>

#include "rows.h"

#define OTARO_HALVES_BY_NEON  // floats.h

namespace otaro::OTARO_ISA {

#ifdef __ARM_FEATURE_DOTPROD
constexpr bool kDot = true;
#else
constexpr bool kDot = false;
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr bool kMixed = true;  // products of unsigned and signed bytes
#else
constexpr bool kMixed = false;
#endif

constexpr int kRun = 4, kQuads = kBlock / 4, kRunBytes = kRun * kBlock;  // blocks, quads, digits

// Which weight of a run digit byte i stands for.
inline int digit_weight_by_quad(int i, int) { return i % 16 / 4 * kBlock + i / 16 * 4 + i % 4; }

// How far a code stands left of where it should, and by how much it is less.
constexpr int up(int bits) { return bits == kCoarsest || bits == kFinest ? 0 : kFinest - 1 - bits; }
constexpr int step_shift(int bits, bool truncate) { return meaning(bits, truncate).shift + up(bits); }
constexpr int less(int bits) { return kDot && !kMixed && bits != kCoarsest ? 128 : 0; }

// What is still to be added to sums of products of codes: this times the sum of activations.
constexpr int constant(int bits, bool truncate) {
  const Meaning means = meaning(bits, truncate);
  return means.constant * (1 << up(bits)) + means.factor * less(bits) * (bits == kFinest ? 2 : 1);
}

OTARO_INLINE uint8x16_t every(int byte) { return vdupq_n_u8(static_cast<uint8_t>(byte)); }
OTARO_INLINE int8x16_t as_signed(uint8x16_t bytes) { return vreinterpretq_s8_u8(bytes); }
OTARO_INLINE const uint32_t* as_words(const uint8_t* bytes) {
  return static_cast<const uint32_t*>(static_cast<const void*>(bytes));
}

// The bytes of a run of a row.
template <int M>
struct Run {
  static constexpr int kAdded = M - kCoarsest;

  uint8x16_t base[4], planes[kAdded ? kAdded : 1];

  OTARO_INLINE Run(const Bytes<M>& bytes, int64_t block) {
    const uint32x4x4_t words = vld4q_u32(as_words(bytes.base + block * kBaseBytes));
    for (int j = 0; j < 4; ++j) base[j] = vreinterpretq_u8_u32(words.val[j]);
    for (int p = 0; p < kAdded; ++p) planes[p] = vld1q_u8(bytes.planes[p] + block * kPlaneBytes);
  }

  // Only its first `count` blocks, less than four; the others are zero.
  OTARO_INLINE Run(const Bytes<M>& bytes, int64_t block, int64_t count) {
    const uint8_t* from = bytes.base + block * kBaseBytes;
    if (count == 2) {
      const uint32x2x4_t words = vld4_u32(as_words(from));
      for (int j = 0; j < 4; ++j) base[j] = vreinterpretq_u8_u32(vcombine_u32(words.val[j], vdup_n_u32(0)));
      for (int p = 0; p < kAdded; ++p)
        planes[p] = vcombine_u8(vld1_u8(bytes.planes[p] + block * kPlaneBytes), vdup_n_u8(0));
      return;
    }
    uint8_t all[kRun * kBaseBytes] = {}, bits[kRun * kPlaneBytes] = {};
    for (int64_t b = 0; b < count; ++b) std::memcpy(all + b * kBaseBytes, from + b * kBaseBytes, kBaseBytes);
    const uint32x4x4_t words = vld4q_u32(as_words(all));
    for (int j = 0; j < 4; ++j) base[j] = vreinterpretq_u8_u32(words.val[j]);
    for (int p = 0; p < kAdded; ++p) {
      for (int64_t b = 0; b < count; ++b)
        std::memcpy(bits + b * kPlaneBytes, bytes.planes[p] + (block + b) * kPlaneBytes, kPlaneBytes);
      planes[p] = vld1q_u8(bits);
    }
  }

  // Bits of the first four planes, as nibbles: of quads q and q + 4 in of[q].
  OTARO_INLINE void nibbles(uint8x16_t (&of)[4]) const {
    if constexpr (kAdded == 1) {
      of[0] = vshlq_n_u8(vandq_u8(planes[0], every(0x11)), 3);
      of[1] = vshlq_n_u8(vandq_u8(planes[0], every(0x22)), 2);
      of[2] = vshlq_n_u8(vandq_u8(planes[0], every(0x44)), 1);
      of[3] = vandq_u8(planes[0], every(0x88));
    } else if constexpr (kAdded > 1) {
      uint8x16_t upper[2], lower[2];  // of even quads, of odd quads
      pairs(planes[0], planes[1], upper);
      if constexpr (kAdded == 2) {
        for (int odd = 0; odd < 2; ++odd) {
          of[odd] = vshlq_n_u8(vandq_u8(upper[odd], every(0x33)), 2);
          of[odd + 2] = vandq_u8(upper[odd], every(0xcc));
        }
      } else {
        if constexpr (kAdded == 3) {
          lower[0] = vandq_u8(vshlq_n_u8(planes[2], 1), every(0xaa));
          lower[1] = vandq_u8(planes[2], every(0xaa));
        } else {
          pairs(planes[2], planes[3], lower);
        }
        for (int odd = 0; odd < 2; ++odd) {
          of[odd] = vbslq_u8(every(0x33), lower[odd], vshlq_n_u8(upper[odd], 2));
          of[odd + 2] = vbslq_u8(every(0x33), vshrq_n_u8(lower[odd], 2), upper[odd]);
        }
      }
    }
  }

  static OTARO_INLINE void pairs(uint8x16_t first, uint8x16_t second, uint8x16_t (&of)[2]) {
    of[0] = vbslq_u8(every(0x55), second, vaddq_u8(first, first));
    of[1] = vbslq_u8(every(0x55), vshrq_n_u8(second, 1), first);
  }
};

// The codes of a run of a row: quads of all blocks.
template <int M, bool Truncate>
struct Codes {
  uint8x16_t u[kQuads];                       // but for the last bit of E5M8,
  int8x16_t last[M == kFinest ? kQuads : 1];  // which is here, as 0 or -1; -1 more where `truncate` raises

  OTARO_INLINE explicit Codes(Run<M> run) {
    uint8x16_t below[4];
    if constexpr (less(M) != 0)
      for (uint8x16_t& words : run.base) words = veorq_u8(words, every(0x88));
    run.nibbles(below);
#pragma GCC unroll 8
    for (int n = 0; n < kQuads; ++n) {  // the upper ones first: the others use up what both are made of
      const int q = (n + 4) % kQuads;
      const uint8x16_t nibble = run.base[q / 2];
      if constexpr (M == kCoarsest)
        u[q] = q % 2 ? vshrq_n_u8(nibble, 4) : vandq_u8(nibble, every(15));
      else if (q < 4)
        u[q] = q % 2 ? vbslq_u8(every(0xf0), nibble, below[q]) : vsliq_n_u8(below[q], nibble, 4);
      else
        u[q] = vsriq_n_u8(q % 2 ? nibble : vshlq_n_u8(nibble, 4), below[q - 4], 4);
      if constexpr (M == kFinest) last[q] = as_signed(vtstq_u8(run.planes[kPlanes - 1], every(1 << q)));
      if constexpr (Truncate) raise(u[q], last[M == kFinest ? q : 0]);
    }
  }

  static OTARO_INLINE void raise(uint8x16_t& u, int8x16_t& last) {
    constexpr int kTop = M == kCoarsest ? 8 : 128;
    const uint8x16_t negative = less(M) ? vcgeq_u8(u, every(kTop)) : vcltq_u8(u, every(kTop));
    if constexpr (M == kFinest)
      last = vaddq_s8(last, as_signed(negative));
    else
      u = vaddq_u8(u, vandq_u8(negative, every(1 << up(M))));
  }
};

// Partial sums of a run of a row with a token.
template <int M, bool Pair>
struct Sums {
#ifdef __ARM_FEATURE_DOTPROD
  using Element = int8_t;
  static constexpr int kStride = 2 * kRunBytes;
  static OTARO_INLINE const Element* activations(const Activations& x) { return x.digits; }

  int32x4_t u = vdupq_n_s32(0), last = u;  // a lane for each block

  // Some rows at a time, for the digits are the same. High ones first, so that one sum has both.
  template <class Codes, int Rows>
  static OTARO_INLINE void multiply(const Codes (&rows)[Rows], const int8_t* digits, Sums (&sums)[Rows]) {
#pragma GCC unroll 2
    for (int byte = 0; byte < 2; ++byte, digits += kRunBytes) {
      if (byte)
        for (Sums& one : sums) one.u = vshlq_n_s32(one.u, 8), one.last = vshlq_n_s32(one.last, 8);
#pragma GCC unroll 4
      for (int q = 0; q < kQuads; q += 2) {  // one load has the digits of two quads
        const int8x16_t first = vld1q_s8(digits + q * 16), second = vld1q_s8(digits + q * 16 + 16);
        for (int r = 0; r < Rows; ++r) {
          sums[r].u = dot(dot(sums[r].u, rows[r].u[q], first), rows[r].u[q + 1], second);
          if constexpr (M == kFinest)
            sums[r].last =
              vdotq_s32(vdotq_s32(sums[r].last, rows[r].last[q], first), rows[r].last[q + 1], second);
        }
      }
    }
  }

  static OTARO_INLINE int32x4_t dot(int32x4_t sums, uint8x16_t u, int8x16_t digits) {
#ifdef __ARM_FEATURE_MATMUL_INT8
    return vusdotq_s32(sums, u, digits);
#else
    return vdotq_s32(sums, as_signed(u), digits);
#endif
  }

  // The sums of four units: those of a run, or of two.
  static OTARO_INLINE int32x4_t four(const Sums& first, const Sums& second) {
    const int32x4_t sums = Pair ? vpaddq_s32(first.u, second.u) : first.u;
    if constexpr (M < kFinest) return sums;
    return vsubq_s32(vaddq_s32(sums, sums), Pair ? vpaddq_s32(first.last, second.last) : first.last);
  }
#else
  using Element = int16_t;
  static constexpr int kStride = kRunBytes;
  static OTARO_INLINE const Element* activations(const Activations& x) { return x.words; }

  int32x4_t of_unit[Pair ? 2 : 4] = {};

  template <class Codes, int Rows>
  static OTARO_INLINE void multiply(const Codes (&rows)[Rows], const int16_t* words, Sums (&sums)[Rows]) {
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) {  // one load has the words of both halves
      const int16x8_t x[2] = {vld1q_s16(words + q * 16), vld1q_s16(words + q * 16 + 8)};
      for (int r = 0; r < Rows; ++r)
        for (int half = 0; half < 2; ++half) sums[r].add(wide(rows[r], q, half), x[half], half);
    }
  }

  template <class Codes>
  static OTARO_INLINE int16x8_t wide(const Codes& codes, int q, int half) {
    const int16x8_t u =
      vreinterpretq_s16_u16(half ? vmovl_high_u8(codes.u[q]) : vmovl_u8(vget_low_u8(codes.u[q])));
    if constexpr (M < kFinest) return u;
    const int8x16_t last = codes.last[M == kFinest ? q : 0];
    return vsubw_s8(vaddq_s16(u, u), half ? vget_high_s8(last) : vget_low_s8(last));
  }

  OTARO_INLINE void add(int16x8_t codes, int16x8_t x, int half) {
    int32x4_t& first = of_unit[Pair ? half : 2 * half];
    first = vmlal_s16(first, vget_low_s16(codes), vget_low_s16(x));
    int32x4_t& second = of_unit[Pair ? half : 2 * half + 1];
    second = vmlal_high_s16(second, codes, x);
  }

  static OTARO_INLINE int32x4_t four(const Sums& run, const Sums& next) {
    const int32x4_t *a = run.of_unit, *b = Pair ? next.of_unit : a + 2;
    return vpaddq_s32(vpaddq_s32(a[0], a[1]), vpaddq_s32(b[0], b[1]));
  }
#endif
};

// The first `count` of four numbers, the others zero.
template <class Number>
struct Four {
  Number of[4] = {};

  OTARO_INLINE Four(const Number* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) of[i] = from[i];
  }
};

// From scale bytes to steps. A half has one more bit of exponent than a scale: with sign, exponent and
// fraction in their places it is 2^-8 of the scale.
struct Steps {
  static constexpr int kDown = 8;

  const Packed& weight;
  const int shift;  // `step_shift`
  const float factor;

  OTARO_INLINE Steps(const Packed& of, int down)
    : weight(of), shift(down), factor(power_of_two(of.scale_exponent + kDown - down)) {}

  // But for `factor`, which is multiplied with the activations' scale first: once for all rows.
  static OTARO_INLINE float32x4_t four(const uint8_t* scales) {
    uint32_t bytes;
    std::memcpy(&bytes, scales, sizeof bytes);
    const int8x8_t four = vreinterpret_s8_u32(vset_lane_u32(bytes, vdup_n_u32(0), 0));
    const uint16x4_t halves =
      vget_low_u16(vreinterpretq_u16_s16(vshll_n_s8(four, 7)));  // bit 14: the sign, too
    return vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(halves, vdup_n_u16(0xbfff))));
  }

  // The same of a cache, whose scales are exponents.
  OTARO_INLINE float32x4_t four_of_cache(const uint8_t (&scales)[4]) const {
    int32_t bits[4];
    for (int i = 0; i < 4; ++i) bits[i] = (static_cast<int8_t>(scales[i]) + 127 - shift) * (1 << 23);
    return vreinterpretq_f32_s32(vld1q_s32(bits));
  }

  // Those of `count` units of a row from `unit` on.
  OTARO_INLINE float32x4_t some(const uint8_t* scales, int64_t unit, int64_t count) const {
    const int64_t per_group = weight.units_per_group();
    uint8_t bytes[4] = {};
    for (int64_t i = 0; i < count; ++i) bytes[i] = scales[(unit + i) / per_group];
    return weight.of_cache ? four_of_cache(bytes) : vmulq_n_f32(four(bytes), factor);
  }
};

// Four units of some rows, and of some tokens: `count` of them where the row ends.
template <int M, bool Truncate, int Rows, bool Pair, int Tokens>
struct FourUnits {
  static constexpr int kRuns = Pair ? 2 : 1, kSome = Tokens ? Tokens : kMaxTokens;
  using OfRun = Sums<M, Pair>;
  using Element = typename OfRun::Element;

  OfRun sums[kSome][kRuns][Rows];

  // From `block` on, where activations are at `of_x`; if `Last`, as far as blocks are left of the row.
  template <bool Last>
  OTARO_INLINE void multiply(const Bytes<M>* rows, int64_t block, int64_t left, const Activations& x,
                             const Element* of_x) {
    using OfRow = Codes<M, Truncate>;
    const int64_t tokens = Tokens ? Tokens : x.tokens;
    const auto codes_of = [&](int r, int i) __attribute__((always_inline)) {
      const int64_t from = block + i * kRun;
      if (Last && left < (i + 1) * kRun) return OfRow(Run<M>(rows[r], from, left - i * kRun));
      return OfRow(Run<M>(rows[r], from));
    };
#pragma GCC unroll 2
    for (int i = 0; i < kRuns; ++i) {
      if (Last && left <= i * kRun) break;
      const Element* at = of_x + i * x.stride * OfRun::kStride;
      asm("" : "+r"(at));  // gcc would compute an address for every load
      if constexpr (Rows == 2) {
        const OfRow codes[2] = {codes_of(0, i), codes_of(1, i)};
        OfRun::multiply(codes, at, sums[0][i]);
      } else {
        const OfRow codes[1] = {codes_of(0, i)};
#pragma GCC unroll 1
        for (int64_t t = 0; t < tokens; ++t, at += OfRun::kStride) {
          OfRun of_token[1] = {};
          OfRun::multiply(codes, at, of_token);
          sums[t][i][0] = of_token[0];
        }
      }
    }
  }

  // 2^up times the integers I.
  OTARO_INLINE int32x4_t integers(int64_t t, int r, int32x4_t of_x) const {
    const int32x4_t offset = vmulq_n_s32(of_x, constant(M, Truncate)),
                    products = OfRun::four(sums[t][0][r], sums[t][kRuns - 1][r]);
    return meaning(M, Truncate).factor == 2 ? vmlaq_n_s32(offset, products, 2) : vaddq_s32(offset, products);
  }
};

// Rows from `row` on, as many at a time as `Rows`; gives the first that is left.
template <int M, bool Truncate, int Rows, bool Pair, int Tokens>
int64_t some_rows(const Packed& weight, const Activations& x, int64_t row, int64_t end, float* out,
                  int64_t stride) {
  using Units = FourUnits<M, Truncate, Rows, Pair, Tokens>;
  constexpr int kFourBlocks = Pair ? 8 : 4;
  const int64_t units = x.units, groups = weight.groups(), tokens = Tokens ? Tokens : x.tokens;
  const int64_t blocks = weight.blocks(),
                whole = weight.units_per_group() == 1 && !weight.of_cache ? blocks / kFourBlocks * 4 : 0;
  const Steps of_scales(weight, step_shift(M, Truncate));
  for (; row + Rows <= end; row += Rows) {
    float32x4_t lanes[Units::kSome][4][Rows];
    for (int64_t t = 0; t < tokens; ++t)
      for (auto& four : lanes[t])
        for (float32x4_t& lane : four) lane = vdupq_n_f32(0.0f);
    const Bytes<M> bytes[2] = {{weight, row}, {weight, row + Rows - 1}};
    const uint8_t* scales = weight.scales + row * groups;
    const auto add = [&](const Units& four, int64_t t, int r, int64_t unit, float32x4_t steps, int32x4_t sums,
                         float32x4_t of_scale) __attribute__((always_inline)) {
      float32x4_t& lane = lanes[t][unit / 4 % 4][r];
      lane = vaddq_f32(lane, vmulq_f32(vcvtq_f32_s32(four.integers(t, r, sums)), vmulq_f32(steps, of_scale)));
    };
    const auto* of_x = Units::OfRun::activations(x);
    const int64_t of_four = Units::kRuns * x.stride * Units::OfRun::kStride;
    int64_t unit = 0;
    for (; unit < whole; unit += 4, of_x += of_four) {
      Units four;
      four.template multiply<false>(bytes, unit * (Pair ? 2 : 1), kFourBlocks, x, of_x);
      float32x4_t steps[Rows];
      for (int r = 0; r < Rows; ++r) steps[r] = of_scales.four(scales + r * groups + unit);
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t slot = t * units + unit;
        const float32x4_t of_scale = vmulq_n_f32(vld1q_f32(x.scales + slot), of_scales.factor);
        for (int r = 0; r < Rows; ++r) add(four, t, r, unit, steps[r], vld1q_s32(x.sums + slot), of_scale);
      }
    }
    for (; unit < units; unit += 4, of_x += of_four) {
      const int64_t count = units - unit < 4 ? units - unit : 4, block = unit * (Pair ? 2 : 1);
      Units four;
      four.template multiply<true>(bytes, block, blocks - block, x, of_x);
      for (int r = 0; r < Rows; ++r) {
        const float32x4_t steps = of_scales.some(scales + r * groups, unit, count);
        for (int64_t t = 0; t < tokens; ++t) {
          const Four<int32_t> sums(x.sums + t * units + unit, count);
          const Four<float> of_scale(x.scales + t * units + unit, count);
          add(four, t, r, unit, steps, vld1q_s32(sums.of), vld1q_f32(of_scale.of));
        }
      }
    }
    for (int64_t t = 0; t < tokens; ++t)
      for (int r = 0; r < Rows; ++r) {
        const auto of = lanes[t];
        const float32x4_t four = vaddq_f32(vaddq_f32(of[0][r], of[2][r]), vaddq_f32(of[1][r], of[3][r]));
        const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        out[t * stride + row + r] = vget_lane_f32(vpadd_f32(two, two), 0);
      }
  }
  return row;
}

// In neon_many.h.
void linear_by_tiles(const Packed& weight, const Activations& x, int64_t begin, int64_t end, float* out,
                     int64_t stride);

template <int M, bool Truncate>
void linear(const Packed& weight, const Activations& x, int64_t begin, int64_t end, float* out,
            int64_t stride) {
  if (x.unit_blocks == 1) {
    some_rows<M, Truncate, 1, false, 0>(weight, x, begin, end, out, stride);
  } else if (x.tokens == 1) {
    const int64_t last = some_rows<M, Truncate, 2, true, 1>(weight, x, begin, end, out, stride);
    some_rows<M, Truncate, 1, true, 1>(weight, x, last, end, out, stride);
  } else {
    linear_by_tiles(weight, x, begin, end, out, stride);
  }
}

template <int M, bool Truncate, bool Pair>
OTARO_INLINE void dots_of(const Packed& weight, const Activations& x, int64_t row, int32_t* out) {
  const Bytes<M> bytes[2] = {{weight, row}, {weight, row}};
  for (int64_t unit = 0; unit < x.units; unit += 4) {
    const int64_t block = unit * x.unit_blocks, count = x.units - unit < 4 ? x.units - unit : 4;
    using Units = FourUnits<M, Truncate, 1, Pair, 0>;
    Units four;
    four.template multiply<true>(
      bytes, block, weight.blocks() - block, x,
      Units::OfRun::activations(x) + block / kRun * x.stride * Units::OfRun::kStride);
    for (int64_t t = 0; t < x.tokens; ++t) {
      const Four<int32_t> of_x(x.sums + t * x.units + unit, count);
      int32_t dots[4];
      vst1q_s32(dots, four.integers(t, 0, vld1q_s32(of_x.of)));
      for (int64_t i = 0; i < count; ++i)
        out[(t * weight.rows + row) * x.units + unit + i] = dots[i] / (1 << up(M));
    }
  }
}

template <int M, bool Truncate>
void dots(const Packed& weight, const Activations& x, int64_t begin, int64_t end, int32_t* out) {
  for (int64_t row = begin; row < end; ++row)
    x.unit_blocks == 1 ? dots_of<M, Truncate, false>(weight, x, row, out)
                       : dots_of<M, Truncate, true>(weight, x, row, out);
}

template <int M, bool Truncate>
void decode(const Packed& weight, int64_t row, float* out) {
  constexpr int kFactor = meaning(M, Truncate).factor;
  const Bytes<M> bytes(weight, row);
  const uint8_t* scales = weight.scales + row * weight.groups();
  const Steps of_scales(weight, step_shift(M, Truncate));
  for (int64_t block = 0, blocks = weight.blocks(); block < blocks; block += kRun) {
    const Codes<M, Truncate> codes(blocks - block < kRun ? Run<M>(bytes, block, blocks - block)
                                                         : Run<M>(bytes, block));
    // In the order of weights: quads 0 to 3 of every block, then quads 4 to 7.
    uint8_t quads[2][kRun][kBlock / 2], last[2][kRun][kBlock / 2] = {};
    for (int half = 0; half < 2; ++half) {
      uint32x4x4_t u, lowest;
      for (int q = 0; q < 4; ++q) u.val[q] = vreinterpretq_u32_u8(codes.u[4 * half + q]);
      const auto words = [](void* bytes) { return static_cast<uint32_t*>(bytes); };
      vst4q_u32(words(quads[half]), u);
      if constexpr (M == kFinest) {
        for (int q = 0; q < 4; ++q) lowest.val[q] = vreinterpretq_u32_s8(codes.last[4 * half + q]);
        vst4q_u32(words(last[half]), lowest);
      }
    }
    for (int64_t b = 0; b < kRun && block + b < blocks; ++b) {
      const int64_t at = (block + b) * kBlock,
                    count = weight.length - at < kBlock ? weight.length - at : kBlock;
      const uint8_t scale[] = {scales[at / weight.group_size]};
      const float step = vgetq_lane_f32(of_scales.some(scale, 0, 1), 0);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t half = i / 16, k = i % 16;
        const uint8_t u = quads[half][b][k];
        int code = less(M) ? static_cast<int8_t>(u) : u;
        if constexpr (M == kFinest) code = 2 * code - static_cast<int8_t>(last[half][b][k]);
        out[at + i] = static_cast<float>(kFactor * code + constant(M, Truncate)) * step;
      }
    }
  }
}

// Digits of a run of activations, from its integers in the order of weights; words for plain NEON, and in
// their place for I8MM eight high digits of a unit, then the low ones of the same weights (neon_many.h).
inline void lay_out(const int16_t (*codes)[kBlock], int8_t* digits, int16_t* words) {
  for (int half = 0; half < 2; ++half) {
    int32x4x4_t high, low;
    for (int b = 0; b < kRun; ++b) {
      const int16x8_t first = vld1q_s16(codes[b] + half * 16), second = vld1q_s16(codes[b] + half * 16 + 8);
      high.val[b] = vreinterpretq_s32_s8(vrshrn_high_n_s16(vrshrn_n_s16(first, 8), second, 8));
      low.val[b] = vreinterpretq_s32_s8(vmovn_high_s16(vmovn_s16(first), second));
    }
    const auto to = [&](int64_t at) { return static_cast<int32_t*>(static_cast<void*>(digits + at)); };
    vst4q_s32(to(half * kRunBytes / 2), high);
    vst4q_s32(to(kRunBytes + half * kRunBytes / 2), low);
  }
  if constexpr (kMixed) {
    auto* to = static_cast<int8_t*>(static_cast<void*>(words));
    for (int q = 0; q < kQuads; ++q, to += 16) {
      const int64x2_t high = vreinterpretq_s64_s8(vld1q_s8(digits + q * 16)),
                      low = vreinterpretq_s64_s8(vld1q_s8(digits + kRunBytes + q * 16));
      vst1q_s8(to, vreinterpretq_s8_s64(vzip1q_s64(high, low)));
      vst1q_s8(to + kRunBytes, vreinterpretq_s8_s64(vzip2q_s64(high, low)));
    }
  } else if constexpr (!kDot) {
    for (int q = 0; q < kQuads; ++q)
      for (int b = 0; b < kRun; ++b) vst1_s16(words + (q * kRun + b) * 4, vld1_s16(codes[b] + q * 4));
  }
}

inline void quantize(const float* x, int64_t length, const Activations& out, int token) {
  const int64_t unit_weights = out.unit_weights(), runs = out.runs();
  const int run_units = kRun / out.unit_blocks;
  for (int64_t run = 0; run < runs; ++run) {
    alignas(16) int16_t codes[kRun][kBlock] = {};
    for (int i = 0; i < run_units && run * run_units + i < out.units; ++i) {
      const int64_t unit = run * run_units + i, slot = token * out.units + unit;
      const float* values = x + unit * unit_weights;
      const int64_t count = length - unit * unit_weights;
      float filled[2 * kBlock] = {};
      if (count < unit_weights) {
        std::memcpy(filled, values, static_cast<size_t>(count) * sizeof(float));
        values = filled;
      }
      uint32x4_t largest = vdupq_n_u32(0);
      for (int64_t k = 0; k < unit_weights; k += 4)
        largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(values + k))));
      const Power power = activation_power(vmaxvq_u32(largest));
      out.scales[slot] = power.scale;
      int16_t* to = codes[0] + i * unit_weights;
      int32x4_t sum = vdupq_n_s32(0);
      if (power.inverse != 0.0f)                         // else a value is not finite, and all integers are 0
        for (int64_t k = 0; k < unit_weights; k += 8) {  // rounded to nearest, ties to even
          const auto four = [&](int64_t at) __attribute__((always_inline)) {
            return vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(values + at), power.inverse)));
          };
          const int16x8_t eight = vcombine_s16(four(k), four(k + 4));
          vst1q_s16(to + k, eight);
          sum = vpadalq_s16(sum, eight);
        }
      out.sums[slot] = vaddvq_s32(sum);
    }
    const int64_t at = (run * out.stride + token) * kRunBytes;
    lay_out(codes, out.digits + 2 * at, out.words + at);
  }
}

}  // namespace otaro::OTARO_ISA
