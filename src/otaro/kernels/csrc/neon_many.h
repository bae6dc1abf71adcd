// The tiles of many.h for ARM: eight rows of a run.
//
// NEON: codes have 16 bits. Sums of four rows with four tokens stay in registers; their lanes are added up at
// the end. SDOT: words of four rows are side by side, so that a lane is a row's, and one instruction
// multiplies all four with a word of digits; both units of a run at once. I8MM: USMMLA multiplies eight codes
// of two rows with eight high and eight low digits of a token, which `lay_out` puts side by side in place of
// words. There the last bits of E5M8 are multiplied by themselves.
#pragma once

#include "many.h"
#include "neon.h"

namespace otaro::OTARO_ISA {

constexpr int kTileRows = 8, kHalves = kTileRows / 4, kRunUnits = kRun / 2;  // those of pairs of blocks

// The codes of a run of eight rows; those of E5M8 are 2 u + last.
struct Unpacked {
  uint8x16_t u[kTileRows][kQuads], last[kTileRows][kQuads];
};

template <int M, bool Truncate>
void unpack(const Packed& weight, const int64_t (&rows)[kTileRows], int64_t block, Unpacked& to) {
  const int64_t left = weight.blocks() - block;
  const auto put = [&](int r, const Codes<M, Truncate>& codes) __attribute__((always_inline)) {
    for (int q = 0; q < kQuads; ++q) {
      to.u[r][q] = codes.u[q];
      if constexpr (M == kFinest) to.last[r][q] = vreinterpretq_u8_s8(vnegq_s8(codes.last[q]));
    }
  };
  if (left < kRun) {
#pragma GCC unroll 1
    for (int r = 0; r < kTileRows; ++r)
      put(r, Codes<M, Truncate>(Run<M>(Bytes<M>(weight, rows[r]), block, left)));
  } else {
#pragma GCC unroll 1
    for (int r = 0; r < kTileRows; ++r) put(r, Codes<M, Truncate>(Run<M>(Bytes<M>(weight, rows[r]), block)));
  }
}

// What a precision is to a tile.
struct Precision {
  void (*unpack)(const Packed& weight, const int64_t (&rows)[kTileRows], int64_t block, Unpacked& to);
  int factor, constant, shift;
};

template <int M, bool Truncate>
constexpr Precision kPrecision = {unpack<M, Truncate>, meaning(M, Truncate).factor, constant(M, Truncate),
                                  step_shift(M, Truncate)};
constexpr Precision kPrecisions[kPlanes + 1][2] = OTARO_INSTANCES(kPrecision);

template <bool Finest>
struct Tile {
  using Precision = otaro::OTARO_ISA::Precision;
  static constexpr int kRows = kTileRows, kUnits = kRunUnits;

  OTARO_INLINE Tile(const Packed& weight, const Precision& is, const int64_t (&rows)[kRows], int64_t unit) {
    Unpacked codes;
    is.unpack(weight, rows, 2 * unit, codes);
    order(codes);
  }

  static constexpr int kScaleDown = Steps::kDown;
  static OTARO_INLINE FourFloats four_scales(const uint8_t (&bytes)[4]) { return Steps::four(bytes); }

#ifdef __ARM_FEATURE_MATMUL_INT8
  using Element = int8_t;
  static constexpr int kStride = 2 * kRunBytes, kPairs = kTileRows / 2;
  static OTARO_INLINE const Element* activations(const Activations& x) {
    return static_cast<const int8_t*>(static_cast<const void*>(x.words));
  }

  struct Ordered {
    uint8x16_t of[kRunUnits][kQuads][kPairs];

    OTARO_INLINE void order(const uint8x16_t (&rows)[kTileRows][kQuads]) {
      const auto words = [&](int r, int q)
                           __attribute__((always_inline)) { return vreinterpretq_u64_u8(rows[r][q]); };
      for (int q = 0; q < kQuads; ++q)
        for (int i = 0; i < kPairs; ++i) {
          of[0][q][i] = vreinterpretq_u8_u64(vzip1q_u64(words(2 * i, q), words(2 * i + 1, q)));
          of[1][q][i] = vreinterpretq_u8_u64(vzip2q_u64(words(2 * i, q), words(2 * i + 1, q)));
        }
    }
  };

