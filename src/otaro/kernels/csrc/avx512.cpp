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

  // Words 0 2 1 3 of every four, as `Quads` widens bytes.
  static OTARO_INLINE void lay_out(const __m256i (*codes)[2], int blocks, int8_t* digits, int16_t* words) {
    for (int b = 0; b < blocks; ++b) {
      const Digits bytes(codes[b][0], codes[b][1]);
      const auto place = [&](int8_t* at, __m256i part) __attribute__((always_inline)) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at + b * 16), _mm256_castsi256_si128(part));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at + (blocks + b) * 16),
                         _mm256_extracti128_si256(part, 1));
      };
      place(digits, bytes.high);
      place(digits + blocks * kBlock, bytes.low);
      for (int half = 0; half < 2; ++half)
        store(words + b * kBlock + half * kBlock / 2,
              _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(codes[b][half], 0xd8), 0xd8));
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

// Several tokens. Sixteen rows are transposed as they are unpacked, so that a lane has a row's weights to the
// end, and products with activations, broadcast, need no sum across.
//
// A register has four weights of each of sixteen rows, a quad. Bytes are multiplied with the activations'
// `digits`, high and low; at nine bits, pairs of 16 bits with their `words`.
template <int M, bool Truncate>
struct Quads {
  static constexpr int kQuads = 2 * kBlock / 4, kPlanesUsed = M - kCoarsest;
  static constexpr bool kWide = M == kFinest, kFactorTwo = meaning(M, Truncate).factor == 2;
  static constexpr bool kDouble = kFactorTwo && M < 7;  // eight bits twice are no byte

  const uint8_t* base[kTileRows];
  const uint8_t* planes[kPlanesUsed ? kPlanesUsed : 1][kTileRows];
  __m512i codes[kWide ? 2 * kQuads : kQuads];
  __m512i bits[kPlanesUsed ? kPlanesUsed : 1][4];  // of two units

