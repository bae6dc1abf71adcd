// The kernels for AVX-512 with byte permutations, VNNI and GFNI (Ice Lake, Zen 4 and later): a unit of 64
// weights is one register.
//
//   base    32 bytes, broadcast: block 0, block 1, block 0, block 1; a rotation of the upper half by 4 bits
//   and a mask leave
//           64 nibbles, at once where the bits of the planes leave room for them.
//   planes  8 bytes each, up to five. Gathered into one register, they are eight 8x8 matrices of bits, one
//   for each byte of the two
//           plane words: row = plane, column = quad. A byte permutation brings each matrix together, one
//           GF(2) product with the unit vectors transposes all of them, and the byte permutation back puts
//           the bits of a weight where its nibble is.
//
// Unsigned bytes times signed bytes are summed in 32 bits by one instruction. The ninth bit of E5M8 is
// multiplied by itself.
#define OTARO_ISA avx512
#include "x86.h"
#include "floats.h"

namespace otaro::avx512 {

// Which weight of a pair of blocks byte i of a register stands for: even quads of both blocks, then odd
// quads.
constexpr int wide_weight(int i) { return i / 16 % 2 * kBlock + 8 * (i % 16 / 4) + 4 * (i / 32) + i % 4; }

struct ByPair {
  static int digit_weight(int i, int unit_blocks) {
    return unit_blocks == 1 ? digit_weight_by_block(i, 1) : wide_weight(i);
  }

  static OTARO_INLINE void lay_out(const __m256i (*codes)[2], int blocks, int8_t* digits, int16_t*) {
    for (int b = 0; b < blocks; ++b) {
      const Digits bytes(codes[b][0], codes[b][1]);
      const auto place = [&](int8_t* at, __m256i part) __attribute__((always_inline)) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at + b * 16), _mm256_castsi256_si128(part));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at + (blocks + b) * 16),
                         _mm256_extracti128_si256(part, 1));
      };
      place(digits, bytes.high);
      place(digits + blocks * kBlock, bytes.low);
    }
  }
};

struct ByteOrder {
  alignas(64) uint8_t of[64] = {};
};

// For `planes` planes, gathered as eight-byte pieces: byte r of matrix g is byte g of the plane whose bit is
// 7 - r, or of an empty piece.
constexpr ByteOrder to_matrices(int planes) {
  ByteOrder order;
  for (int g = 0; g < 8; ++g)
    for (int r = 0; r < 8; ++r)
      order.of[8 * g + r] = static_cast<uint8_t>(8 * (r >= 8 - planes ? planes - 8 + r : 7) + g);
  return order;
}

// Byte i of a register takes the bits of its weight: matrix = block and byte of the plane word, column =
// quad.
constexpr ByteOrder from_matrices() {
  ByteOrder order;
  for (int i = 0; i < 64; ++i) {
    const int weight = wide_weight(i), block = weight / kBlock;
    order.of[i] = static_cast<uint8_t>(8 * (4 * block + weight % 4) + weight % kBlock / 4);
  }
  return order;
}

template <int Planes>
struct Orders {
  static constexpr ByteOrder to = to_matrices(Planes), from = from_matrices();
};

// Left rotations of the words of a register that move bit `low` of a byte (the upper half: bit low + 4) to
// bit `to`.
OTARO_INLINE __m512i rotated(__m512i base, int low, int to) {
  const int first = (32 + to - low) % 32, second = (32 + to - low - 4) % 32;
  return _mm512_rolv_epi32(base, _mm512_inserti64x4(_mm512_set1_epi32(first), _mm256_set1_epi32(second), 1));
}

struct Avx512 {
  using Sums = __m512i;

  template <int M, bool Truncate>
  struct Codes {
    static constexpr int kPlanesUsed = M - kCoarsest;

    __m512i low;  // the low eight bits of u; raised where `truncate` wants it and bytes suffice
    __m512i top;  // E5M8: the ninth bit

    OTARO_INLINE Codes(const Bytes<M>& bytes, int64_t block, bool both) {
      const uint8_t* at = bytes.base + block * kBaseBytes;
      const __m256i two =
        both ? load(at) : _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
      const __m512i base = _mm512_broadcast_i64x4(two);
      const __m512i nibbles = rotated(base, 0, kPlanesUsed),
                    mask = _mm512_set1_epi8(static_cast<char>(15 << kPlanesUsed));
      if constexpr (kPlanesUsed > 0)
        low = _mm512_ternarylogic_epi32(nibbles, mask, planes(bytes, block, both),
                                        0xea);  // (nibbles & mask) | planes
      else
        low = _mm512_and_si512(nibbles, mask);
      if constexpr (M == kFinest)
        top = _mm512_and_si512(rotated(base, 3, 0), _mm512_set1_epi8(1));
      else if constexpr (Truncate)
        low = _mm512_add_epi8(low, _mm512_andnot_si512(rotated(base, 3, 0), _mm512_set1_epi8(1)));
    }