  template <int Tokens, class Take>
  OTARO_INLINE void multiply(const int8_t* x, int units, Take take) const {
#pragma GCC unroll 1
    for (int unit = 0; unit < units; ++unit) {
      int32x4_t sums[kPairs][Tokens] = {};
      const auto add = [&](const Ordered& codes) __attribute__((always_inline)) {
        const int8_t* at = x + unit * kRunBytes;
#pragma GCC unroll 2
        for (int q = 0; q < kQuads; ++q, at += 16) {
          int8x16_t digits[Tokens];
          for (int t = 0; t < Tokens; ++t) digits[t] = vld1q_s8(at + t * kStride);
          for (int i = 0; i < kPairs; i += 2) {  // one load has the codes of two pairs
            const uint8x16_t first = codes.of[unit][q][i], second = codes.of[unit][q][i + 1];
            for (int t = 0; t < Tokens; ++t) {
              sums[i][t] = vusmmlaq_s32(sums[i][t], first, digits[t]);
              sums[i + 1][t] = vusmmlaq_s32(sums[i + 1][t], second, digits[t]);
            }
          }
        }
      };
      add(u);
      if constexpr (Finest) {
        for (auto& of_pair : sums)
          for (int32x4_t& one : of_pair) one = vshlq_n_s32(one, 1);
        add(last);
      }
      const auto four = [](int32x4_t first, int32x4_t second) __attribute__((always_inline)) {
        return vmlaq_n_s32(vuzp2q_s32(first, second), vuzp1q_s32(first, second), 256);
      };
      for (int t = 0; t < Tokens; ++t) {
        const FourInts eight[] = {four(sums[0][t], sums[1][t]), four(sums[2][t], sums[3][t])};
        take(unit, 0, t, eight);
      }
    }
  }
#elif defined(__ARM_FEATURE_DOTPROD)
  using Element = int8_t;
  static constexpr int kStride = 2 * kRunBytes;
  static OTARO_INLINE const Element* activations(const Activations& x) { return x.digits; }

  struct Ordered {
    int8x16_t of[kQuads][kHalves][kRun];

    OTARO_INLINE void order(const uint8x16_t (&rows)[kTileRows][kQuads]) {
      for (int q = 0; q < kQuads; ++q)
        for (int half = 0; half < kHalves; ++half) {
          uint32x4x4_t four;
          for (int r = 0; r < 4; ++r) four.val[r] = vreinterpretq_u32_u8(rows[4 * half + r][q]);
          vst4q_u32(static_cast<uint32_t*>(static_cast<void*>(of[q][half])), four);
        }
    }
  };

  template <int Tokens, class Take>
  OTARO_INLINE void multiply(const int8_t* x, int units, Take take) const {
    int32x4_t sums[kRunUnits][kHalves][Tokens] = {};
    const auto shift = [&](int by) __attribute__((always_inline)) {
      for (auto& of_unit : sums)
        for (auto& of_half : of_unit)
          for (int32x4_t& one : of_half) one = vshlq_s32(one, vdupq_n_s32(by));
    };
    const auto add = [&](const Ordered& codes, int digit) __attribute__((always_inline)) {
      const int8_t* at = x + digit * kRunBytes;
#pragma GCC unroll 1
      for (int q = 0; q < kQuads; ++q, at += 16) {
        int8x16_t digits[Tokens];
        for (int t = 0; t < Tokens; ++t) digits[t] = vld1q_s8(at + t * kStride);
        for (int half = 0; half < kHalves; ++half) {  // one load has the codes of two blocks
          const int8x16_t *of = codes.of[q][half], a = of[0], b = of[1];
          for (int t = 0; t < Tokens; ++t) {
            int32x4_t& one = sums[0][half][t];
            one = vdotq_laneq_s32(vdotq_laneq_s32(one, a, digits[t], 0), b, digits[t], 1);
          }
          const int8x16_t c = of[2], d = of[3];
          for (int t = 0; t < Tokens; ++t) {
            int32x4_t& one = sums[1][half][t];
            one = vdotq_laneq_s32(vdotq_laneq_s32(one, c, digits[t], 2), d, digits[t], 3);
          }
        }
      }
    };
    add(u, 0);  // high digits first, so that one sum has both
    if constexpr (Finest) shift(1), add(last, 0);
    shift(Finest ? 7 : 8), add(u, 1);
    if constexpr (Finest) shift(1), add(last, 1);
    for (int unit = 0; unit < kRunUnits && unit < units; ++unit)
      for (int t = 0; t < Tokens; ++t) {
        const FourInts eight[] = {sums[unit][0][t], sums[unit][1][t]};
        take(unit, 0, t, eight);
      }
  }
#else
  using Element = int16_t;
  static constexpr int kStride = kRunBytes;
  static OTARO_INLINE const Element* activations(const Activations& x) { return x.words; }

