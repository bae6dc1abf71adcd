// The kernels for x86: how AVX2 unpacks and multiplies (`Avx2`; avx512.cpp has the other one), and what both
// share (`X86`, the machine of rows.h).
//
// A block of 32 weights is one register of bytes:
//
//   base   16 bytes, broadcast to both halves; the upper half is shifted right by 4, and one mask leaves 32
//   nibbles. plane  4 bytes, broadcast to eight words; AND with one bit per word and a compare leave 0 or -1;
//   u = 2 u - that.
//
// Products with activations, whose bytes were laid out to match:
//
//   E5M3 to E5M6   u is an unsigned byte, activations are two signed bytes, high and low: two byte products
//   E5M7, E5M8     u is widened to 16 bits and multiplied with the activation at once
//
// Both leave a register of partial sums per unit. Eight units are summed across together, which gives their
// integers I in one register, and from there on everything happens for eight units at a time.
#pragma once

#include <immintrin.h>

#include "rows.h"

namespace otaro::OTARO_ISA {

OTARO_INLINE __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
OTARO_INLINE void store(void* to, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }

// The high and the low bytes of a block of codes, which come in natural order. A quad is four weights: 0 1 2
// 3 | 4 5 6 7 come in, packing to bytes leaves 0 1 4 5 | 2 3 6 7, and 0 2 4 6 | 1 3 5 7 is the order of
// `digits`.
struct Digits {
  __m256i high, low;

  OTARO_INLINE Digits(__m256i first, __m256i second) {
    const __m256i order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7), half = _mm256_set1_epi16(128),
                  byte = _mm256_set1_epi16(255);
    const __m256i above = _mm256_srai_epi16(_mm256_add_epi16(first, half), 8),
                  above2 = _mm256_srai_epi16(_mm256_add_epi16(second, half), 8);
    high = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(above, above2), order);
    low = _mm256_permutevar8x32_epi32(
      _mm256_packus_epi16(_mm256_and_si256(first, byte), _mm256_and_si256(second, byte)), order);
  }
};

// Where a unit's digits and words go.
struct ByBlock {
  static OTARO_INLINE void lay_out(const __m256i (*codes)[2], int blocks, int8_t* digits, int16_t* words) {
    for (int b = 0; b < blocks; ++b) {
      const Digits bytes(codes[b][0], codes[b][1]);
      store(digits + b * kBlock, bytes.high);
      store(digits + (blocks + b) * kBlock, bytes.low);
      store(words + b * kBlock, _mm256_permute4x64_epi64(codes[b][0], 0xd8));
      store(words + b * kBlock + kBlock / 2, _mm256_permute4x64_epi64(codes[b][1], 0xd8));
    }
  }
};

template <class Layout>
inline void quantize(const float* x, int64_t length, const Activations& out, int token) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const int unit_weights = static_cast<int>(out.unit_weights());
  for (int64_t unit = 0; unit < out.units; ++unit) {
    const float* values = x + unit * unit_weights;
    const int64_t count = length - unit * unit_weights;
    float filled[2 * kBlock];
    if (count < unit_weights) {
      for (int64_t i = 0; i < unit_weights; ++i) filled[i] = i < count ? values[i] : 0.0f;
      values = filled;
    }
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < unit_weights; i += 8)
      largest = _mm256_max_epi32(largest, _mm256_and_si256(load(values + i), magnitude));
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
    const Power power = activation_power(static_cast<uint32_t>(_mm_cvtsi128_si32(most)));
    const int64_t slot = token * out.units + unit;
    out.scales[slot] = power.scale;
    const __m256 inverse = _mm256_set1_ps(power.inverse);
    __m256i sum = _mm256_setzero_si256();
    __m256i codes[2][2];
    for (int b = 0; b < out.unit_blocks; ++b, values += kBlock) {
      for (int half = 0; half < 2; ++half) {
        // Conversion rounds to nearest, ties to even. Where a value is not finite, so that inverse is 0, NaN
        // becomes a huge negative integer; the mask makes it nothing.
        __m256i two[2];
        for (int i = 0; i < 2; ++i)
          two[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(values + half * 16 + i * 8), inverse));
        codes[b][half] = _mm256_permute4x64_epi64(_mm256_packs_epi32(two[0], two[1]), 0xd8);
        if (power.inverse == 0.0f) codes[b][half] = _mm256_setzero_si256();
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes[b][half], _mm256_set1_epi16(1)));
      }
    }
    const int64_t block = out.first_block(unit, token);
    Layout::lay_out(codes, out.unit_blocks, out.digits + block * 2 * kBlock, out.words + block * kBlock);
    __m128i total = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    total = _mm_add_epi32(total, _mm_shuffle_epi32(total, 0x4e));
    total = _mm_add_epi32(total, _mm_shuffle_epi32(total, 0xb1));
    out.sums[slot] = _mm_cvtsi128_si32(total);
  }
}

