// x86 CPUs with AVX-VNNI and GFNI: those of Intel for desktops and laptops since Alder Lake (2021), which
// have no AVX-512. One token is here; several are AVX2's, as a product of words takes the same time there.
//
// Registers have a half for each of two units, so that eight units leave four registers to be summed across.
// Of units 0 1 2 3 the pairs are 0 2 and 1 3, as these lie in the halves of a plane's 32 bytes. A pair has
// four parts, of 32 codes each: even quads of first blocks (weights 8 j + k), odd quads (8 j + 4 + k), and
// the same of second blocks.
//
//   base    16 bytes of a block, byte 4 j + k in the order of a part: lower nibbles are even quads, upper
//   ones
//           odd quads. A GF(2) product with a constant shifts and masks at once.
//   planes  One alone (E5M4): its word of a block, shifted by its own distance for each j, and masked.
//           More: eight bytes, bits of up to four planes for the weights k, k + 4, k + 8, ... of the second
//           block, then of the first, are an 8x8 matrix. A GF(2) product with the unit vectors transposes it:
//           a byte for each quad, whose lower half has bits of the first block, the upper one of the second.
//           The fifth of E5M8 is multiplied by itself.
#define OTARO_ISA avxvnni
#include "avx2_one.h"

namespace otaro::avxvnni {

constexpr int kParts = 4;

OTARO_INLINE __m256i twice(__m128i half) { return _mm256_broadcastsi128_si256(half); }

// Each byte times a matrix, which is a number: its first byte is the row of the highest bit.
OTARO_INLINE __m256i times(__m256i bytes, int64_t matrix) {
  return _mm256_gf2p8affine_epi64_epi8(bytes, _mm256_set1_epi64x(matrix), 0);
}

// The matrix by which `count` bits from bit `from` on go to bit `to`, and all others become 0.
constexpr int64_t move_bits(int from, int to, int count) {
  uint64_t matrix = 0;
  for (int i = 0; i < count; ++i) matrix |= uint64_t{1} << (from + i) << 8 * (7 - to - i);
  return static_cast<int64_t>(matrix);
}

template <int M, bool Truncate>
struct Eights {
  static constexpr int kPlanesUsed = M - kCoarsest;
  static constexpr int kMatrixRows = kPlanesUsed < 2 ? 0 : kPlanesUsed < 4 ? kPlanesUsed : 4;
  static constexpr int kLowest = M == 4 || M > 7 ? 0 : 7 - M;  // bit of a part's codes
  static constexpr Meaning kMeans = meaning(M, Truncate);
  static constexpr int kConstant = kMeans.constant;

  // Of each pair high digits of the parts, then low ones.
  static OTARO_INLINE void lay_out(const Activations& x, const int64_t (&units)[8], int8_t* to) {
    constexpr int kFirst[] = {0, 1, 4, 5};
    for (int unit : kFirst)
      for (int half = 0; half < 2; ++half)
        for (int block = 0; block < 2; ++block, to += 2 * kBlock) {
          const auto of = [&](int64_t unit) __attribute__((always_inline)) {
            return load(x.digits + ((2 * unit + half) * 2 + block) * kBlock);
          };
          const __m256i first = of(units[unit]), second = of(units[unit + 2]);
          store(to, _mm256_permute2x128_si256(first, second, 0x20));
          store(to + kBlock, _mm256_permute2x128_si256(first, second, 0x31));
        }
  }