    // The bits of the planes, joined to one number per weight.
    static OTARO_INLINE __m512i planes(const Bytes<M>& bytes, int64_t block, bool both) {
      __m512i pieces = _mm512_setzero_si512();
      for (int p = 0; p < kPlanesUsed; ++p) {
        const uint8_t* at = bytes.planes[p] + block * kPlaneBytes;
        const __m128i words =
          both ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)) : _mm_loadu_si32(at);
        pieces = _mm512_mask_broadcastq_epi64(pieces, static_cast<__mmask8>(1 << p), words);
      }
      using Order = Orders<kPlanesUsed>;
      const __m512i matrices = _mm512_permutexvar_epi8(_mm512_load_si512(Order::to.of), pieces);
      const __m512i columns =
        _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi64(0x8040201008040201), matrices, 0);
      return _mm512_permutexvar_epi8(_mm512_load_si512(Order::from.of), columns);
    }
  };

  // Sums of products are of u, raised where negative; but E5M8 in `truncate` has low + 255 top, which is one
  // less.
  static constexpr int constant(int bits, bool truncate) {
    return meaning(bits, truncate).constant + (truncate && bits == kFinest ? 1 : 0);
  }

  template <int M, bool Truncate>
  static OTARO_INLINE __m512i products(const Codes<M, Truncate>& codes, __m512i high, __m512i low) {
    __m512i sums = _mm512_setzero_si512(), top = sums;
    if constexpr (M == kFinest) {
      top =
        _mm512_dpbusd_epi32(_mm512_slli_epi32(_mm512_dpbusd_epi32(sums, codes.top, high), 8), codes.top, low);
      sums = top;
    }
    sums =
      _mm512_dpbusd_epi32(_mm512_slli_epi32(_mm512_dpbusd_epi32(sums, codes.low, high), 8), codes.low, low);
    return Truncate && M == kFinest ? _mm512_sub_epi32(sums, top) : sums;
  }

  template <int M, bool Truncate, int Tokens, bool Pair>
  static OTARO_INLINE void unit_sums(const Bytes<M>& bytes, int64_t block, bool both, const int8_t* digits,
                                     const int16_t*, int tokens, Sums (*sums)[8], int i) {
    const Codes<M, Truncate> codes(bytes, block, both);
    for (int t = 0; t < tokens; ++t) {
      if constexpr (Pair) {
        const int8_t* at = digits + t * 4 * kBlock;
        sums[t][i] = products(codes, _mm512_loadu_si512(at), _mm512_loadu_si512(at + 2 * kBlock));
      } else {
        const int8_t* at = digits + t * 2 * kBlock;
        sums[t][i] = products(codes, spread(at), spread(at + kBlock));
      }
    }
  }

  // The digits of a single block, where those of the first of two would be.
  static OTARO_INLINE __m512i spread(const int8_t* digits) {
    return _mm512_maskz_permutexvar_epi64(0x33, _mm512_setr_epi64(0, 1, 0, 0, 2, 3, 0, 0),
                                          _mm512_castsi256_si512(load(digits)));
  }

  static OTARO_INLINE __m256i across(const Sums* p) {
    const auto pairs = [](__m512i a, __m512i b) __attribute__((always_inline)) {
      return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    const auto quads = [&](const Sums* q) __attribute__((always_inline)) {
      const __m512i a = pairs(q[0], q[1]), b = pairs(q[2], q[3]);
      return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    };
    const __m512i a = quads(p), b = quads(p + 4);
    const __m512i both = _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
    // Lanes are now 0 1 of units 0 to 3, 0 1 of units 4 to 7.
    return _mm512_castsi512_si256(
      _mm512_add_epi32(_mm512_shuffle_i32x4(both, both, 0x08), _mm512_shuffle_i32x4(both, both, 0x0d)));
  }

  static OTARO_INLINE int across_one(Sums p) {
    return Avx2::across_one(_mm256_add_epi32(_mm512_castsi512_si256(p), _mm512_extracti64x4_epi64(p, 1)));
  }

  static OTARO_INLINE Sums zero() { return _mm512_setzero_si512(); }
};

// Many tokens. Sixteen rows are unpacked and turned, so that a register has four weights of each: its
// products with four activations, broadcast, need no sum across, and a row stays in its lane to the end.
constexpr int kTileRows = 16, kTileTokens = 64;

OTARO_INLINE void transpose(__m512i (&v)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // v[4 k + i] has column 4 l + i of rows 4 k to 4 k + 3 in its lane l
    const __m512i a = _mm512_shuffle_i32x4(v[i], v[4 + i], 0x88),
                  b = _mm512_shuffle_i32x4(v[i], v[4 + i], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0x88),
                  d = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0xdd);
    t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
    t[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  for (int i = 0; i < 16; ++i) v[i] = t[i];
}

// Products of sixteen rows, four weights to a register, with 64 activation bytes.
OTARO_INLINE __m512i turned_products(__m512i sums, const __m512i (&rows)[16], const int8_t* digits) {
#pragma GCC unroll 16
  for (int q = 0; q < 16; ++q) {
    int32_t four;
    std::memcpy(&four, digits + 4 * q, sizeof four);
    sums = _mm512_dpbusd_epi32(sums, rows[q], _mm512_set1_epi32(four));
  }
  return sums;
}