// How AVX2 unpacks and multiplies.
struct Avx2 {
  using Sums = __m256i;                 // the partial sums of a unit
  static constexpr int kBytesUpTo = 6;  // 255 * 128 * 2 would not fit the 16 bits of vpmaddubsw

  // The nibbles of a block.
  static OTARO_INLINE __m256i nibbles(const uint8_t* base) {
    const __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(base));
    return _mm256_and_si256(_mm256_srlv_epi32(_mm256_broadcastsi128_si256(bytes), shifts),
                            _mm256_set1_epi8(15));
  }

  // Codes with a bit more, from four bytes of a plane.
  static OTARO_INLINE __m256i longer(__m256i low, const uint8_t* plane) {
    const __m256i quad = _mm256_setr_epi32(0x01010101, 0x04040404, 0x10101010, 0x40404040, 0x02020202,
                                           0x08080808, 0x20202020, static_cast<int>(0x80808080));
    int32_t word;
    std::memcpy(&word, plane, sizeof word);
    const __m256i bits = _mm256_set1_epi32(word), twice = _mm256_add_epi8(low, low);
    return _mm256_sub_epi8(twice, _mm256_cmpeq_epi8(_mm256_and_si256(bits, quad), quad));
  }

  // From nibbles: -1 where a weight is negative.
  static OTARO_INLINE __m256i negative_ones(__m256i nibbles) {
    return _mm256_cmpgt_epi8(_mm256_set1_epi8(8), nibbles);
  }

  // A block's codes, ready to be multiplied.
  template <int M>
  struct Codes {
    static constexpr bool kWide = M > kBytesUpTo;

    __m256i low;  // the low eight bits of u in the order of `digits`; raised where `truncate` wants it and
                  // bytes suffice
    __m256i negative;  // -1 where the weight is negative; only where needed
    __m256i wide[2];   // all bits, in the order of `words`; at nine bits they are those of u - 256, which 16
                       // bits hold as they are

    // Of the first planes, as many as are `joined`, the bits may be known.
    OTARO_INLINE Codes(const Bytes<M>& bytes, int64_t block, bool truncate, int joined = 0,
                       __m256i bits = _mm256_setzero_si256()) {
      low = nibbles(bytes.base + block * kBaseBytes);
      if (truncate || M == kFinest) negative = negative_ones(low);
      if (joined) low = _mm256_or_si256(_mm256_slli_epi16(low, joined), bits);
      for (int p = joined; p < M - kCoarsest; ++p) low = longer(low, bytes.planes[p] + block * kPlaneBytes);
      if (truncate && M < kFinest) low = _mm256_sub_epi8(low, negative);
      if constexpr (kWide) {
        const __m256i high = M == kFinest ? negative : _mm256_setzero_si256();
        wide[0] = _mm256_unpacklo_epi8(low, high);
        wide[1] = _mm256_unpackhi_epi8(low, high);
        if (truncate && M == kFinest) {
          wide[0] = _mm256_sub_epi16(wide[0], _mm256_unpacklo_epi8(negative, negative));
          wide[1] = _mm256_sub_epi16(wide[1], _mm256_unpackhi_epi8(negative, negative));
        }
      }
    }
  };

  // What is still to be added to sums of products of `Codes`: this times the sum of activations.
  static constexpr int constant(int bits, bool truncate) {
    const Meaning means = meaning(bits, truncate);
    return means.constant + (bits == kFinest ? means.factor << kFinest : 0);
  }

  // One block against one token.
  template <int M>
  static OTARO_INLINE __m256i products(const Codes<M>& codes, const int8_t* digits, int low_bytes,
                                       const int16_t* words) {
    if constexpr (M <= kBytesUpTo) {
      const __m256i high = _mm256_maddubs_epi16(codes.low, load(digits)),
                    low = _mm256_maddubs_epi16(codes.low, load(digits + low_bytes));
      return _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)),
                              _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
    } else {
      return _mm256_add_epi32(_mm256_madd_epi16(codes.wide[0], load(words)),
                              _mm256_madd_epi16(codes.wide[1], load(words + kBlock / 2)));
    }
  }

  // Two blocks against one token.
  template <int M>
  static OTARO_INLINE __m256i products(const Codes<M>& first, const Codes<M>& second, const int8_t* digits,
                                       const int16_t* words) {
    if constexpr (M <= 5) {  // the sum of two pairs still fits 16 bits: 63 * 128 * 4
      const auto both = [&](const int8_t* at) __attribute__((always_inline)) {
        return _mm256_add_epi16(_mm256_maddubs_epi16(first.low, load(at)),
                                _mm256_maddubs_epi16(second.low, load(at + kBlock)));
      };
      return _mm256_add_epi32(_mm256_madd_epi16(both(digits), _mm256_set1_epi16(256)),
                              _mm256_madd_epi16(both(digits + 2 * kBlock), _mm256_set1_epi16(1)));
    }
    return _mm256_add_epi32(products(first, digits, 2 * kBlock, words),
                            products(second, digits + kBlock, 2 * kBlock, words + kBlock));
  }

  // The partial sums of a unit for each token, into sums[t][i]: a pair of blocks, of which the second may be
  // missing (not `both`), or a single block.
  template <int M>
  static OTARO_INLINE void unit_sums(const Bytes<M>& bytes, int64_t block, bool pair, bool both,
                                     bool truncate, const Activations& x, int64_t unit, int tokens,
                                     Sums (*sums)[8], int i) {
    const int weights = pair ? 2 * kBlock : kBlock;
    const int64_t at = x.first_block(unit, 0) * kBlock;
    const int8_t* digits = x.digits + 2 * at;
    const int16_t* words = x.words + at;
    const Codes<M> first(bytes, block, truncate);
    if (both) {
      const Codes<M> second(bytes, block + 1, truncate);
      for (int t = 0; t < tokens; ++t)
        sums[t][i] = products(first, second, digits + t * 2 * weights, words + t * weights);
    } else {
      for (int t = 0; t < tokens; ++t)
        sums[t][i] = products(first, digits + t * 2 * weights, weights, words + t * weights);
    }
  }

  // The sums across eight registers.
  static OTARO_INLINE __m256i across(const Sums* p) {
    const __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
    const __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(p[4], p[5]), _mm256_hadd_epi32(p[6], p[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
  }

  static OTARO_INLINE Sums zero() { return _mm256_setzero_si256(); }
};

// Lanes below `count`.
OTARO_INLINE __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Eight scale bytes as halves. A half has one more bit of exponent: with sign, exponent and fraction of a
// scale byte in their places it is 2^-8 of the scale. The CPU makes floats of halves, and of subnormal ones
// in any mode.
OTARO_INLINE __m128i scale_halves(__m128i scales) {
  const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(scales), 7);  // bit 14 is the sign too
  return _mm_and_si128(words, _mm_set1_epi16(static_cast<short>(0xbfff)));
}

