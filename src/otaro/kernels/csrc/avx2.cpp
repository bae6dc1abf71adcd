#define OTARO_ISA avx2
#include "x86.h"
#include "floats.h"

namespace otaro::avx2 {

// The machine of rows.h.
struct Machine : X86<Avx2> {
  // The whole eights of units of a row, for one token. Lanes and others take turns: in the end it is the same
  // which is added to which.
  template <int M, bool Truncate>
  static OTARO_INLINE void add_eights(Bytes<M>& bytes, const Activations& x, const Steps& of_scales,
                                      const uint8_t* scales, int64_t units, __m256& lanes, __m256& others) {
    lanes = others = _mm256_setzero_ps();
    for (int64_t unit = 0; unit < units; unit += 8, bytes.skip(16)) {
      Sums sums[1][8];
      bytes.prefetch(16);
      constexpr int kTogether = 4;
#pragma GCC unroll 1
      for (int i = 0; i < 8; i += kTogether)
#pragma GCC unroll 8
        for (int j = 0; j < kTogether; ++j)
          unit_sums<M>(bytes, 2 * (i + j), true, true, Truncate, x, unit + i + j, 1, sums, i + j);
      const __m256 steps = of_scales.eight(scales + unit);
      const __m256 added = _mm256_add_ps(lanes, terms(M, Truncate, sums[0], x, 0, unit, 8, steps));
      lanes = others;
      others = added;
    }
  }

