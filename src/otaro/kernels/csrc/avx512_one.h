// One token on AVX-512: two units of a row are two registers of codes, and two rows go side by side.
//
// A register has 32 weights of each of two neighbouring units, a pair. So one sum of products has both units,
// each in a half, and four such sums of a row, eight units, are added up across with those of the next row:
// sixteen integers in one register.
//
//   E5M3    64 bytes of base: the lower nibbles are one register, the upper ones the other.
//   base    Else a register has the first blocks of both units, the other the second ones. A byte permutation
//           brings the nibbles of weights k, k + 4, k + 8, ... together, eight of a first block and eight of
//           a second one; a shift by its own distance for each byte (vpmultishiftqb) takes them apart.
//   planes  16 bytes each. A byte permutation makes 8x8 matrices of bits of them: rows are planes, four of
//           second blocks and four of first ones, columns are weights. A GF(2) product with the unit vectors
//           transposes: the lower half of a byte has the bits of a weight of a first block, the upper half
//           those of a second one.
//
// A code is a byte, u * 2^(7 - M), so that nothing else depends on how many planes there are. The fifth plane
// of E5M8 is multiplied by itself.
#pragma once

#include "x86.h"

namespace otaro::avx512 {

// Where the digits of a unit's weight are (`Kernels::digit_weight`).
constexpr int digit_place(int block, int weight) {
  return 32 * (weight / 4 % 2) + 16 * block + 4 * (weight / 8) + weight % 4;
}

// What goes to byte i of a register; of two registers of codes the second has other shifts and digits.
struct OneOrders {
  ByteOrder base, planes, two_pairs, fifth[2], shifts[2], digits[2], digits_of_base[2];

  constexpr OneOrders() {
    for (int i = 0; i < 64; ++i) {
      const int unit = i / 32, k = i / 8 % 4, row = i % 8;
      base.of[i] = static_cast<uint8_t>(32 * unit + 16 * (row / 4) + 4 * (row % 4) + k);
      // Row r of a matrix becomes bit 7 - r.
      planes.of[i] = static_cast<uint8_t>(16 * (row % 4) + 8 * unit + (row < 4 ? 4 : 0) + k);
      two_pairs.of[i] = static_cast<uint8_t>(32 * (row % 4) + 8 * unit + (row < 4 ? 4 : 0) + k);
      for (int n = 0; n < 2; ++n) {
        fifth[n].of[i] = static_cast<uint8_t>(8 * unit + 4 * n + k);
        shifts[n].of[i] = static_cast<uint8_t>((32 * n + 4 * row + 60) % 64);
        digits[n].of[i] = static_cast<uint8_t>(64 * unit + digit_place(n, 4 * row + k));
        const int weight = 8 * (i % 16 / 4) + 4 * n + i % 4;
        digits_of_base[n].of[i] = static_cast<uint8_t>(64 * unit + digit_place(i / 16 % 2, weight));
      }
    }
  }
};
constexpr OneOrders kOneOrders;

// Scale bytes of nine units of eight rows, as upper halves of words: those of two rows, their eights in the
// order 0 2 4 6 1 3 5 7, from byte `first` on; and the last ones of rows 0 2 1 3 4 6 5 7.
struct NineOrders {
  ByteOrder two[4], last;

  constexpr NineOrders() {
    for (int i = 0; i < 16; ++i) {
      const int unit = i % 4 * 2 + i / 4 % 2;
      for (int n = 0; n < 4; ++n)
        two[n].of[2 * i + 1] = static_cast<uint8_t>(9 * (2 * n + i / 8) + unit - (n == 3 ? 8 : 0));
    }
    for (int i = 0; i < 8; ++i)
      last.of[2 * i + 1] = static_cast<uint8_t>(9 * (i / 4 * 4 + i % 2 * 2 + i / 2 % 2));
  }
};
constexpr NineOrders kNineOrders;

OTARO_INLINE __m512i in_order(const ByteOrder& order) { return _mm512_load_si512(order.of); }

template <int M, bool Truncate>
struct One {
  static constexpr int kPlanesUsed = M - kCoarsest, kInBytes = kPlanesUsed < 4 ? kPlanesUsed : 4;
  static constexpr int kMostUnits = 1024, kNine = 9;
  static constexpr int kAhead = 2048;  // bytes of a plane, four times as many of base
  static constexpr int kUnitBase = 2 * kBaseBytes, kUnitPlane = 2 * kPlaneBytes;
  static constexpr int kPairDigits = 8 * kBlock;  // high, low; of first blocks, of second ones
  static constexpr Meaning kMeans = meaning(M, Truncate);