  // The matrices of two pairs: for k = 0 and 1, for 2 and 3.
  using Matrices = __m256i[2][2];
  static OTARO_INLINE void matrices(const Bytes<M>& bytes, int64_t at, Matrices& out) {
    const auto plane = [&](int p) __attribute__((always_inline)) {
      return p < kMatrixRows ? load(bytes.planes[p] + at) : _mm256_setzero_si256();
    };
    const __m256i first = plane(0), second = plane(1), third = plane(2), fourth = plane(3);
    const __m256i two[] = {_mm256_unpacklo_epi8(first, second), _mm256_unpackhi_epi8(first, second)};
    const __m256i others[] = {_mm256_unpacklo_epi8(third, fourth), _mm256_unpackhi_epi8(third, fourth)};
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      if constexpr (kMatrixRows == 2) {
        const __m256i order = twice(_mm_setr_epi8(8, 9, -1, -1, 0, 1, -1, -1, 10, 11, -1, -1, 2, 3, -1, -1));
        out[pair][0] = _mm256_shuffle_epi8(two[pair], order);
        out[pair][1] = _mm256_shuffle_epi8(two[pair], _mm256_add_epi32(order, _mm256_set1_epi32(0x0404)));
      } else {
        const __m256i of_first = _mm256_unpacklo_epi16(two[pair], others[pair]),
                      of_second = _mm256_unpackhi_epi16(two[pair], others[pair]);
        out[pair][0] = _mm256_unpacklo_epi32(of_second, of_first);
        out[pair][1] = _mm256_unpackhi_epi32(of_second, of_first);
      }
    }
  }

  // The codes of a pair, and what is multiplied by itself.
  struct Codes {
    __m256i parts[kParts], fifth[kParts];
  };

