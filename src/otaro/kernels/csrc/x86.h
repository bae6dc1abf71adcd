// The kernels for x86, included by avx2.cpp and avx512.cpp. A block of 32 weights is one register of bytes:
//
//   base   16 bytes, broadcast to both halves; the upper half is shifted right by 4, and one mask leaves 32 nibbles.
//   plane  4 bytes, broadcast to eight words; AND with one bit per word and a compare leave 0 or -1; u = 2 u - that.
//
// Products with activations, whose bytes were laid out to match:
//
//   up to 7 bits (AVX2) or 8 (VNNI)   u is an unsigned byte, activations are two signed bytes, high and low: two byte products
//   else                              u is widened to 16 bits and multiplied with the activation at once
//
// Both leave a register of eight partial sums per unit; eight units are then summed across together, which gives the integers I of
// eight units in one register, and from there on everything happens for eight units at a time.
#pragma once

#include <immintrin.h>

#include "backend.h"

namespace otaro::OTARO_ISA {

#ifdef __AVX512VNNI__
constexpr int kBytesUpTo = 7;
#else
constexpr int kBytesUpTo = 6;  // 255 * 128 * 2 would not fit the 16 bits of vpmaddubsw
#endif

struct Row {
  const uint8_t* base;
  const uint8_t* planes[kPlanes];

  Row(const Packed& weight, int64_t row) {
    const int64_t block = row * weight.blocks();
    base = weight.base + block * kBaseBytes;
    for (int p = 0; p < kPlanes; ++p) planes[p] = weight.planes[p] ? weight.planes[p] + block * kPlaneBytes : nullptr;
  }
};

inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// A block's codes, in the order of `digits`.
template <int M, bool Truncate>
struct Codes {
  __m256i low;       // the low eight bits of u, or of u + 1 where `truncate` raises negative ones and bytes suffice
  __m256i negative;  // -1 where the weight is negative; only where needed

  static constexpr bool kNeedsSign = Truncate || M == kFinest;

  Codes(const Row& row, int64_t block) {
    const __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row.base + block * kBaseBytes));
    low = _mm256_and_si256(_mm256_srlv_epi32(_mm256_broadcastsi128_si256(bytes), shifts), _mm256_set1_epi8(15));
    if constexpr (kNeedsSign) negative = _mm256_cmpgt_epi8(_mm256_set1_epi8(8), low);
    const __m256i quad = _mm256_setr_epi32(0x01010101, 0x04040404, 0x10101010, 0x40404040, 0x02020202, 0x08080808, 0x20202020,
                                           static_cast<int>(0x80808080));
    for (int p = 0; p < M - kCoarsest; ++p) {
      int32_t word;
      std::memcpy(&word, row.planes[p] + block * kPlaneBytes, sizeof word);
      const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_set1_epi32(word), quad), quad);
      low = _mm256_sub_epi8(_mm256_add_epi8(low, low), set);
    }
    if constexpr (Truncate && M < kFinest) low = _mm256_sub_epi8(low, negative);
  }

  // 16 of them as 16-bit integers, in the order of `words`. At nine bits they are u - 256, and the sign is their high byte.
  template <int Half>
  __m256i words() const {
    const __m256i high = M == kFinest ? negative : _mm256_setzero_si256();
    const __m256i wide = Half ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
    if constexpr (Truncate && M == kFinest)
      return _mm256_sub_epi16(wide, Half ? _mm256_unpackhi_epi8(high, high) : _mm256_unpacklo_epi8(high, high));
    return wide;
  }
};

// What is still to be added to sums of products of `Codes`: constant * (sum of activations).
constexpr int constant_of(int bits, bool truncate) {
  const Meaning means = meaning(bits, truncate);
  return means.constant + (bits == kFinest ? means.factor << kFinest : 0);
}

// Eight partial sums of a unit: its one or two blocks against one token.
template <int M, bool Truncate>
inline __m256i partial_sums(const Codes<M, Truncate>& first, const int8_t* digits, const int16_t* words) {
  if constexpr (M <= kBytesUpTo) {
    const __m256i high = load(digits), low = load(digits + kBlock);
#ifdef __AVX512VNNI__
    const __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), first.low, high);
    return _mm256_dpbusd_epi32(_mm256_slli_epi32(sums, 8), first.low, low);
#else
    return _mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(first.low, high), _mm256_set1_epi16(256)),
                            _mm256_madd_epi16(_mm256_maddubs_epi16(first.low, low), _mm256_set1_epi16(1)));
#endif
  } else {
    const __m256i a = load(words), b = load(words + kBlock / 2);
#ifdef __AVX512VNNI__
    return _mm256_dpwssd_epi32(_mm256_madd_epi16(first.template words<0>(), a), first.template words<1>(), b);
#else
    return _mm256_add_epi32(_mm256_madd_epi16(first.template words<0>(), a), _mm256_madd_epi16(first.template words<1>(), b));
#endif
  }
}