  const uint8_t* base;
  const uint8_t* planes[kPlanesUsed ? kPlanesUsed : 1];
  // Activations as this kernel reads them. Eights are there twice, for two rows, in the order 0 2 4 6 1 3 5 7
  // in which sums come. What is beyond the last unit is 0.
  alignas(64) int8_t digits[kMostUnits / 2][kPairDigits];
  alignas(64) int32_t offsets[kMostUnits / 8][16];
  alignas(64) float scales[kMostUnits / 8][16];  // times what makes steps of scale bytes' halves

  One(const Packed& weight, const Activations& x) : base(weight.base) {
    for (int p = 0; p < kPlanesUsed; ++p) planes[p] = weight.planes[p];
    constexpr auto& kOrders = kPlanesUsed ? kOneOrders.digits : kOneOrders.digits_of_base;
    const int64_t units = x.units, padded = (units + 7) / 8 * 8;
    for (int64_t pair = 0; pair < padded / 2; ++pair)
      for (int half = 0; half < 2; ++half) {  // high, low
        const auto of = [&](int64_t unit) __attribute__((always_inline)) {
          return unit < units ? _mm512_loadu_si512(x.digits + unit * 4 * kBlock + half * 2 * kBlock)
                              : _mm512_setzero_si512();
        };
        const bool alone = 2 * pair + 1 == kNine && units == kNine;  // the ninth is there for two rows
        const __m512i first = of(2 * pair), second = of(2 * pair + !alone);
        for (int block = 0; block < 2; ++block)
          _mm512_store_si512(digits[pair] + (2 * half + block) * 2 * kBlock,
                             _mm512_permutex2var_epi8(first, in_order(kOrders[block]), second));
      }
    const float factor = power_of_two(weight.scale_exponent + 8 - kMeans.shift);
    for (int64_t i = 0; i < 2 * padded; ++i) {
      const int64_t eight = i / 16, unit = 8 * eight + i % 4 * 2 + i / 4 % 2;
      offsets[eight][i % 16] = unit < units ? kMeans.constant * x.sums[unit] : 0;
      scales[eight][i % 16] = unit < units ? factor * x.scales[unit] : 0.0f;
    }
  }

  // Rows of planes that are in use.
  static constexpr uint64_t kRows = (1 << kInBytes) - 1, kUsed = (kRows | kRows << 4) * 0x0101010101010101;

  // Planes as matrices, from 16 bytes of each.
  template <class Piece>
  static OTARO_INLINE __m512i matrices(Piece piece) {
    if constexpr (kPlanesUsed == 0) return _mm512_setzero_si512();
    __m512i pieces = _mm512_zextsi128_si512(piece(0));
    if constexpr (kInBytes > 1) pieces = _mm512_inserti32x4(pieces, piece(1), 1);
    if constexpr (kInBytes > 2) pieces = _mm512_inserti32x4(pieces, piece(2), 2);
    if constexpr (kInBytes > 3) pieces = _mm512_inserti32x4(pieces, piece(3), 3);
    return _mm512_maskz_permutexvar_epi8(kUsed, in_order(kOneOrders.planes), pieces);
  }

  // Those of pair i of eight units: a register has all of a plane's bytes, or those of two planes for two
  // pairs.
  OTARO_INLINE __m512i matrices(int64_t at, int i) const {
    const auto further = [](const ByteOrder& order, int by) __attribute__((always_inline)) {
      return _mm512_add_epi8(in_order(order), _mm512_set1_epi8(static_cast<char>(by)));
    };
    const auto two = [&](int p) __attribute__((always_inline)) {
      const auto of = [&](int p) __attribute__((always_inline)) {
        return load(planes[p] + at + i / 2 * 4 * kUnitPlane);
      };
      const __m512i first = _mm512_zextsi256_si512(of(p));
      return p + 1 < kInBytes ? _mm512_inserti64x4(first, of(p + 1), 1) : first;
    };
    const __m512i order = further(kOneOrders.two_pairs, i % 2 * 16);
    if constexpr (kInBytes > 2) return _mm512_maskz_permutex2var_epi8(kUsed, two(0), order, two(2));
    if constexpr (kInBytes > 1) return _mm512_maskz_permutexvar_epi8(kUsed, order, two(0));
    if constexpr (kInBytes > 0)
      return _mm512_maskz_permutexvar_epi8(kUsed, further(kOneOrders.planes, i * 16),
                                           _mm512_loadu_si512(planes[0] + at));
    return _mm512_setzero_si512();
  }