template <int M, bool Truncate>
void many_tile(const Packed& weight, const Activations& x, int64_t first_row, int rows, float* out,
               int64_t stride) {
  constexpr Meaning means = meaning(M, Truncate);
  const int64_t blocks = weight.blocks(), groups = weight.groups(), per_group = weight.units_per_group();
  const Steps<means.shift> of_scales(weight);
  alignas(64) float lanes[kTileTokens][kLanes][kTileRows] = {};
  alignas(64) int32_t tops[kTileTokens][kTileRows];
  for (int64_t unit = 0; unit < x.units; ++unit) {
    const int8_t* digits = x.digits + x.first_block(unit, 0) * 2 * kBlock;
    const auto row_of = [&](int r) { return first_row + (r < rows ? r : rows - 1); };
    const auto codes = [&](int r) __attribute__((always_inline)) {
      return Avx512::Codes<M, Truncate>(Bytes<M>(weight, row_of(r)), 2 * unit, 2 * unit + 1 < blocks);
    };
    if constexpr (M == kFinest) {  // first, and alone: sixteen registers are half of all
      __m512i top[16];
      for (int r = 0; r < kTileRows; ++r) top[r] = codes(r).top;
      transpose(top);
      for (int t = 0; t < x.tokens; ++t) {
        const int8_t* at = digits + t * 4 * kBlock;
        const __m512i high = turned_products(_mm512_setzero_si512(), top, at);
        const __m512i low = turned_products(_mm512_setzero_si512(), top, at + 2 * kBlock);
        _mm512_store_si512(tops[t], _mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
      }
    }
    __m512i low[16];
    uint8_t scales[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
      low[r] = codes(r).low;
      scales[r] = weight.scales[row_of(r) * groups + unit / per_group];
    }
    transpose(low);
    const __m512 steps =
      _mm512_insertf32x8(_mm512_castps256_ps512(of_scales.eight(scales)), of_scales.eight(scales + 8), 1);
    for (int t = 0; t < x.tokens; ++t) {
      const int8_t* at = digits + t * 4 * kBlock;
      const __m512i start = M == kFinest ? _mm512_load_si512(tops[t]) : _mm512_setzero_si512();
      const __m512i high = turned_products(start, low, at),
                    of_low = turned_products(_mm512_setzero_si512(), low, at + 2 * kBlock);
      __m512i sums = _mm512_add_epi32(_mm512_slli_epi32(high, 8), of_low);
      if constexpr (Truncate && M == kFinest) sums = _mm512_sub_epi32(sums, start);
      if constexpr (means.factor == 2) sums = _mm512_add_epi32(sums, sums);
      const int64_t slot = t * x.units + unit;
      const __m512i dots =
        _mm512_add_epi32(sums, _mm512_set1_epi32(Avx512::constant(M, Truncate) * x.sums[slot]));
      const __m512 terms =
        _mm512_mul_ps(_mm512_cvtepi32_ps(dots), _mm512_mul_ps(steps, _mm512_set1_ps(x.scales[slot])));
      float* lane = lanes[t][unit % kLanes];
      _mm512_store_ps(lane, _mm512_add_ps(_mm512_load_ps(lane), terms));
    }
  }
  const auto wanted = static_cast<__mmask16>((1u << rows) - 1);
  for (int t = 0; t < x.tokens; ++t) {
    __m512 sums[kLanes];
    for (int j = 0; j < kLanes; ++j) sums[j] = _mm512_load_ps(lanes[t][j]);
    for (int half = kLanes / 2; half; half /= 2)
      for (int j = 0; j < half; ++j) sums[j] = _mm512_add_ps(sums[j], sums[j + half]);
    _mm512_mask_storeu_ps(out + t * stride + first_row, wanted, sums[0]);
  }
}

template <int M, bool Truncate>
void many(const Packed& weight, const Activations& x, int64_t begin, int64_t end, float* out,
          int64_t stride) {
  for (int64_t row = begin; row < end; row += kTileRows)
    for (int first = 0; first < x.tokens; first += kTileTokens) {
      const int tokens = x.tokens - first < kTileTokens ? x.tokens - first : kTileTokens;
      const int rows = end - row < kTileRows ? static_cast<int>(end - row) : kTileRows;
      many_tile<M, Truncate>(weight, x.some(first, tokens), row, rows, out + first * stride, stride);
    }
}

}  // namespace otaro::avx512

namespace otaro {
const Kernels kAvx512 = {"avx512",
                         avx512::ByPair::digit_weight,
                         avx512::quantize<avx512::ByPair>,
                         OTARO_INSTANCES(avx512::For<avx512::Avx512>::linear),
                         OTARO_INSTANCES(avx512::many),
                         {16, 16, 16, 16, 16, 16},
                         OTARO_INSTANCES(avx512::For<avx512::Avx512>::dots),
                         OTARO_INSTANCES(avx512::decode)};
}