  template <class RowOf>
  OTARO_INLINE Quads(const Packed& weight, RowOf row_of) {
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t block = row_of(r) * weight.blocks();
      base[r] = weight.base + block * kBaseBytes;
      for (int p = 0; p < kPlanesUsed; ++p) planes[p][r] = weight.planes[p] + block * kPlaneBytes;
    }
  }

  // Word w of the bases of a unit, eight words, of every row.
  OTARO_INLINE void base_words(int64_t unit, bool both, __m512i (&words)[8]) const {
    __m512i v[8], t[8];
    for (int r = 0; r < 8; ++r) {  // rows 0 and 4, 1 and 5, ...; 8 and 12, ...
      const auto row = [&](int r) __attribute__((always_inline)) {
        const uint8_t* from = base[r] + unit * 2 * kBaseBytes;
        return both ? load(from)
                    : _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      };
      const int first = r / 4 * 8 + r % 4;
      v[r] = _mm512_inserti64x4(_mm512_castsi256_si512(row(first)), row(first + 4), 1);
    }
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {  // lanes of 128 bits: words i and 4 + i of four rows, and of the next four
      words[i] = _mm512_shuffle_i32x4(v[i], v[4 + i], 0x88);
      words[4 + i] = _mm512_shuffle_i32x4(v[i], v[4 + i], 0xdd);
    }
  }

  // The words of a plane of four blocks, those of two units, as far as there are so many; the others are 0.
  static OTARO_INLINE void plane_words(const uint8_t* const (&rows)[kTileRows], int64_t block, int64_t left,
                                       __m512i (&words)[4]) {
    const auto mask = static_cast<__mmask8>((1 << left) - 1);
    const auto row = [&](int r) __attribute__((always_inline)) {
      const uint8_t* at = rows[r] + block * kPlaneBytes;
      return left >= 4 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(at))
                       : _mm_maskz_loadu_epi32(mask, at);
    };
    const auto two = [&](int r) __attribute__((always_inline)) {
      return _mm256_inserti128_si256(_mm256_castsi128_si256(row(r)), row(r + 4), 1);
    };
    __m512i v[4], t[4];  // rows r, r + 4, r + 8 and r + 12
    for (int r = 0; r < 4; ++r) v[r] = _mm512_inserti64x4(_mm512_castsi256_si512(two(r)), two(r + 8), 1);
    for (int i = 0; i < 2; ++i) {
      t[i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
      t[i + 2] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
      words[2 * i] = _mm512_unpacklo_epi64(t[2 * i], t[2 * i + 1]);
      words[2 * i + 1] = _mm512_unpackhi_epi64(t[2 * i], t[2 * i + 1]);
    }
  }

  // FORMAT.md: byte 4 j + k of a block's base has weights 8 j + k and 8 j + 4 + k, and bit i of byte k of a
  // plane is weight 4 i + k's: so a quad is the nibbles of one word, and one bit of every byte of another.
  OTARO_INLINE void unpack(int64_t unit, int64_t blocks) {
    __m512i words[8];
    base_words(unit, 2 * unit + 1 < blocks, words);
    if (unit % 2 == 0)
      for (int p = 0; p < kPlanesUsed; ++p) plane_words(planes[p], 2 * unit, blocks - 2 * unit, bits[p]);
    const int64_t first = unit % 2 * 2;  // of the words of a plane
    if constexpr (kWide) {
      for (int block = 0; block < 2; ++block) {
        const auto of = [&](int p) __attribute__((always_inline)) { return bits[p][first + block]; };
        nine_bits(words + 4 * block, of(0), of(1), of(2), of(3), of(4), codes + block * kQuads);
      }
      return;
    }
#pragma GCC unroll 16
    for (int q = 0; q < kQuads; ++q) {
      const int block = q / 8, quad = q % 8, nibble = quad % 2 * 4;
      const __m512i word = words[4 * block + quad / 2];
      // The lowest bit of u; where u counts double and its bits leave room for it, u is moved up by one.
      constexpr int kLow = kDouble ? 1 : 0;
      const auto moved = [](__m512i bits, int from, int to) __attribute__((always_inline)) {
        return _mm512_rolv_epi32(bits, _mm512_set1_epi32((32 + to - from) % 32));
      };
      const auto every = [](int bits) { return _mm512_set1_epi8(static_cast<char>(bits)); };
      __m512i u =
        _mm512_and_si512(moved(word, nibble, kPlanesUsed + kLow), every(15 << (kPlanesUsed + kLow)));
      for (int p = 0; p < kPlanesUsed; ++p) {
        const int to = kPlanesUsed - 1 - p + kLow;
        u = _mm512_ternarylogic_epi32(moved(bits[p][first + block], quad, to), every(1 << to), u,
                                      0xea);  // a & b | c
      }
      if constexpr (Truncate)
        u = _mm512_add_epi8(u, _mm512_andnot_si512(moved(word, nibble + 3, 0), every(1)));
      codes[digit_quad(block, quad)] = u;
    }
  }

  // All quads of a block at nine bits, as pairs: weights 0 and 2 of a quad, then 1 and 3. Planes are joined
  // two by two, so that a register has two bits of every other quad, then four of every fourth.
  static OTARO_INLINE void nine_bits(const __m512i* base, __m512i p0, __m512i p1, __m512i p2, __m512i p3,
                                     __m512i p4, __m512i* codes) {
    const auto choose = [](int mask, __m512i yes, __m512i no) __attribute__((always_inline)) {
      return _mm512_ternarylogic_epi32(_mm512_set1_epi16(static_cast<short>(mask)), yes, no, 0xca);
    };
    const auto up = [](__m512i bits, int by) { return _mm512_slli_epi32(bits, by); };
    const auto down = [](__m512i bits, int by) { return _mm512_srli_epi32(bits, by); };
    const __m512i two[2][2] = {
      {choose(0x5555, p1, up(p0, 1)), choose(0x5555, p3, up(p2, 1))},       // quads 0 2 4 6
      {choose(0x5555, down(p1, 1), p0), choose(0x5555, down(p3, 1), p2)}};  // 1 3 5 7
    __m512i four[4];                                                        // of quads q and q + 4
    for (int q = 0; q < 2; ++q) {
      four[q] = choose(0x3333, two[q][1], up(two[q][0], 2));
      four[q + 2] = choose(0x3333, down(two[q][1], 2), two[q][0]);
    }
    const __m512i last[2] = {_mm512_and_si512(p4, _mm512_set1_epi16(255)), _mm512_srli_epi16(p4, 8)};
#pragma GCC unroll 8
    for (int q = 0; q < 8; ++q) {
      const __m512i word = base[q / 2], eight = choose(0xf0f0, q % 2 ? word : up(word, 4),
                                                       q < 4 ? four[q] : down(four[q - 4], 4));
      const __m512i both[2] = {_mm512_add_epi16(eight, eight), _mm512_srli_epi16(eight, 7)};
      for (int i = 0; i < 2; ++i) {
        __m512i u = choose(0x01fe, both[i], _mm512_srli_epi16(last[i], static_cast<unsigned>(q)));
        if constexpr (Truncate) {  // raised where negative
          const __m512i ninth = _mm512_set1_epi16(256);
          u = _mm512_add_epi16(u, _mm512_srli_epi16(_mm512_andnot_si512(u, ninth), 8));
        }
        codes[2 * q + i] = u;
      }
    }
  }

  // Where a quad's digits are: even quads of both blocks, then odd ones (`wide_weight`).
  static constexpr int digit_quad(int block, int quad) { return quad % 2 * 8 + block * 4 + quad / 2; }

  template <int Tokens>
  OTARO_INLINE void dots(const Activations& x, int64_t unit, int token, __m512i (&dots)[Tokens]) const {
    const int64_t block = x.first_block(unit, token);
    const auto four = [](const void* at) __attribute__((always_inline)) {
      int32_t bytes;
      std::memcpy(&bytes, at, sizeof bytes);
      return _mm512_set1_epi32(bytes);
    };
    const auto offset = [&](int t) __attribute__((always_inline)) {
      return _mm512_set1_epi32(meaning(M, Truncate).constant * x.sums[(token + t) * x.units + unit]);
    };
    if constexpr (kWide) {
      const int16_t* words = x.words + block * kBlock;
      for (int t = 0; t < Tokens; ++t) dots[t] = _mm512_setzero_si512();
#pragma GCC unroll 32
      for (int k = 0; k < 2 * kQuads; ++k)
        for (int t = 0; t < Tokens; ++t)
          dots[t] = _mm512_dpwssd_epi32(dots[t], codes[k], four(words + t * 2 * kBlock + 2 * k));
      for (int t = 0; t < Tokens; ++t)
        dots[t] = _mm512_add_epi32(kFactorTwo ? _mm512_add_epi32(dots[t], dots[t]) : dots[t], offset(t));
    } else {
      const int8_t* digits = x.digits + block * 2 * kBlock;
      __m512i high[Tokens], low[Tokens];
      for (int t = 0; t < Tokens; ++t)
        high[t] = _mm512_setzero_si512(), low[t] = kFactorTwo && !kDouble ? high[t] : offset(t);
#pragma GCC unroll 16
      for (int q = 0; q < kQuads; ++q)
        for (int t = 0; t < Tokens; ++t) {
          const int8_t* at = digits + t * 4 * kBlock + 4 * q;
          high[t] = _mm512_dpbusd_epi32(high[t], codes[q], four(at));
          low[t] = _mm512_dpbusd_epi32(low[t], codes[q], four(at + 2 * kBlock));
        }
      for (int t = 0; t < Tokens; ++t) {
        const __m512i sums = _mm512_add_epi32(_mm512_slli_epi32(high[t], 8), low[t]);
        dots[t] = kFactorTwo && !kDouble ? _mm512_add_epi32(_mm512_add_epi32(sums, sums), offset(t)) : sums;
      }
    }
  }
};