  // The sums of products of a pair: 64 bytes of base, planes as matrices, and 16 bytes of the fifth.
  OTARO_INLINE __m512i products(__m512i base, __m512i matrices, __m128i last, const int8_t* digits) const {
    const __m512i upper = _mm512_set1_epi8(static_cast<char>(0xf0)),
                  unit_vectors = _mm512_set1_epi64(0x8040201008040201);
    __m512i codes[2], fifth[2];
    if constexpr (kPlanesUsed > 0) {
      const __m512i nibbles = _mm512_permutexvar_epi8(in_order(kOneOrders.base), base);
      const __m512i bits = _mm512_gf2p8affine_epi64_epi8(unit_vectors, matrices, 0);
      const __m512i of_blocks[2] = {bits, _mm512_srli_epi16(bits, 4)};
      for (int block = 0; block < 2; ++block) {  // upper ? nibbles : bits
        codes[block] = _mm512_multishift_epi64_epi8(in_order(kOneOrders.shifts[block]), nibbles);
        codes[block] = _mm512_ternarylogic_epi32(codes[block], upper, of_blocks[block], 0xe2);
      }
    } else {
      codes[0] = _mm512_and_si512(_mm512_slli_epi16(base, 4), upper);
      codes[1] = _mm512_and_si512(base, upper);
    }
    if constexpr (M == kFinest)
      for (int block = 0; block < 2; ++block)
        fifth[block] = _mm512_gf2p8affine_epi64_epi8(
          unit_vectors,
          _mm512_maskz_permutexvar_epi8(0x8080808080808080, in_order(kOneOrders.fifth[block]),
                                        _mm512_castsi128_si512(last)),
          0);
    if constexpr (Truncate)  // raised by the lowest bit where negative
      for (int block = 0; block < 2; ++block) {
        constexpr int kTop = M < kFinest ? M : kFinest - 1;
        const __m512i lowest = _mm512_andnot_si512(_mm512_srli_epi16(codes[block], kTop),
                                                   _mm512_set1_epi8(static_cast<char>(1 << (7 - kTop))));
        __m512i& part = M == kFinest ? fifth[block] : codes[block];
        part = _mm512_add_epi8(part, lowest);
      }
    const auto add = [&](__m512i sums, const __m512i* codes, int half) __attribute__((always_inline)) {
      const int8_t* at = digits + half * 4 * kBlock;
      return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sums, codes[0], _mm512_load_si512(at)), codes[1],
                                 _mm512_load_si512(at + 2 * kBlock));
    };
    __m512i sums = add(_mm512_setzero_si512(), codes, 0);
    if constexpr (M < kFinest) return add(_mm512_slli_epi32(sums, 8), codes, 1);
    sums = add(_mm512_slli_epi32(sums, 1), fifth, 0);
    sums = add(_mm512_slli_epi32(sums, 7), codes, 1);
    return add(_mm512_slli_epi32(sums, 1), fifth, 1);
  }

  // Adds up within parts of four: part i has those of p[0], p[1], p[2], p[3].
  static OTARO_INLINE __m512i quads(const __m512i* p) {
    const auto pairs = [](__m512i a, __m512i b) __attribute__((always_inline)) {
      return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    const __m512i a = pairs(p[0], p[1]), b = pairs(p[2], p[3]);
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }

  // Eight units of a row, which begin at `at` of each plane: sums in parts, of 0 2 4 6 in the first two and
  // of 1 3 5 7 in the others.
  OTARO_INLINE __m512i eight_sums(int64_t at, int64_t eight) const {
    __m512i sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i of_pair = _mm512_loadu_si512(base + 4 * at + i * 2 * kUnitBase);
      __m128i fifth = _mm_setzero_si128();
      if constexpr (M == kFinest)
        fifth = _mm_loadu_si128(reinterpret_cast<const __m128i*>(planes[4] + at + i * 2 * kUnitPlane));
      sums[i] = products(of_pair, matrices(at, i), fifth, digits[4 * eight + i]);
    }
    return quads(sums);
  }

  // What sums are as the integers I, but for the offset.
  static OTARO_INLINE __m512i scaled(__m512i sums) {
    constexpr int kDown = kFinest - 1 - M - (kMeans.factor - 1);
    if constexpr (kDown > 0) return _mm512_srai_epi32(sums, kDown);
    return kMeans.factor == 2 && M > kFinest - 2 ? _mm512_add_epi32(sums, sums) : sums;
  }

  // The terms of eight units of two rows, whose scale bytes are upper halves of `words`.
  OTARO_INLINE __m512 terms(__m512i first, __m512i second, __m256i words, int64_t eight) const {
    const __m512i sums =
      _mm512_add_epi32(_mm512_shuffle_i32x4(first, second, 0x88), _mm512_shuffle_i32x4(first, second, 0xdd));
    const __m512i integers = _mm512_add_epi32(scaled(sums), _mm512_load_si512(offsets[eight]));
    const __m512 steps = _mm512_mul_ps(_mm512_cvtph_ps(halves(words)), _mm512_load_ps(scales[eight]));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(integers), steps);
  }

  // As `scale_halves`.
  static OTARO_INLINE __m256i halves(__m256i words) {
    return _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  }

  // Lanes of eight rows, two in each register, summed as step 4 of sefp.h says once lanes j and j + 8 are.
  // `ninth`, of rows 0 2 1 3 4 6 5 7, is lane 8 of nine units.
  static OTARO_INLINE __m256 sum_lanes(const __m512 (&z)[4], const __m256* ninth = nullptr) {
    const auto pairs = [&](int i) __attribute__((always_inline)) {  // j + 4
      __m512 first = _mm512_unpacklo_ps(z[2 * i], z[2 * i + 1]);
      if (ninth) {
        const __m128 four = i ? _mm256_extractf128_ps(*ninth, 1) : _mm256_castps256_ps128(*ninth);
        first = _mm512_add_ps(first, _mm512_maskz_expand_ps(0x0303, _mm512_castps128_ps512(four)));
      }
      return _mm512_castps_pd(_mm512_add_ps(first, _mm512_unpackhi_ps(z[2 * i], z[2 * i + 1])));
    };
    const __m512d a = pairs(0), b = pairs(1);
    const __m512 quads = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                       _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));  // j + 2
    const __m512 sums = _mm512_add_ps(_mm512_shuffle_f32x4(quads, quads, 0x08),
                                      _mm512_shuffle_f32x4(quads, quads, 0x0d));  // j + 1
    return _mm256_permutevar8x32_ps(_mm512_castps512_ps256(sums), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }

  // Eight rows from `row` on.
  OTARO_INLINE __m256 eight_rows(const uint8_t* of_rows, int64_t row, int64_t units) const {
    const int64_t row_bytes = units * kUnitPlane, eights = (units + 7) / 8;
    const __m256i order = _mm256_setr_epi8(0, 0, 0, 2, 0, 4, 0, 6, 0, 1, 0, 3, 0, 5, 0, 7, 0, 8, 0, 10, 0, 12,
                                           0, 14, 0, 9, 0, 11, 0, 13, 0, 15);
    __m512 lanes[4];
#pragma GCC unroll 1
    for (int i = 0; i < 4; ++i) {
      int64_t at = (row + 2 * i) * row_bytes, next = at + row_bytes + kAhead;
      const uint8_t *first = of_rows + 2 * i * units, *second = first + units;
      __m512 now = _mm512_setzero_ps(), then = now;
      for (int64_t eight = 0; eight < eights; ++eight, at += 8 * kUnitPlane, first += 8, second += 8) {
        next = fetch<8>(next);
        const __m128 eight_bytes = _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(first)));
        const __m128i bytes =
          _mm_castps_si128(_mm_loadh_pi(eight_bytes, reinterpret_cast<const __m64*>(second)));
        const __m512 added = _mm512_add_ps(
          now, terms(eight_sums(at, eight), eight_sums(at + row_bytes, eight),
                     _mm256_maskz_permutexvar_epi8(0xaaaaaaaa, order, _mm256_castsi128_si256(bytes)), eight));
        now = then;
        then = added;
      }
      lanes[i] = _mm512_add_ps(now, then);
    }
    return sum_lanes(lanes);
  }

  // Eight rows of nine units. The ninth ones of two rows are a pair.
  OTARO_INLINE __m256 nine_units(const uint8_t* of_rows, int64_t row) const {
    constexpr int kRow = kNine * kUnitPlane;
    const int64_t at = row * kRow;
    const __m512i bytes[2] = {_mm512_loadu_si512(of_rows), _mm512_loadu_si512(of_rows + 8)};
    const auto words = [&](const ByteOrder& order, int n) __attribute__((always_inline)) {
      return _mm512_castsi512_si256(
        _mm512_maskz_permutexvar_epi8(0xaaaaaaaaaaaaaaaa, in_order(order), bytes[n]));
    };
    __m512 lanes[4];
    __m512i sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int64_t first = at + 2 * i * kRow, second = first + kRow;
      fetch<kNine>(first + kAhead);
      lanes[i] = _mm512_add_ps(_mm512_setzero_ps(), terms(eight_sums(first, 0), eight_sums(second, 0),
                                                          words(kNineOrders.two[i], i == 3), 0));
      const auto base_of = [&](int64_t row)
                             __attribute__((always_inline)) { return load(base + 4 * row + 8 * kUnitBase); };
      const auto piece = [&](int p) __attribute__((always_inline)) {
        if (p >= kPlanesUsed) return _mm_setzero_si128();
        const uint8_t *a = planes[p] + first + 8 * kUnitPlane, *b = planes[p] + second + 8 * kUnitPlane;
        return _mm_castps_si128(
          _mm_loadh_pi(_mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a))),
                       reinterpret_cast<const __m64*>(b)));
      };
      sums[i] = products(_mm512_inserti64x4(_mm512_castsi256_si512(base_of(first)), base_of(second), 1),
                         matrices(piece), piece(4), digits[4]);
    }
    // Rows 0 2 4 6, 0 2 4 6, 1 3 5 7, 1 3 5 7, in parts: what is left is 0 2 1 3, 4 6 5 7.
    const __m512i all = quads(sums);
    const __m512i order = _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    const __m512i parts = _mm512_permutexvar_epi32(order, all);
    const __m256i both = _mm256_add_epi32(_mm512_castsi512_si256(parts), _mm512_extracti64x4_epi64(parts, 1));
    const __m256i integers = _mm256_add_epi32(_mm512_castsi512_si256(scaled(_mm512_castsi256_si512(both))),
                                              _mm256_set1_epi32(offsets[1][0]));
    const __m128i last = _mm256_castsi256_si128(halves(words(kNineOrders.last, 1)));
    const __m256 steps = _mm256_mul_ps(_mm256_cvtph_ps(last), _mm256_set1_ps(scales[1][0]));
    const __m256 ninth = _mm256_mul_ps(_mm256_cvtepi32_ps(integers), steps);
    return sum_lanes(lanes, &ninth);
  }

  // Have the cache fetch bytes of so many units of two rows; returns where those after them are. It is the
  // second-level cache: the first has room for some twenty misses, and one that waits for memory holds its
  // place so long that a core reads no more than 15 to 18 GB/s.
  template <int Units>
  OTARO_INLINE int64_t fetch(int64_t at) const {
    constexpr int kBytes = 2 * Units * kUnitPlane, kSecondLevel = 2;  // prefetcht1
    for (int i = 0; i < kBytes; i += 16) __builtin_prefetch(base + 4 * (at + i), 0, kSecondLevel);
    for (int p = 0; p < kPlanesUsed; ++p)
      for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(planes[p] + at + i, 0, kSecondLevel);
    // Else gcc gathers the prefetches of several rows in one place: more misses than a core has room for.
    asm volatile("" : : : "memory");
    return at + kBytes;
  }
};

// The machine of rows.h, with one token by `One`. What does not come in eights of rows is left to others.
struct Machine : X86<Avx512> {
  template <int M, bool Truncate>
  static int64_t linear_one(const Packed& weight, const Activations& x, int64_t begin, int64_t end,
                            float* out) {
    using Kernel = One<M, Truncate>;
    const int64_t units = x.units;
    // Where units are no multiple of eight, the first ones of the next row are read too, and count nothing.
    const int64_t beyond = (units + 7) / 8 * 8 - units;
    if (x.stride != 1 || (units != Kernel::kNine && (3 * beyond > units || units > Kernel::kMostUnits)))
      return begin;
    const Kernel one(weight, x);
    int64_t row = begin;
    if (units == Kernel::kNine)
      for (; row + 8 <= end; row += 8)
        _mm256_storeu_ps(out + row, one.nine_units(weight.scales + row * units, row));
    else
      for (; row + 8 <= end && (weight.rows - row - 8) * units >= beyond; row += 8)
        _mm256_storeu_ps(out + row, one.eight_rows(weight.scales + row * units, row, units));
    return row;
  }
};

}  // namespace otaro::avx512
