// One token on AVX-512, or a few of one precision. Rows follow each other in memory, and so do their
// units: they are read sixteen at a time, past the ends of rows, until a whole number of rows is done.
// Activations begin anew with each row, so that they are there as often as it takes to read sixteen units of
// them from wherever a row may begin.
//
// A register has 32 weights of each of two neighbouring units, a pair. So one sum of products has both units,
// each in a half, and eight such sums, sixteen units, are added up across to sixteen integers in one
// register. Their terms go to memory, from where each row takes its own.
//
//   E5M3    Of one token the lower nibbles of 64 bytes of base are one register, the upper ones the other.
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
//
// Of a few tokens each takes its products from the codes of eight units while they are in registers; codes of
// nine bits become words first, which halves the products. For more it is cheaper to transpose rows
// (avx512.cpp), which leaves no sums across.
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

OTARO_INLINE __m512i in_order(const ByteOrder& order) { return _mm512_load_si512(order.of); }

// Sums of rows, as step 4 of sefp.h says, from the terms of their units. (Lanes begin with a term, not with
// 0; the sign that a sum of 0 may have by this is lost in the end.)
OTARO_ONCE void sum_rows(const float* terms, int64_t units, int64_t rows, float* out) {
  const int64_t whole = units / kLanes * kLanes;
  const auto rest = static_cast<__mmask16>((1u << (units - whole)) - 1);
  const auto fold = [](__m512 a, __m512 b) __attribute__((always_inline)) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (; rows > 0; rows -= 16, out += 16, terms += 16 * units) {
    const auto lanes = [&](int64_t row) __attribute__((always_inline)) {
      const float* at = terms + row * units;
      if (!whole) return _mm512_maskz_loadu_ps(rest, at);
      __m512 sum = _mm512_loadu_ps(at);
      for (int64_t k = kLanes; k < whole; k += kLanes) sum = _mm512_add_ps(sum, _mm512_loadu_ps(at + k));
      return rest ? _mm512_mask_add_ps(sum, rest, sum, _mm512_maskz_loadu_ps(rest, at + whole)) : sum;
    };
    __m512 eight[8], four[4], two[2];  // lanes of two rows each, of four, of eight
    if (!whole && rows >= 16)
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) eight[i] = fold(lanes(2 * i), lanes(2 * i + 1));
    else
#pragma GCC unroll 1
      for (int r = 0; r < 16; r += 2)
        eight[r / 2] = r < rows ? fold(lanes(r), lanes(r + 1 < rows ? r + 1 : r)) : _mm512_setzero_ps();
    for (int i = 0; i < 4; ++i) {
      const __m512 a = eight[2 * i], b = eight[2 * i + 1];
      four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    for (int i = 0; i < 2; ++i) {
      const __m512d a = _mm512_castps_pd(four[2 * i]), b = _mm512_castps_pd(four[2 * i + 1]);
      two[i] =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 sums =
      _mm512_add_ps(_mm512_shuffle_ps(two[0], two[1], 0x88),
                    _mm512_shuffle_ps(two[0], two[1], 0xdd));  // of rows 0 4 8 12 1 5 9 13 ...
    const auto wanted = static_cast<__mmask16>(rows < 16 ? (1u << rows) - 1 : 0xffff);
    _mm512_mask_storeu_ps(out, wanted,
                          _mm512_add_ps(_mm512_permutexvar_ps(order, sums), _mm512_setzero_ps()));
  }
}

// Whether codes are the lower nibbles of base, then the upper ones. With two tokens that is slower where base
// comes from memory (docs/log.md).
constexpr bool in_halves(int bits, int64_t tokens) { return bits == kCoarsest && tokens == 1; }

// Activations as these kernels read them.
struct Cycle {
  static constexpr int kMostPairs = 519, kMostTerms = 4096;
  static constexpr int kPairDigits = 8 * kBlock;  // high, low; of first blocks, of second ones

  int64_t units, tokens;
  int64_t rows;   // the fewest that end where sixteen units do
  int64_t pairs;  // at least eight, after which activations are those of a row's beginning again
  // Of so many pairs and of seven that are read beyond; all tokens of a pair, then those of the next one. Or
  // words, of even bytes and odd ones of first blocks, then of second ones.
  alignas(64) int8_t digits[kMostPairs * kPairDigits];
  // Of a token's units, then of the next token's.
  int32_t offsets[2 * kMostPairs];
  float scales[2 * kMostPairs];  // times what makes steps of scale bytes' halves

  OTARO_ONCE Cycle(const Packed& weight, const Activations& x, bool words)
    : units(x.units), tokens(x.tokens) {
    const int64_t divisor = units & -units;  // the largest power of two that divides them
    rows = divisor < 16 ? 16 / divisor : 1;
    pairs = units % 2 ? units : units / 2;
    if (pairs < 8) pairs = (pairs + 7) / pairs * pairs;
    if (!fits()) return;
    const ByteOrder* orders = in_halves(weight.bits, tokens) ? kOneOrders.digits_of_base : kOneOrders.digits;
    int8_t* out = digits;
    for (int64_t pair = 0; pair < there(); ++pair)
      for (int64_t t = 0; t < tokens; ++t, out += kPairDigits) {
        const auto unit = [&](int64_t i) {
          return x.digits + ((2 * pair + i) % units * x.stride + t) * 4 * kBlock;
        };
        const int8_t *first = unit(0), *second = unit(1);
        for (int block = 0; block < 2; ++block) {
          const auto bytes = [&](int half) __attribute__((always_inline)) {
            return _mm512_permutex2var_epi8(_mm512_loadu_si512(first + half * 2 * kBlock),
                                            in_order(orders[block]),
                                            _mm512_loadu_si512(second + half * 2 * kBlock));
          };
          const __m512i high = bytes(0), low = bytes(1);
          if (words) {
            const __m512i upper = _mm512_set1_epi16(static_cast<short>(0xff00));
            _mm512_store_si512(
              out + 4 * block * kBlock,
              _mm512_add_epi16(_mm512_slli_epi16(high, 8), _mm512_srai_epi16(_mm512_slli_epi16(low, 8), 8)));
            _mm512_store_si512(out + (4 * block + 2) * kBlock,
                               _mm512_add_epi16(_mm512_and_si512(high, upper), _mm512_srai_epi16(low, 8)));
          } else {
            _mm512_store_si512(out + 2 * block * kBlock, high);
            _mm512_store_si512(out + (2 * block + 4) * kBlock, low);
          }
        }
      }
    const Meaning means = meaning(weight.bits, weight.truncate);
    const float factor = power_of_two(weight.scale_exponent + 8 - means.shift);
    for (int64_t t = 0, at = 0; t < tokens; ++t)
      for (int64_t i = 0; i < 2 * there(); ++i, ++at) {
        offsets[at] = i < units ? means.constant * x.sums[t * units + i] : offsets[at - units];
        scales[at] = i < units ? factor * x.scales[t * units + i] : scales[at - units];
      }
  }

  int64_t there() const { return pairs + 7; }
  bool fits() const { return there() * tokens <= kMostPairs && rows * units <= kMostTerms; }
};

template <int M, bool Truncate>
struct One {
  static constexpr int kPlanesUsed = M - kCoarsest, kInBytes = kPlanesUsed < 4 ? kPlanesUsed : 4;
  static constexpr int kUnitBase = 2 * kBaseBytes, kUnitPlane = 2 * kPlaneBytes;
  static constexpr Meaning kMeans = meaning(M, Truncate);

  // Whether so many tokens are worth making words.
  static constexpr bool words(int tokens) { return M == kFinest && tokens > 1; }

  // Rows of planes that are in use.
  static constexpr uint64_t kRows = (1 << kInBytes) - 1, kUsed = (kRows | kRows << 4) * 0x0101010101010101;

  // Planes of pair i of eight units as matrices. A register has all of a plane's bytes, or those of two
  // planes for two pairs.
  static OTARO_INLINE __m512i matrices(const Bytes<M>& bytes, int64_t at, int i) {
    const auto further = [](const ByteOrder& order, int by) __attribute__((always_inline)) {
      return _mm512_add_epi8(in_order(order), _mm512_set1_epi8(static_cast<char>(by)));
    };
    const auto two = [&](int p) __attribute__((always_inline)) {
      const auto of = [&](int p) __attribute__((always_inline)) {
        return load(bytes.planes[p] + at + i / 2 * 4 * kUnitPlane);
      };
      const __m512i first = _mm512_zextsi256_si512(of(p));
      return p + 1 < kInBytes ? _mm512_inserti64x4(first, of(p + 1), 1) : first;
    };
    const __m512i order = further(kOneOrders.two_pairs, i % 2 * 16);
    if constexpr (kInBytes > 2) return _mm512_maskz_permutex2var_epi8(kUsed, two(0), order, two(2));
    if constexpr (kInBytes > 1) return _mm512_maskz_permutexvar_epi8(kUsed, order, two(0));
    if constexpr (kInBytes > 0)
      return _mm512_maskz_permutexvar_epi8(kUsed, further(kOneOrders.planes, i * 16),
                                           _mm512_loadu_si512(bytes.planes[0] + at));
    return _mm512_setzero_si512();
  }

  // The codes of a pair, of first blocks and of second ones; and of E5M8 what is multiplied by itself.
  struct Codes {
    __m512i codes[2], fifth[2];
  };

  // From 64 bytes of base, planes as matrices, and 16 bytes of the fifth.
  template <int Tokens>
  static OTARO_INLINE Codes unpacked(__m512i base, __m512i matrices, __m128i last) {
    const __m512i upper = _mm512_set1_epi8(static_cast<char>(0xf0)),
                  unit_vectors = _mm512_set1_epi64(0x8040201008040201);
    Codes out;
    auto& [codes, fifth] = out;
    if constexpr (!in_halves(M, Tokens)) {
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
    return out;
  }

  // The sums of a pair's products.
  static OTARO_INLINE __m512i products(const Codes& of, const int8_t* digits) {
    const auto add = [&](__m512i sums, const __m512i* codes, int half) __attribute__((always_inline)) {
      const int8_t* at = digits + half * 4 * kBlock;
      return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sums, codes[0], _mm512_load_si512(at)), codes[1],
                                 _mm512_load_si512(at + 2 * kBlock));
    };
    __m512i sums = add(_mm512_setzero_si512(), of.codes, 0);
    if constexpr (M < kFinest) return add(_mm512_slli_epi32(sums, 8), of.codes, 1);
    sums = add(_mm512_slli_epi32(sums, 1), of.fifth, 0);
    sums = add(_mm512_slli_epi32(sums, 7), of.codes, 1);
    return add(_mm512_slli_epi32(sums, 1), of.fifth, 1);
  }

  // Codes of nine bits as words: those of even bytes and of odd ones, of first blocks, then of second ones.
  static OTARO_INLINE void widen(const Codes& of, __m512i (&words)[4]) {
    const auto nine = [](__m512i upper, __m512i last) __attribute__((always_inline)) {
      return _mm512_ternarylogic_epi32(last, upper, _mm512_set1_epi16(0x01fe), 0xd8);
    };
    for (int block = 0; block < 2; ++block) {
      const __m512i codes = of.codes[block], last = of.fifth[block];
      words[2 * block] = nine(_mm512_add_epi16(codes, codes), last);
      words[2 * block + 1] = nine(_mm512_srli_epi16(codes, 7), _mm512_srli_epi16(last, 8));
    }
  }
  static OTARO_INLINE __m512i word_products(const __m512i (&words)[4], const int8_t* at) {
    __m512i sums = _mm512_setzero_si512();
    for (int i = 0; i < 4; ++i)
      sums = _mm512_dpwssd_epi32(sums, words[i], _mm512_load_si512(at + 2 * i * kBlock));
    return sums;
  }

  // Adds up within parts of four: part i has those of p[0], p[1], p[2], p[3].
  static OTARO_INLINE __m512i quads(const __m512i* p) {
    const auto pairs = [](__m512i a, __m512i b) __attribute__((always_inline)) {
      return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    const __m512i a = pairs(p[0], p[1]), b = pairs(p[2], p[3]);
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }

  // Eight units, which begin at `at` of each plane: their sums in parts, of 0 2 4 6 in the first two and of 1
  // 3 5 7 in the others, for each token.
  //
  // The second-level cache is told what will be read a microsecond from now. The first has room for some
  // twenty misses, and one that waits for memory holds its place so long that a core would read no more than
  // 15 to 18 GB/s. Of E5M3, which has a single plane to read, the first is told again when it is in the
  // second: left to itself it was late on a Zen 5, a seventh of the time. With more planes nothing was won.
  // Several tokens read no faster than that, so the first is told at once: 2 to 10% of their time.
  template <int Tokens>
  static OTARO_INLINE void eight_sums(const Bytes<M>& bytes, int64_t at, const int8_t* digits,
                                      __m512i (&out)[Tokens]) {
    constexpr int kAhead = 2048, kLevel = Tokens > 1 ? 3 : 2;
    for (int i = 0; i < 8 * kUnitBase; i += 64)
      __builtin_prefetch(bytes.base + 4 * (at + kAhead) + i, 0, kLevel);
    for (int p = 0; p < kPlanesUsed; ++p) __builtin_prefetch(bytes.planes[p] + at + kAhead, 0, kLevel);
    if constexpr (M == kCoarsest && Tokens == 1)
      for (int i = 0; i < 8 * kUnitBase; i += 64) __builtin_prefetch(bytes.base + 4 * (at + kAhead / 4) + i);
    Codes codes[4];
    __m512i as_words[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512i of_pair = _mm512_loadu_si512(bytes.base + 4 * at + i * 2 * kUnitBase);
      asm("" : "+v"(of_pair));  // else gcc reads it twice for E5M3: a fifth more time, most reads miss
      __m128i fifth = _mm_setzero_si128();
      if constexpr (M == kFinest)
        fifth = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes.planes[4] + at + i * 2 * kUnitPlane));
      codes[i] = unpacked<Tokens>(of_pair, matrices(bytes, at, i), fifth);
      if constexpr (words(Tokens)) widen(codes[i], as_words[i]);
    }
#pragma GCC unroll 5
    for (int t = 0; t < Tokens; ++t) {
      __m512i sums[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int8_t* of_token = digits + (i * Tokens + t) * Cycle::kPairDigits;
        sums[i] = words(Tokens) ? word_products(as_words[i], of_token) : products(codes[i], of_token);
      }
      out[t] = quads(sums);
    }
  }

  // What sums are as the integers I, but for the offset.
  static OTARO_INLINE __m512i scaled(__m512i sums) {
    constexpr int kDown = kFinest - 1 - M - (kMeans.factor - 1);
    if constexpr (kDown > 0) return _mm512_srai_epi32(sums, kDown);
    return kMeans.factor == 2 && M > kFinest - 2 ? _mm512_add_epi32(sums, sums) : sums;
  }

  // The terms of the units of some rows, sixteen at a time; a token's are `apart` from the last one's.
  template <int Tokens>
  static OTARO_INLINE void terms(const Packed& weight, const Cycle& x, int64_t row, int64_t rows, float* out,
                                 int64_t apart) {
    const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const Bytes<M> bytes(weight, row);
    const uint8_t* of_scales = weight.scales + row * x.units;
    const int64_t end = rows * x.units * kUnitPlane;
    constexpr int kOfPair = Tokens * Cycle::kPairDigits;
    int64_t pair = 0;
    for (int64_t at = 0; at < end; at += 16 * kUnitPlane) {
      __m512i first[Tokens], second[Tokens];
      eight_sums(bytes, at, x.digits + pair * kOfPair, first);
      eight_sums(bytes, at + 8 * kUnitPlane, x.digits + (pair + 4) * kOfPair, second);
      const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(of_scales));
      const __m512 values = _mm512_cvtph_ps(scale_halves(sixteen));
#pragma GCC unroll 5
      for (int t = 0; t < Tokens; ++t) {
        const __m512i sums =
          _mm512_permutexvar_epi32(order, _mm512_add_epi32(_mm512_shuffle_i32x4(first[t], second[t], 0x88),
                                                           _mm512_shuffle_i32x4(first[t], second[t], 0xdd)));
        const int64_t slot = 2 * (t * x.there() + pair);
        const __m512i integers = _mm512_add_epi32(scaled(sums), _mm512_loadu_si512(x.offsets + slot));
        const __m512 steps = _mm512_mul_ps(values, _mm512_loadu_ps(x.scales + slot));
        _mm512_storeu_ps(out + t * apart, _mm512_mul_ps(_mm512_cvtepi32_ps(integers), steps));
      }
      of_scales += 16, out += 16, pair += 8;
      if (pair >= x.pairs) pair -= x.pairs;
    }
  }

  // As the one of x86.h, of sixteen.
  static OTARO_INLINE __m256i scale_halves(__m128i bytes) {
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    return _mm256_and_si256(words, _mm256_set1_epi16(static_cast<short>(0xbfff)));
  }
};