constexpr int kTileTokens = 64;

template <int N>
struct Count {
  static constexpr int value = N;
};

template <int M, bool Truncate>
void many_tile(const Packed& weight, const Activations& x, int64_t first_row, int rows, float* out,
               int64_t stride) {
  const int64_t blocks = weight.blocks(), groups = weight.groups(), per_group = weight.units_per_group();
  const Steps<meaning(M, Truncate).shift> of_scales(weight);
  const auto row_of = [&](int r) { return first_row + (r < rows ? r : rows - 1); };
  Quads<M, Truncate> quads(weight, row_of);
  const uint8_t* scales[kTileRows];
  for (int r = 0; r < kTileRows; ++r) scales[r] = weight.scales + row_of(r) * groups;
  alignas(64) float lanes[kTileTokens][kLanes][kTileRows];
  std::memset(lanes, 0, static_cast<size_t>(x.tokens) * sizeof lanes[0]);
  __m512 steps = _mm512_setzero_ps();
  for (int64_t unit = 0, left = 0, group = 0; unit < x.units; ++unit, --left) {  // left: units of the group
    prefetch_next<M>(weight, first_row, unit);
    quads.unpack(unit, blocks);
    if (!left) {
      uint64_t bytes[2] = {};  // not stored byte by byte: what is loaded as a whole then has to wait
      for (int r = 0; r < kTileRows; ++r)
        bytes[r / 8] |= static_cast<uint64_t>(scales[r][group]) << 8 * (r % 8);
      const auto eight = [&](int h) __attribute__((always_inline)) {
        return of_scales.eight(reinterpret_cast<const uint8_t*>(bytes + h));
      };
      steps = _mm512_insertf32x8(_mm512_castps256_ps512(eight(0)), eight(1), 1);
      left = per_group, ++group;
    }
    const auto add = [&](auto count, int t) __attribute__((always_inline)) {
      __m512i dots[count.value];
      quads.template dots<count.value>(x, unit, t, dots);
      for (int i = 0; i < count.value; ++i) {
        const __m512 scale = _mm512_set1_ps(x.scales[(t + i) * x.units + unit]);
        const __m512 term = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[i]), _mm512_mul_ps(steps, scale));
        float* lane = lanes[t + i][unit % kLanes];
        _mm512_store_ps(lane, _mm512_add_ps(_mm512_load_ps(lane), term));
      }
    };
    int t = 0;
#pragma GCC unroll 1
    for (; t + 4 <= x.tokens; t += 4) add(Count<4>(), t);
    if (x.tokens - t == 3) add(Count<3>(), t);
    if (x.tokens - t == 2) add(Count<2>(), t);
    if (x.tokens - t == 1) add(Count<1>(), t);
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
  by_tiles(x, begin, end, kTileTokens, [&](const Activations& some, int first, int64_t row, int rows) {
    many_tile<M, Truncate>(weight, some, row, rows, out + first * stride, stride);
  });
}

}  // namespace otaro::avx512

namespace otaro {
const Kernels kAvx512 = {"avx512",
                         avx512::ByPair::digit_weight,
                         avx512::quantize<avx512::ByPair>,
                         OTARO_INSTANCES(avx512::For<avx512::Avx512>::linear),
                         OTARO_INSTANCES(avx512::many),
                         {1, 2, 2, 2, 2, 2},
                         OTARO_INSTANCES(avx512::For<avx512::Avx512>::dots),
                         OTARO_INSTANCES(avx512::decode)};
}