  // `base` is the first unit's; `words` are those of both blocks, of the plane that is in no matrix.
  static OTARO_INLINE Codes unpacked(const uint8_t* base, const __m256i (&matrices)[2],
                                     const __m256i (&words)[2]) {
    Codes out;
    auto& [parts, fifth] = out;
    constexpr int kNibble = kLowest + kPlanesUsed > 4 ? 4 : kLowest + kPlanesUsed;
#pragma GCC unroll 2
    for (int b = 0; b < 2; ++b) {
      const auto of = [&](int unit) __attribute__((always_inline)) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(base + (2 * unit + b) * kBaseBytes));
      };
      const __m256i nibbles = _mm256_inserti128_si256(_mm256_castsi128_si256(of(0)), of(2), 1);
      parts[2 * b] = times(nibbles, move_bits(0, kNibble, 4));
      parts[2 * b + 1] =
        kNibble == 4 ? _mm256_andnot_si256(every(15), nibbles) : times(nibbles, move_bits(4, kNibble, 4));
    }
    if constexpr (M == 4)
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i) parts[i] = _mm256_or_si256(parts[i], bits(words, i));
    if constexpr (M == kFinest)
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i) fifth[i] = bits(words, i);
    if constexpr (kMatrixRows > 0) {
      const __m256i unit_vectors = _mm256_set1_epi64x(static_cast<int64_t>(0x8020080240100401)),
                    j_before_k = twice(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
      const auto transposed = [&](int i) __attribute__((always_inline)) {
        return _mm256_castsi256_ps(_mm256_gf2p8affine_epi64_epi8(unit_vectors, matrices[i], 0));
      };
      const __m256 a = transposed(0), b = transposed(1);
      const __m256 quads[] = {_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd)};
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        const __m256i both = _mm256_shuffle_epi8(_mm256_castps_si256(quads[odd]), j_before_k);
        parts[odd] = _mm256_or_si256(parts[odd], _mm256_and_si256(both, every(15)));
        parts[2 + odd] = _mm256_or_si256(parts[2 + odd], times(both, move_bits(4, 0, 4)));
      }
    }
    if constexpr (Truncate)  // raised by the lowest bit where negative
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i) {
        constexpr int kBelowTop = M < kFinest ? M : kFinest - 1;
        const __m256i top = _mm256_srli_epi16(parts[i], kBelowTop);
        __m256i& part = M == kFinest ? fifth[i] : parts[i];
        part = _mm256_add_epi8(part, _mm256_andnot_si256(top, every(1 << kLowest)));
      }
    return out;
  }

  // Bits of a plane: bytes of 0 and 1 in the order of part i.
  static OTARO_INLINE __m256i bits(const __m256i (&words)[2], int i) {
    const __m256i even = twice(_mm_setr_epi32(0, 2, 4, 6)), odd = twice(_mm_setr_epi32(1, 3, 5, 7));
    return _mm256_and_si256(_mm256_srlv_epi32(words[i / 2], i % 2 ? odd : even), every(1));
  }

  // The sums of the products of a pair, each unit's in its half.
  static OTARO_INLINE __m256i products(const Codes& of, const int8_t* digits) {
    const auto sum = [&](const __m256i(&codes)[kParts], int half) __attribute__((always_inline)) {
      __m256i sums = _mm256_setzero_si256();
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i)
        sums = _mm256_dpbusd_avx_epi32(sums, codes[i], load(digits + (half * kParts + i) * kBlock));
      return sums;
    };
    const auto of_digits = [&](int half) __attribute__((always_inline)) {
      const __m256i sums = sum(of.parts, half);
      return M < kFinest ? sums : _mm256_add_epi32(_mm256_add_epi32(sums, sums), sum(of.fifth, half));
    };
    return _mm256_add_epi32(_mm256_slli_epi32(of_digits(0), 8), of_digits(1));
  }

  static OTARO_INLINE __m256i integers(const Bytes<M>& bytes, const int8_t* digits) {
    __m256i sums[4];
#pragma GCC unroll 2
    for (int four = 0; four < 2; ++four) {
      const int64_t at = four * 8 * kPlaneBytes;
      Matrices of_planes;
      if constexpr (kMatrixRows > 0) matrices(bytes, at, of_planes);
      __m256i last = _mm256_setzero_si256();
      if constexpr (M == 4 || M == kFinest) last = load(bytes.planes[kPlanesUsed - 1] + at);
      const __m256i words[2][2] = {{_mm256_shuffle_epi32(last, 0x00), _mm256_shuffle_epi32(last, 0x55)},
                                   {_mm256_shuffle_epi32(last, 0xaa), _mm256_shuffle_epi32(last, 0xff)}};
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) {
        const uint8_t* base = bytes.base + (four * 4 + pair) * 2 * kBaseBytes;
        sums[2 * four + pair] = products(unpacked(base, of_planes[pair], words[pair]),
                                         digits + (2 * four + pair) * 2 * kParts * kBlock);
      }
    }
    const __m256i across =
      _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
    return scaled(_mm256_permute4x64_epi64(across, 0xd8));
  }

  // What sums are as the integers I, but for the offset.
  static OTARO_INLINE __m256i scaled(__m256i sums) {
    constexpr int kUp = kMeans.factor - 1 - kLowest;
    if constexpr (kUp < 0) return _mm256_srai_epi32(sums, -kUp);
    return kUp ? _mm256_add_epi32(sums, sums) : sums;
  }
};

void many(const Packed& weight, const Activations& x, const Span* spans, int count, int64_t begin,
          int64_t end, float* out, int64_t stride) {
  const auto linear = kAvxVnni.linear[weight.bits - kCoarsest][weight.truncate];
  if (x.tokens == 1 && x.stride == 1) return linear(weight, x, begin, end, out, stride);
  kAvx2.many(weight, x, spans, count, begin, end, out, stride);
}

}  // namespace otaro::avxvnni

namespace otaro {
const Kernels kAvxVnni = {"avxvnni",
                          0,
                          avxvnni::digit_weight_by_block,
                          avxvnni::quantize<avxvnni::ByBlock>,
                          OTARO_INSTANCES(avxvnni::For<avxvnni::Machine<avxvnni::Eights>>::linear),
                          avxvnni::many,
                          OTARO_ALL(avxvnni::decode)};
const Instances<Dots> kAvxVnniDots = OTARO_INSTANCES(avxvnni::For<avxvnni::Machine<avxvnni::Eights>>::dots);
}  // namespace otaro