template <int M, bool Truncate>
inline __m256i partial_sums(const Codes<M, Truncate>& first, const Codes<M, Truncate>& second, const int8_t* digits,
                            const int16_t* words) {
  if constexpr (M <= kBytesUpTo) {
    const __m256i high0 = load(digits), low0 = load(digits + kBlock);
    const __m256i high1 = load(digits + 2 * kBlock), low1 = load(digits + 3 * kBlock);
#ifdef __AVX512VNNI__
    const __m256i zero = _mm256_setzero_si256();
    const __m256i high = _mm256_dpbusd_epi32(_mm256_dpbusd_epi32(zero, first.low, high0), second.low, high1);
    const __m256i low = _mm256_dpbusd_epi32(_mm256_dpbusd_epi32(zero, first.low, low0), second.low, low1);
    return _mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
#else
    if constexpr (M <= 5) {  // the sum of two pairs still fits 16 bits: 63 * 128 * 4
      const __m256i high = _mm256_add_epi16(_mm256_maddubs_epi16(first.low, high0), _mm256_maddubs_epi16(second.low, high1));
      const __m256i low = _mm256_add_epi16(_mm256_maddubs_epi16(first.low, low0), _mm256_maddubs_epi16(second.low, low1));
      return _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)), _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
    }
#endif
  }
  return _mm256_add_epi32(partial_sums(first, digits, words), partial_sums(second, digits + 2 * kBlock, words + kBlock));
}

// The eight sums across eight registers.
inline __m256i sum_across(const __m256i* p) {
  const __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
  const __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(p[4], p[5]), _mm256_hadd_epi32(p[6], p[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

// The same for one register that is not zero.
inline __m256i sum_across_one(__m256i p) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(p), _mm256_extracti128_si256(p, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
  return _mm256_zextsi128_si256(_mm_blend_epi16(_mm_setzero_si128(), sum, 3));
}

// Lanes below `count`.
inline __m256i first_lanes(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// The steps 2^(exponent - shift) of `count` units from `unit` on, at most eight.
template <int Shift>
inline __m256 steps_of(const int8_t* exponents, int64_t per_group, int64_t unit, int64_t count) {
  __m128i bytes;
  if (count == 8 && per_group == 1) {
    bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents + unit));
  } else {
    int8_t some[8] = {};
    for (int64_t i = 0; i < count; ++i) some[i] = exponents[(unit + i) / per_group];
    bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(some));
  }
  const __m256i biased = _mm256_add_epi32(_mm256_cvtepi8_epi32(bytes), _mm256_set1_epi32(127 - Shift));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}

// Calls each(unit, count, sums) for a row, `count` units at a time; sums[t][i] are the partial sums of token t and unit + i.
template <int M, bool Truncate, int Tokens, class Each>
inline void for_units(const Packed& weight, const Activations& x, int64_t row, Each&& each) {
  const int tokens = Tokens ? Tokens : x.tokens;
  const Row bytes(weight, row);
  const int unit_blocks = x.unit_blocks;
  const int64_t token_blocks = x.units * unit_blocks, whole = weight.blocks() / unit_blocks;
  __m256i sums[Tokens ? Tokens : kMaxTokens][8];
  const auto one_unit = [&](int64_t unit, int i, bool pair) {
    const int64_t block = unit * unit_blocks;
    const Codes<M, Truncate> first(bytes, block);
    if (pair) {
      const Codes<M, Truncate> second(bytes, block + 1);
      for (int t = 0; t < tokens; ++t)
        sums[t][i] = partial_sums(first, second, x.digits + (t * token_blocks + block) * 2 * kBlock,
                                  x.words + (t * token_blocks + block) * kBlock);
    } else {
      for (int t = 0; t < tokens; ++t)
        sums[t][i] = partial_sums(first, x.digits + (t * token_blocks + block) * 2 * kBlock,
                                  x.words + (t * token_blocks + block) * kBlock);
    }
  };
  int64_t unit = 0;
  if (unit_blocks == 2)
    for (; unit + 8 <= whole; unit += 8) {
      for (int i = 0; i < 8; ++i) one_unit(unit + i, i, true);
      each(unit, 8, sums);
    }
  for (; unit < x.units; unit += 8) {
    const int64_t count = x.units - unit < 8 ? x.units - unit : 8;
    for (int i = 0; i < count; ++i) one_unit(unit + i, i, unit_blocks == 2 && unit + i < whole);
    for (int t = 0; t < tokens; ++t)
      for (int64_t i = count; i < 8; ++i) sums[t][i] = _mm256_setzero_si256();
    each(unit, count, sums);
  }
}

// The integers I of `count` units of a token.
template <int M, bool Truncate>
inline __m256i integers(const __m256i* sums, const int32_t* activation_sums, int64_t count) {
  const __m256i products = count == 1 ? sum_across_one(sums[0]) : sum_across(sums);
  const __m256i of_x = count == 8 ? load(activation_sums) : _mm256_maskload_epi32(activation_sums, first_lanes(count));
  const __m256i offset = _mm256_mullo_epi32(of_x, _mm256_set1_epi32(constant_of(M, Truncate)));
  return _mm256_add_epi32(meaning(M, Truncate).factor == 2 ? _mm256_add_epi32(products, products) : products, offset);
}

template <int M, bool Truncate, int Tokens>
inline void linear_tokens(const Packed& weight, const Activations& x, int64_t begin, int64_t end, float* out, int64_t stride) {
  const int tokens = Tokens ? Tokens : x.tokens;
  const int64_t groups = weight.groups(), per_group = weight.units_per_group();
  for (int64_t row = begin; row < end; ++row) {
    __m256 lanes[Tokens ? Tokens : kMaxTokens][2];
    for (int t = 0; t < tokens; ++t) lanes[t][0] = lanes[t][1] = _mm256_setzero_ps();
    const int8_t* exponents = weight.exponents + row * groups;
    for_units<M, Truncate, Tokens>(weight, x, row, [&](int64_t unit, int64_t count, const __m256i (*sums)[8]) {
      const __m256 steps = steps_of<meaning(M, Truncate).shift>(exponents, per_group, unit, count);
      for (int t = 0; t < tokens; ++t) {
        const int64_t slot = t * x.units + unit;
        const __m256i dots = integers<M, Truncate>(sums[t], x.sums + slot, count);
        const __m256 scales = count == 8 ? _mm256_loadu_ps(x.scales + slot) : _mm256_maskload_ps(x.scales + slot, first_lanes(count));
        const __m256 terms = _mm256_mul_ps(_mm256_cvtepi32_ps(dots), _mm256_mul_ps(steps, scales));
        lanes[t][unit / 8 % 2] = _mm256_add_ps(lanes[t][unit / 8 % 2], terms);
      }
    });
    for (int t = 0; t < tokens; ++t) {
      const __m256 eight = _mm256_add_ps(lanes[t][0], lanes[t][1]);
      __m128 sum = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
      sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
      sum = _mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1));
      out[t * stride + row] = _mm_cvtss_f32(sum);
    }
  }
}