// Rows [begin, end) of a product with so many tokens; returns the first row that is left.
template <int M, bool Truncate, int Tokens>
int64_t whole_rows(const Packed& weight, const Activations& x, int64_t begin, int64_t end, float* out,
                   int64_t stride) {
  const Cycle cycle(weight, x, One<M, Truncate>::words(Tokens));
  if (!cycle.fits()) return begin;
  alignas(64) float terms[Tokens * Cycle::kMostTerms];
  int64_t row = begin;
  // Sixteen rows at a time, or as many as have a thousand terms.
  const int64_t fit = 1024 / cycle.units, most = fit < 16 ? 16 : fit / 16 * 16;
  while (row + cycle.rows <= end) {
    int64_t some = (end - row) / cycle.rows * cycle.rows;
    if (some > most) some = most;
    if (some * cycle.units > Cycle::kMostTerms) some = cycle.rows;
    const int64_t apart = some * cycle.units;
    One<M, Truncate>::template terms<Tokens>(weight, cycle, row, some, terms, apart);
    for (int t = 0; t < Tokens; ++t) sum_rows(terms + t * apart, cycle.units, some, out + t * stride + row);
    row += some;
  }
  return row;
}

// The machine of rows.h, with one token by `One`.
struct Machine : X86<Avx512> {
  template <int M, bool Truncate>
  static int64_t linear_one(const Packed& weight, const Activations& x, int64_t begin, int64_t end,
                            float* out) {
    return whole_rows<M, Truncate, 1>(weight, x, begin, end, out, 0);
  }
};

}  // namespace otaro::avx512