  int16x8_t codes[kRunUnits][kHalves][kQuads][4];

  OTARO_INLINE void order(const Unpacked& rows) {
    for (int r = 0; r < kTileRows; ++r)
      for (int q = 0; q < kQuads; ++q) {
        const uint8x16_t u = rows.u[r][q], last = rows.last[r][q];
        const auto wide = [&](uint8x8_t u, uint8x8_t last) __attribute__((always_inline)) {
          return vreinterpretq_s16_u16(Finest ? vaddw_u8(vshll_n_u8(u, 1), last) : vmovl_u8(u));
        };
        codes[0][r / 4][q][r % 4] = wide(vget_low_u8(u), vget_low_u8(last));
        codes[1][r / 4][q][r % 4] = wide(vget_high_u8(u), vget_high_u8(last));
      }
  }

  template <int Tokens, class Take>
  OTARO_INLINE void multiply(const int16_t* x, int units, Take take) const {
#pragma GCC unroll 1
    for (int unit = 0; unit < units; ++unit)
#pragma GCC unroll 1
      for (int half = 0; half < kHalves; ++half) {
        int32x4_t sums[Tokens][4] = {};
        const int16_t* at = x + unit * 8;
#pragma GCC unroll 1
        for (int q = 0; q < kQuads; ++q, at += 16) {
          int16x8_t words[Tokens];
          for (int t = 0; t < Tokens; ++t) words[t] = vld1q_s16(at + t * kStride);
          for (int r = 0; r < 4; r += 2) {  // one load has the codes of two rows
            const int16x8_t first = codes[unit][half][q][r], second = codes[unit][half][q][r + 1];
            const auto add = [](int32x4_t sums, int16x8_t codes,
                                int16x8_t words) __attribute__((always_inline)) {
              return vmlal_high_s16(vmlal_s16(sums, vget_low_s16(codes), vget_low_s16(words)), codes, words);
            };
            for (int t = 0; t < Tokens; ++t) {
              sums[t][r] = add(sums[t][r], first, words[t]);
              sums[t][r + 1] = add(sums[t][r + 1], second, words[t]);
            }
          }
        }
        for (int t = 0; t < Tokens; ++t) {
          const FourInts four[] = {
            vpaddq_s32(vpaddq_s32(sums[t][0], sums[t][1]), vpaddq_s32(sums[t][2], sums[t][3]))};
          take(unit, half, t, four);
        }
      }
  }
#endif

#ifdef __ARM_FEATURE_DOTPROD
  Ordered u, last;

  OTARO_INLINE void order(const Unpacked& rows) {
    u.order(rows.u);
    if constexpr (Finest) last.order(rows.last);
  }
#endif
};

inline void linear_by_tiles(const Packed& weight, const Activations& x, int64_t begin, int64_t end,
                            float* out, int64_t stride) {
  const Precision& is = kPrecisions[weight.bits - kCoarsest][weight.truncate];
  if (weight.bits == kFinest)
    ManyTokens<Tile<true>>(weight, is, x).rows(begin, end, out, stride);
  else
    ManyTokens<Tile<false>>(weight, is, x).rows(begin, end, out, stride);
}

inline void many(const Packed& weight, const Activations& x, const Span* spans, int count, int64_t begin,
                 int64_t end, float* out, int64_t stride) {
  constexpr decltype(&linear<kCoarsest, false>) kLinear[kPlanes + 1][2] = OTARO_INSTANCES(linear);
  each_precision(kLinear, weight, x, spans, count, begin, end, out, stride);
}

}  // namespace otaro::OTARO_ISA