// From scale bytes to steps.
struct Steps {
  __m256 factor;

  OTARO_INLINE Steps(const Packed& weight, int shift)
    : factor(_mm256_set1_ps(power_of_two(weight.scale_exponent + 8 - shift))) {}

  OTARO_INLINE __m256 eight(const uint8_t* scales) const {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales));
    return _mm256_mul_ps(_mm256_cvtph_ps(scale_halves(bytes)), factor);
  }
};

// What rows.h asks of a machine, but for what a `Machine` such as `Avx2` says.
template <class Machine>
struct X86 : Machine {
  using typename Machine::Sums;
  using Lanes = __m256;
  using Machine::across, Machine::constant;

  static OTARO_INLINE Lanes no_lanes() { return _mm256_setzero_ps(); }
  static OTARO_INLINE Lanes add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }

  // Lanes j and j + 8 are summed already; now j + 4, j + 2, j + 1.
  static OTARO_INLINE float sum_lanes(__m256 lanes) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
  }

  // The steps of `count` units of a row from `unit` on, at most eight, of weights or of a cache.
  static OTARO_INLINE __m256 some_steps(const Packed& weight, int shift, const uint8_t* scales, int64_t unit,
                                        int count) {
    uint8_t some[8];
    some_scales(weight, scales, unit, count, some);
    if (!weight.of_cache) return Steps(weight, shift).eight(some);
    const __m256i exponents = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(some)));
    const __m256i biased = _mm256_add_epi32(exponents, _mm256_set1_epi32(127 - shift));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  }

  // The integers I of `count` units of a token.
  static OTARO_INLINE __m256i integers(int bits, bool truncate, const Sums* sums,
                                       const int32_t* activation_sums, int count) {
    const __m256i products = across(sums);
    const __m256i of_x =
      count == 8 ? load(activation_sums) : _mm256_maskload_epi32(activation_sums, first_lanes(count));
    const __m256i offset = _mm256_mullo_epi32(of_x, _mm256_set1_epi32(constant(bits, truncate)));
    return _mm256_add_epi32(truncate ? products : _mm256_add_epi32(products, products), offset);
  }

  // The terms of `count` units of token t.
  static OTARO_INLINE __m256 terms(int bits, bool truncate, const Sums* sums, const Activations& x, int t,
                                   int64_t unit, int count, __m256 steps) {
    const int64_t slot = t * x.units + unit;
    const __m256 scales =
      count == 8 ? _mm256_loadu_ps(x.scales + slot) : _mm256_maskload_ps(x.scales + slot, first_lanes(count));
    const __m256i dots = integers(bits, truncate, sums, x.sums + slot, count);
    return _mm256_mul_ps(_mm256_cvtepi32_ps(dots), _mm256_mul_ps(steps, scales));
  }
};