  // The terms of one unit of eight rows.
  OTARO_ONCE static void unit_terms(const Packed& weight, const Activations& x, int64_t unit,
                                    const Sums* sums, const uint8_t* scales, float* terms) {
    const Meaning means = meaning(weight.bits, weight.truncate);
    const __m256i products = _mm256_sll_epi32(across(sums), _mm_cvtsi32_si128(means.factor - 1)),
                  offset = _mm256_set1_epi32(constant(weight.bits, weight.truncate) * x.sums[unit]);
    const float factor = power_of_two(weight.scale_exponent + 8 - means.shift) * x.scales[unit];
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales));
    const __m256 steps = _mm256_mul_ps(_mm256_cvtph_ps(scale_halves(bytes)), _mm256_set1_ps(factor));
    _mm256_storeu_ps(terms, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(products, offset)), steps));
  }

  // The sums of eight rows; the first lane gets a term more.
  OTARO_ONCE static void sum_rows(const __m256* lanes, const __m256* others, const float* terms, float* out) {
    __m256 two[4], four[2];
    for (int i = 0; i < 4; ++i) {
      const auto eight = [&](int r) __attribute__((always_inline)) {
        const __m256 first = _mm256_add_ps(lanes[r], _mm256_zextps128_ps256(_mm_load_ss(terms + r)));
        return _mm256_add_ps(first, others[r]);
      };
      const __m256 a = eight(2 * i), b = eight(2 * i + 1);
      two[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    for (int i = 0; i < 2; ++i) {
      const __m256d a = _mm256_castps_pd(two[2 * i]), b = _mm256_castps_pd(two[2 * i + 1]);
      four[i] =
        _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
    }
    const __m256 sums = _mm256_add_ps(_mm256_shuffle_ps(four[0], four[1], 0x88),
                                      _mm256_shuffle_ps(four[0], four[1], 0xdd));  // of rows 0 2 4 6 1 3 5 7
    _mm256_storeu_ps(out, _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  }

  // One token, eight rows at a time. Bytes of rows follow each other, so one pointer walks through all of
  // them. Where one unit is left over (576 is nine), those of eight rows are summed across together.
  template <int M, bool Truncate>
  static int64_t linear_one(const Packed& weight, const Activations& of_x, int64_t begin, int64_t end,
                            float* out) {
    if (of_x.stride != 1) return begin;
    Activations x = of_x;
    x.stride = 1, x.unit_blocks = 2;  // a copy that no other function sees: addresses are computed with them
    const int64_t groups = weight.groups(), units = x.units, whole = units / 8 * 8;
    const int left = static_cast<int>(units - whole);
    const uint8_t* scales = weight.scales + begin * groups;
    const Steps of_scales(weight, meaning(M, Truncate).shift);
    Bytes<M> bytes(weight, begin);
    int64_t row = begin;
    for (; row + 8 <= end; row += 8) {
      __m256 lanes[8], others[8];
      Sums sums[1][8];
      uint8_t last[8];
      float terms[8] = {};
#pragma GCC unroll 1
      for (int r = 0; r < 8; ++r, scales += groups) {
        add_eights<M, Truncate>(bytes, x, of_scales, scales, whole, lanes[r], others[r]);
        if (left == 1) {
          bytes.prefetch(2);
          unit_sums<M>(bytes, 0, true, true, Truncate, x, whole, 1, sums, r);
          last[r] = scales[whole];
        }
        bytes.skip(2 * left);
      }
      // Not in the loop above, whose constants would leave their registers for the call.
      if (left == 1)
        unit_terms(weight, of_x, whole, sums[0], last, terms);
      else if (left)
        for (int r = 0; r < 8; ++r) add_units<Machine, M>(weight, of_x, row + r, whole, left, &lanes[r]);
      sum_rows(lanes, others, terms, out + row);
    }
    return row;
  }
};

// Several tokens. Eight rows are turned as they are unpacked, so that a register has two weights of each, of
// 16 bits: their products with two activations, broadcast, need no sum across, and a row stays in its lane to
// the end. Sixteen rows share a broadcast. (avx512.cpp does the like with bytes, for which it has an
// instruction that adds four products at once.)
constexpr int kTileRows = 16, kHalves = kTileRows / 8, kPairs = kBlock;  // pairs of weights of a unit

OTARO_INLINE void transpose(__m256i (&v)[8]) {
  __m256i t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    v[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // v[i] and v[4 + i] have columns i and 4 + i, of rows 0 to 3 and 4 to 7
    t[i] = _mm256_permute2x128_si256(v[i], v[4 + i], 0x20);
    t[4 + i] = _mm256_permute2x128_si256(v[i], v[4 + i], 0x31);
  }
  for (int i = 0; i < 8; ++i) v[i] = t[i];
}

// The plane bits of both blocks of a unit of eight rows, a lane for each row.
OTARO_INLINE void plane_words(const uint8_t* const (&rows)[8], int64_t at, __m256i (&words)[2]) {
  const auto two = [&](int r) __attribute__((always_inline)) {  // rows r and r + 1
    const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows[r] + at));
    return _mm_castps_si128(
      _mm_loadh_pi(_mm_castsi128_ps(first), reinterpret_cast<const __m64*>(rows[r + 1] + at)));
  };
  const auto four = [&](int r) __attribute__((always_inline)) {  // and r + 4, r + 5
    return _mm256_castsi256_ps(_mm256_set_m128i(two(r + 4), two(r)));
  };
  const __m256 first = four(0), second = four(2);
  words[0] = _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88));
  words[1] = _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xdd));
}

// Those of one block.
OTARO_INLINE __m256i plane_words(const uint8_t* const (&rows)[8], int64_t at) {
  const auto word = [&](int r) {
    int32_t bits;
    std::memcpy(&bits, rows[r] + at, sizeof bits);
    return bits;
  };
  return _mm256_setr_epi32(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7));
}

// Where the bytes of eight rows are.
struct EightRows {
  const uint8_t* base[8];
  const uint8_t* planes[kPlanes][8];
  const uint8_t* scales[8];

  template <class RowOf>
  EightRows(const Packed& weight, RowOf row_of) {
    for (int r = 0; r < 8; ++r) {
      const int64_t row = row_of(r), block = row * weight.blocks();
      base[r] = weight.base + block * kBaseBytes;
      for (int p = 0; p < weight.bits - kCoarsest; ++p) planes[p][r] = weight.planes[p] + block * kPlaneBytes;
      scales[r] = weight.scales + row * weight.groups();
    }
  }

  OTARO_INLINE __m256 steps(__m256 factor, int64_t group) const {
    uint64_t eight = 0;  // not stored byte by byte: what is loaded as a whole then has to wait
    for (int r = 0; r < 8; ++r) eight |= static_cast<uint64_t>(scales[r][group]) << 8 * r;
    return _mm256_mul_ps(_mm256_cvtph_ps(scale_halves(_mm_cvtsi64_si128(static_cast<int64_t>(eight)))),
                         factor);
  }
};