template <int M, bool Truncate>
void linear(const Packed& weight, const Activations& x, int64_t begin, int64_t end, float* out, int64_t stride) {
  if (x.tokens == 1)
    linear_tokens<M, Truncate, 1>(weight, x, begin, end, out, stride);
  else
    linear_tokens<M, Truncate, 0>(weight, x, begin, end, out, stride);
}

template <int M, bool Truncate>
void dots(const Packed& weight, const Activations& x, int64_t begin, int64_t end, int32_t* out) {
  for (int64_t row = begin; row < end; ++row)
    for_units<M, Truncate, 0>(weight, x, row, [&](int64_t unit, int64_t count, const __m256i (*sums)[8]) {
      for (int64_t t = 0; t < x.tokens; ++t) {
        const __m256i of_units = integers<M, Truncate>(sums[t], x.sums + t * x.units + unit, count);
        _mm256_maskstore_epi32(out + (t * weight.rows + row) * x.units + unit, first_lanes(count), of_units);
      }
    });
}

template <int M, bool Truncate>
void decode(const Packed& weight, int64_t row, float* out) {
  constexpr Meaning means = meaning(M, Truncate);
  const Row bytes(weight, row);
  const int64_t blocks = weight.blocks(), groups = weight.groups();
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int64_t b = 0; b < blocks; ++b) {
    const Codes<M, Truncate> codes(bytes, b);
    const __m256 step =
      _mm256_set1_ps(power_of_two(weight.exponents[row * groups + b * kBlock / weight.group_size] - means.shift));
    alignas(32) uint8_t low[kBlock];
    alignas(32) int8_t negative[kBlock] = {};
    _mm256_store_si256(reinterpret_cast<__m256i*>(low), _mm256_permutevar8x32_epi32(codes.low, in_order));
    if constexpr (M == kFinest)
      _mm256_store_si256(reinterpret_cast<__m256i*>(negative), _mm256_permutevar8x32_epi32(codes.negative, in_order));
    alignas(32) float values[kBlock];
    for (int i = 0; i < kBlock; i += 8) {
      __m256i u = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(low + i)));
      if constexpr (M == kFinest) {
        const __m256i sign = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(negative + i)));
        u = _mm256_add_epi32(u, _mm256_slli_epi32(sign, 8));
        if constexpr (Truncate) u = _mm256_sub_epi32(u, sign);
      }
      if constexpr (means.factor == 2) u = _mm256_add_epi32(u, u);
      u = _mm256_add_epi32(u, _mm256_set1_epi32(constant_of(M, Truncate)));
      _mm256_store_ps(values + i, _mm256_mul_ps(_mm256_cvtepi32_ps(u), step));
    }
    const int64_t count = weight.length - b * kBlock < kBlock ? weight.length - b * kBlock : kBlock;
    std::memcpy(out + b * kBlock, values, static_cast<size_t>(count) * sizeof(float));
  }
}

}  // namespace otaro::OTARO_ISA