// One row is soon done: precision and reconstruction are no template parameters here.
inline void decode(const Packed& weight, int64_t row, float* out) {
  const Meaning means = meaning(weight.bits, weight.truncate);
  const int64_t blocks = weight.blocks(), group_blocks = weight.group_size / kBlock;
  const uint8_t *scales = weight.scales + row * weight.groups(),
                *base = weight.base + row * blocks * kBaseBytes;
  const float factor = power_of_two(weight.scale_exponent + 8 - means.shift);
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  // What a negative weight has besides its low bits: at nine bits it is below 0, as `Avx2::constant` knows.
  const __m256i beside = _mm256_set1_epi32((weight.truncate ? 1 : 0) - (weight.bits == kFinest ? 256 : 0));
  const __m128i doubled = _mm_cvtsi32_si128(means.factor - 1);
  const __m256i constant = _mm256_set1_epi32(Avx2::constant(weight.bits, weight.truncate));
  __m256 step = _mm256_setzero_ps();
  for (int64_t b = 0, left = 0; b < blocks; ++b, --left) {  // blocks that are left of the group
    if (!left) {
      const uint8_t scale = *scales++;
      const __m128 value = _mm_cvtph_ps(scale_halves(_mm_cvtsi32_si128(scale)));
      step = _mm256_set1_ps(weight.of_cache ? power_of_two(static_cast<int8_t>(scale) - means.shift)
                                            : _mm_cvtss_f32(value) * factor);
      left = group_blocks;
    }
    __m256i low = Avx2::nibbles(base + b * kBaseBytes);
    const __m256i negative = Avx2::negative_ones(low);
    for (int p = 0; p < weight.bits - kCoarsest; ++p)
      low = Avx2::longer(low, weight.planes[p] + (row * blocks + b) * kPlaneBytes);
    alignas(32) uint8_t codes[kBlock];
    alignas(32) int8_t signs[kBlock];
    _mm256_store_si256(reinterpret_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(low, in_order));
    _mm256_store_si256(reinterpret_cast<__m256i*>(signs), _mm256_permutevar8x32_epi32(negative, in_order));
    const int64_t count = weight.length - b * kBlock;
    float last[kBlock], *values = count < kBlock ? last : out + b * kBlock;
    for (int i = 0; i < kBlock; i += 8) {
      __m256i u = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
      const __m256i sign = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(signs + i)));
      u = _mm256_sll_epi32(_mm256_add_epi32(u, _mm256_and_si256(sign, beside)), doubled);
      _mm256_storeu_ps(values + i, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(u, constant)), step));
    }
    if (count < kBlock) std::memcpy(out + b * kBlock, last, static_cast<size_t>(count) * sizeof(float));
  }
}

}  // namespace otaro::OTARO_ISA