// Eight rows of a unit: pair k of each goes to out[k], in the order of the activations' `words`. FORMAT.md:
// byte 4 j + k of a block's base has weights 8 j + k and 8 j + 4 + k, and bit i of byte k of a plane is
// weight 4 i + k's: so four weights, a quad, are the nibbles of one word, and one bit of every byte of
// another. Where u counts double and its bits leave room for it, pairs are of 2 u.
template <int M, bool Truncate>
struct Pairs {
  static constexpr bool kFactorTwo = meaning(M, Truncate).factor == 2, kDouble = kFactorTwo && M < 7;

  // Of sixteen rows.
  static void unpack(const EightRows* halves, int64_t unit, bool both, __m256i (*out)[kPairs]) {
    for (int h = 0; h < kHalves; ++h) unpack(halves[h], unit, both, out[h]);
  }

  static OTARO_INLINE void unpack(const EightRows& rows, int64_t unit, bool both, __m256i* out) {
    __m256i words[8];
    for (int r = 0; r < 8; ++r) {
      const uint8_t* from = rows.base[r] + unit * 2 * kBaseBytes;
      words[r] =
        both ? load(from) : _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    transpose(words);
    constexpr int kPlanesUsed = M - kCoarsest;
    constexpr bool kBoth = kPlanesUsed > 3;  // reading planes of both blocks at once pays from four on
    __m256i of_both[kBoth ? kPlanesUsed : 1][2];
    if constexpr (kBoth)
      if (both)
        for (int p = 0; p < kPlanesUsed; ++p) plane_words(rows.planes[p], unit * 2 * kPlaneBytes, of_both[p]);
    for (int b = 0; b < 1 + both; ++b) {
      __m256i bits[kPlanesUsed ? kPlanesUsed : 1];
      for (int p = 0; p < kPlanesUsed; ++p)
        bits[p] = kBoth && both ? of_both[kBoth ? p : 0][b]
                                : plane_words(rows.planes[p], (2 * unit + b) * kPlaneBytes);
#pragma GCC unroll 8
      for (int quad = 0; quad < 8; ++quad) {
        constexpr int kLow = kDouble ? 1 : 0, kNibble = M < kFinest ? M - kCoarsest + kLow : 4;
        const auto moved = [](__m256i bits, int from, int to) __attribute__((always_inline)) {
          return from > to ? _mm256_srli_epi32(bits, from - to) : _mm256_slli_epi32(bits, to - from);
        };
        const auto every = [](int bits) { return _mm256_set1_epi8(static_cast<char>(bits)); };
        const __m256i nibbles = moved(words[4 * b + quad / 2], quad % 2 * 4, kNibble);
        __m256i low, negative = _mm256_setzero_si256();
        if constexpr (M == kFinest) {  // the upper bit is the ninth
          negative = _mm256_cmpgt_epi8(nibbles, every(-1));
          low = _mm256_and_si256(_mm256_add_epi8(nibbles, nibbles), every(0xe0));
        } else {
          low = _mm256_and_si256(nibbles, every(15 << kNibble));
        }
        for (int p = 0; p < M - kCoarsest; ++p) {
          const int to = M - kCoarsest - 1 - p + kLow;
          low = _mm256_or_si256(low, _mm256_and_si256(moved(bits[p], quad, to), every(1 << to)));
        }
        if constexpr (Truncate && M < kFinest)
          low = _mm256_sub_epi8(
            low, M < 7 ? _mm256_cmpgt_epi8(every(1 << M), low) : _mm256_cmpgt_epi8(low, every(-1)));
        // In `words` quads 0 2 1 3 follow each other, then 4 6 5 7.
        const int place = 16 * b + 2 * (quad / 4 * 4 + (quad % 4 == 1 ? 2 : quad % 4 == 2 ? 1 : quad % 4));
        out[place] = widened(low, negative, 0), out[place + 1] = widened(low, negative, 2);
      }
    }
    if (!both)
      for (int k = kPairs / 2; k < kPairs; ++k) out[k] = _mm256_setzero_si256();
  }

  // Two of the four bytes of every word, as 16 bits each. At nine bits they are those of u - 256, as in
  // `Avx2::Codes`.
  static OTARO_INLINE __m256i widened(__m256i low, __m256i negative, int first) {
    const __m256i each =
      _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
    const int two = (first + 1) << 16 | first;
    const __m256i below = _mm256_add_epi32(each, _mm256_set1_epi32(two | static_cast<int>(0x80008000)));
    __m256i wide = _mm256_shuffle_epi8(low, below);
    if constexpr (M == kFinest) {
      const __m256i above = _mm256_add_epi32(each, _mm256_set1_epi32(two << 8));
      wide = _mm256_or_si256(
        wide, _mm256_shuffle_epi8(negative, _mm256_or_si256(above, _mm256_set1_epi32(0x00800080))));
      if constexpr (Truncate)
        wide = _mm256_add_epi16(wide, _mm256_srli_epi16(wide, 15));  // raised where negative
    }
    return wide;
  }
};

// Sums of products of sixteen rows with the activations of up to four tokens, from where they begin.
// (Registers by name: an array gcc would keep in memory.)
template <int Tokens>
OTARO_INLINE void pair_products(const __m256i (*pairs)[kPairs], const int16_t* words,
                                const __m256i (&from)[4], __m256i (&sums)[4][2]) {
  __m256i a0 = from[0], a1 = a0, b0 = from[1], b1 = b0, c0 = from[2], c1 = c0, d0 = from[3], d1 = d0;
  const auto broadcast = [&](int at) __attribute__((always_inline)) {
    int32_t two;
    std::memcpy(&two, words + at, sizeof two);
    return _mm256_set1_epi32(two);
  };
#pragma GCC unroll 8
  for (int k = 0; k < kPairs; ++k) {
    const __m256i low = pairs[0][k], high = pairs[1][k];
    const auto add = [&](int t, __m256i& of_low, __m256i& of_high) __attribute__((always_inline)) {
      const __m256i x = broadcast(t * 2 * kBlock + 2 * k);
      of_low = _mm256_add_epi32(of_low, _mm256_madd_epi16(low, x));
      of_high = _mm256_add_epi32(of_high, _mm256_madd_epi16(high, x));
    };
    add(0, a0, a1);
    if constexpr (Tokens > 1) add(1, b0, b1);
    if constexpr (Tokens > 2) add(2, c0, c1);
    if constexpr (Tokens > 3) add(3, d0, d1);
  }
  sums[0][0] = a0, sums[0][1] = a1, sums[1][0] = b0, sums[1][1] = b1;
  sums[2][0] = c0, sums[2][1] = c1, sums[3][0] = d0, sums[3][1] = d1;
}

// What a precision is to a tile: only unpacking is made for it.
struct Precision {
  void (*unpack)(const EightRows* halves, int64_t unit, bool both, __m256i (*out)[kPairs]);
  int constant, shift;
  bool offset_last;  // sums count double
};

template <int M, bool Truncate>
constexpr Precision kPrecision = {Pairs<M, Truncate>::unpack, Avx2::constant(M, Truncate),
                                  meaning(M, Truncate).shift,
                                  Pairs<M, Truncate>::kFactorTwo && !Pairs<M, Truncate>::kDouble};
constexpr Instances<Precision> kPrecisions = OTARO_INSTANCES(kPrecision);

void many_tile(const Packed& weight, const Precision& is, const Activations& x, int64_t first_row, int rows,
               float* out, int64_t stride) {
  const int64_t blocks = weight.blocks(), per_group = weight.units_per_group();
  const __m256 factor = _mm256_set1_ps(power_of_two(weight.scale_exponent + 8 - is.shift));
  const auto row_of = [&](int r) { return first_row + (r < rows ? r : rows - 1); };
  const EightRows halves[kHalves] = {{weight, row_of}, {weight, [&](int r) { return row_of(8 + r); }}};
  alignas(32) float lanes[kManyTokens][kLanes][kTileRows];
  __m256 steps[kHalves] = {};
  for (int64_t unit = 0, left = 0, group = 0; unit < x.units;
       ++unit, --left) {  // units that are left of the group
    prefetch_next<kTileRows>(weight, first_row, unit);
    __m256i pairs[kHalves][kPairs];
    is.unpack(halves, unit, 2 * unit + 1 < blocks, pairs);
    if (!left) {
      for (int h = 0; h < kHalves; ++h) steps[h] = halves[h].steps(factor, group);
      left = per_group, ++group;
    }
    const int16_t* words = x.words + x.first_block(unit, 0) * kBlock;
    const auto offset = [&](int t) __attribute__((always_inline)) {
      return _mm256_set1_epi32(is.constant * x.sums[t * x.units + unit]);
    };
    const auto add = [&](int t, const __m256i* sums) __attribute__((always_inline)) {
      const __m256 scale = _mm256_set1_ps(x.scales[t * x.units + unit]);
      for (int h = 0; h < kHalves; ++h) {
        const __m256i dots =
          is.offset_last ? _mm256_add_epi32(_mm256_add_epi32(sums[h], sums[h]), offset(t)) : sums[h];
        float* lane = lanes[t][unit % kLanes] + 8 * h;
        const __m256 term = _mm256_mul_ps(_mm256_cvtepi32_ps(dots), _mm256_mul_ps(steps[h], scale));
        _mm256_store_ps(lane,
                        _mm256_add_ps(unit < kLanes ? _mm256_setzero_ps() : _mm256_load_ps(lane), term));
      }
    };
#pragma GCC unroll 1
    for (int t = 0; t < x.tokens; t += 4) {
      __m256i sums[4][2], from[4];
      const int some = x.tokens - t < 4 ? x.tokens - t : 4;
      for (int i = 0; i < 4; ++i)
        from[i] = is.offset_last || i >= some ? _mm256_setzero_si256() : offset(t + i);
      const int16_t* at = words + t * 2 * kBlock;
      if (some == 4)
        pair_products<4>(pairs, at, from, sums);
      else if (some == 3)
        pair_products<3>(pairs, at, from, sums);
      else if (some == 2)
        pair_products<2>(pairs, at, from, sums);
      else
        pair_products<1>(pairs, at, from, sums);
      for (int i = 0; i < some; ++i) add(t + i, sums[i]);
    }
  }
  const int used = x.units < kLanes ? static_cast<int>(x.units) : kLanes;  // the others are 0
  for (int t = 0; t < x.tokens; ++t)
    for (int h = 0; h < kHalves && rows > 8 * h; ++h) {
      __m256 sums[kLanes];
      for (int j = 0; j < kLanes; ++j)
        sums[j] = j < used ? _mm256_load_ps(lanes[t][j] + 8 * h) : _mm256_setzero_ps();
      for (int half = kLanes / 2; half; half /= 2)
        for (int j = 0; j < half; ++j) sums[j] = _mm256_add_ps(sums[j], sums[j + half]);
      _mm256_maskstore_ps(out + t * stride + first_row + 8 * h, first_lanes(rows - 8 * h), sums[0]);
    }
}

// Each precision by itself.
void many(const Packed& finest, const Activations& all, const Span* spans, int count, int64_t begin,
          int64_t end, float* out, int64_t stride) {
  for (const Span* span = spans; span < spans + count; ++span) {
    Packed weight = finest;
    weight.bits = span->bits;
    const Activations x = all.some(span->first, span->count);
    float* of_span = out + span->first * stride;
    if (x.tokens == 1) {
      kAvx2.linear[weight.bits - kCoarsest][weight.truncate](weight, x, begin, end, of_span, stride);
      continue;
    }
    const Precision& is = kPrecisions[weight.bits - kCoarsest][weight.truncate];
    for (int64_t row = begin; row < end; row += kTileRows) {
      const int rows = end - row < kTileRows ? static_cast<int>(end - row) : kTileRows;
      many_tile(weight, is, x, row, rows, of_span, stride);
    }
  }
}

}  // namespace otaro::avx2

namespace otaro {
const Kernels kAvx2 = {"avx2",
                       0,
                       avx2::digit_weight_by_block,
                       avx2::quantize<avx2::ByBlock>,
                       OTARO_INSTANCES(avx2::For<avx2::Machine>::linear),
                       avx2::many,
                       OTARO_ALL(avx2::decode)};
const Instances<Dots> kAvx2Dots = OTARO_INSTANCES(avx2::For<avx2::Machine>::dots);
}  // namespace otaro
