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

struct ByteOrder {
  alignas(64) uint8_t of[64] = {};
};

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

  template <int M>
  struct Codes {
    static constexpr int kPlanesUsed = M - kCoarsest;

    __m512i low;  // the low eight bits of u; raised where `truncate` wants it and bytes suffice
    __m512i top;  // E5M8: the ninth bit

    OTARO_INLINE Codes(const Bytes<M>& bytes, int64_t block, bool both, bool truncate) {
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
      else if (truncate)
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

  template <int M>
  static OTARO_INLINE __m512i products(const Codes<M>& codes, __m512i high, __m512i low, bool truncate) {
    __m512i sums = _mm512_setzero_si512(), top = sums;
    if constexpr (M == kFinest) {
      top =
        _mm512_dpbusd_epi32(_mm512_slli_epi32(_mm512_dpbusd_epi32(sums, codes.top, high), 8), codes.top, low);
      sums = top;
    }
    sums =
      _mm512_dpbusd_epi32(_mm512_slli_epi32(_mm512_dpbusd_epi32(sums, codes.low, high), 8), codes.low, low);
    return truncate && M == kFinest ? _mm512_sub_epi32(sums, top) : sums;
  }

  template <int M>
  static OTARO_INLINE void unit_sums(const Bytes<M>& bytes, int64_t block, bool pair, bool both,
                                     bool truncate, const Activations& x, int64_t unit, int tokens,
                                     Sums (*sums)[8], int i) {
    const Codes<M> codes(bytes, block, both, truncate);
    const int8_t* at = x.digits + x.first_block(unit, 0) * 2 * kBlock;
#pragma GCC unroll 1
    for (int t = 0; t < tokens; ++t, at += pair ? 4 * kBlock : 2 * kBlock) {
      const __m512i high = pair ? _mm512_loadu_si512(at) : spread(at),
                    low = pair ? _mm512_loadu_si512(at + 2 * kBlock) : spread(at + kBlock);
      sums[t][i] = products(codes, high, low, truncate);
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

  static OTARO_INLINE Sums zero() { return _mm512_setzero_si512(); }
};

}  // namespace otaro::avx512

#include "avx512_one.h"

namespace otaro::avx512 {

// Several tokens. Rows are transposed as they are unpacked, so that a lane has a row's weights to the end,
// and products with activations, broadcast, need no sum across.
//
// A register has four weights of each of sixteen rows, a quad. Bytes are multiplied with the activations'
// `digits`, high and low; at nine bits, pairs of 16 bits with their `words`. Planes of two units are read at
// once, and codes stay in registers.
//
// Codes are u * 2^(7 - M), as in avx512_one.h: a bit has its place whatever M is. So they are unpacked once,
// at the finest precision of all, and those of a coarser one are left when bits are cleared. The ninth bit of
// E5M8 is joined to them where they are multiplied.
constexpr int kTileRows = 16, kQuads = 2 * kBlock / 4, kFewTokens = 16;

// Where a quad's digits are: even quads of both blocks, then odd ones (`wide_weight`).
constexpr int digit_quad(int block, int quad) { return quad % 2 * 8 + block * 4 + quad / 2; }

// Where the bytes of a unit of a tile's rows are.
struct Rows {
  const uint8_t* base[kTileRows];
  const uint8_t* planes[kPlanes][kTileRows];

  Rows() = default;
  template <class RowOf>
  Rows(const Packed& weight, RowOf row_of) {
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t block = row_of(r) * weight.blocks();
      base[r] = weight.base + block * kBaseBytes;
      for (int p = 0; p < weight.bits - kCoarsest; ++p) planes[p][r] = weight.planes[p] + block * kPlaneBytes;
    }
  }

  // Word w of the bases of a unit, eight words, of every row.
  OTARO_INLINE void base_words(int64_t unit, __m512i (&words)[8]) const {
    __m512i v[8], t[8];
    for (int r = 0; r < 8; ++r) {  // rows 0 and 4, 1 and 5, ...; 8 and 12, ...
      const auto row = [&](int r)
                         __attribute__((always_inline)) { return load(base[r] + unit * 2 * kBaseBytes); };
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
  OTARO_INLINE void plane_words(int plane, int64_t block, int64_t left, __m512i (&words)[4]) const {
    const auto mask = static_cast<__mmask8>(15 >> (left < 4 ? 4 - left : 0));
    const auto row = [&](int r) __attribute__((always_inline)) {
      const uint8_t* at = planes[plane][r] + block * kPlaneBytes;
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
};

// The rows of a tile, the last one again where there are fewer. Of an odd number of blocks, the last unit is
// read from a copy that has zeros where its second block would be.
struct TileRows {
  Rows whole, cut;
  int64_t cut_unit;
  uint8_t base[kTileRows][2 * kBaseBytes], planes[kPlanes][kTileRows][2 * kPlaneBytes];

  TileRows(const Packed& weight, int64_t first_row, int rows)
    : whole(weight, [&](int r) { return first_row + (r < rows ? r : rows - 1); }),
      cut_unit(weight.blocks() % 2 ? weight.blocks() / 2 : -1) {
    if (cut_unit < 0) return;
    std::memset(base, 0, sizeof base), std::memset(planes, 0, sizeof planes);
    for (int r = 0; r < kTileRows; ++r) {
      std::memcpy(base[r], whole.base[r] + cut_unit * 2 * kBaseBytes, kBaseBytes);
      cut.base[r] = base[r];
      for (int p = 0; p < weight.bits - kCoarsest; ++p) {
        std::memcpy(planes[p][r], whole.planes[p][r] + cut_unit * 2 * kPlaneBytes, kPlaneBytes);
        cut.planes[p][r] = planes[p][r];
      }
    }
  }
  TileRows(const TileRows&) = delete;

  // unpack(rows, number of the unit in them)
  template <class Unpack>
  OTARO_INLINE void of(int64_t unit, Unpack unpack) const {
    unpack(unit == cut_unit ? cut : whole, unit == cut_unit ? 0 : unit);
  }
};

// Bits of `yes` where the mask has them, of `no` elsewhere.
OTARO_INLINE __m512i choose(int mask, __m512i yes, __m512i no) {
  return _mm512_ternarylogic_epi32(no, yes, _mm512_set1_epi16(static_cast<short>(mask)), 0xd8);
}

// All quads of a block, u * 2^(7 - M), from words of its base and of four planes, zero where there are none:
// put(quad, codes). (By a pointer gcc would keep them in memory.) Planes are joined two by two, so that a
// register has two bits of every other quad, then four of every fourth.
template <class Put>
OTARO_INLINE void eight_bits(const __m512i* base, __m512i p0, __m512i p1, __m512i p2, __m512i p3, Put put) {
  const auto up = [](__m512i bits, unsigned by) { return _mm512_slli_epi32(bits, by); };
  const auto down = [](__m512i bits, unsigned by) { return _mm512_srli_epi32(bits, by); };
  const __m512i two[2][2] = {{choose(0x5555, p1, up(p0, 1)), choose(0x5555, p3, up(p2, 1))},  // quads 0 2 4 6
                             {choose(0xaaaa, p0, down(p1, 1)), choose(0xaaaa, p2, down(p3, 1))}};  // 1 3 5 7
  __m512i four[4];  // of quads q and q + 4
  for (int q = 0; q < 2; ++q) {
    four[q] = choose(0x3333, two[q][1], up(two[q][0], 2));
    four[q + 2] = choose(0xcccc, two[q][0], down(two[q][1], 2));
  }
#pragma GCC unroll 8
  for (int q = 0; q < 8; ++q) {
    const __m512i nibbles = q % 2 ? base[q / 2] : up(base[q / 2], 4);  // above
    put(q, q < 4 ? choose(0x0f0f, four[q], nibbles) : choose(0xf0f0, nibbles, down(four[q - 4], 4)));
  }
}

// With the bit of the last plane, as words: weights 0 and 2 of a quad, or the `odd` ones, 1 and 3.
OTARO_INLINE __m512i last_bits(__m512i plane, int odd) {
  return odd ? _mm512_srli_epi16(plane, 8) : _mm512_and_si512(plane, _mm512_set1_epi16(255));
}
OTARO_INLINE __m512i nine_bits(__m512i eight, __m512i last, int quad, int odd) {
  return choose(0x01fe, odd ? _mm512_srli_epi16(eight, 7) : _mm512_add_epi16(eight, eight),
                _mm512_srli_epi16(last, static_cast<unsigned>(quad)));
}

// In `truncate`, one more where a weight is negative.
template <bool Truncate>
OTARO_INLINE __m512i raised_nine(__m512i nine) {
  if constexpr (Truncate)
    nine = _mm512_add_epi16(nine, _mm512_srli_epi16(_mm512_andnot_si512(nine, _mm512_set1_epi16(256)), 8));
  return nine;
}

// Bit `from` of every byte to bit `to`; what comes from other bytes is for the caller to leave out.
OTARO_INLINE __m512i moved(__m512i bits, int from, int to) {
  return from > to ? _mm512_srli_epi32(bits, static_cast<unsigned>(from - to))
                   : _mm512_slli_epi32(bits, static_cast<unsigned>(to - from));
}

// What the scale bytes of a group say, of rows that are a stride apart, times 2^-8; the last row again where
// a tile has fewer.
OTARO_INLINE __m512 scale_values(const uint8_t* at, int64_t stride, int rows) {
  uint64_t bytes[2] = {};  // not stored byte by byte: what is loaded as a whole then has to wait
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r, at += r < rows ? stride : 0)
    bytes[r / 8] |= static_cast<uint64_t>(*at) << 8 * (r % 8);
  const auto eight = [&](int h) __attribute__((always_inline)) {
    return scale_halves(_mm_cvtsi64_si128(static_cast<int64_t>(bytes[h])));
  };
  return _mm512_cvtph_ps(_mm256_set_m128i(eight(1), eight(0)));
}

// By what these are multiplied to be steps.
OTARO_INLINE __m512 scale_factor(const Packed& weight, int shift) {
  return _mm512_set1_ps(power_of_two(weight.scale_exponent + 8 - shift));
}

// Products with four bytes, or two words, of activations, that are the same for all lanes. Compilers load
// these by an instruction of their own; with half as many instructions a CPU sees further ahead.
using FourBytes = int32_t __attribute__((may_alias, aligned(1)));
OTARO_INLINE void add_bytes(__m512i& sums, __m512i codes, const int8_t* four) {
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(sums)
      : "v"(codes), "m"(*reinterpret_cast<const FourBytes*>(four)));
}
OTARO_INLINE void add_words(__m512i& sums, __m512i codes, const int16_t* two) {
  asm("vpdpwssd %2%{1to16%}, %1, %0"
      : "+v"(sums)
      : "v"(codes), "m"(*reinterpret_cast<const FourBytes*>(two)));
}

// How a tile is unpacked, unit by unit; an odd unit comes after the even one before it.
struct Unpacked {
  const Packed& weight;
  const TileRows rows;
  __m512i (&planes)[kPlanes][4];  // words, of two units; zero where there are none

  Unpacked(const Packed& weight, int64_t first_row, int rows, __m512i (&planes)[kPlanes][4])
    : weight(weight), rows(weight, first_row, rows), planes(planes) {}

  OTARO_INLINE void unpack(int64_t unit, __m512i (&codes)[kQuads]) {
    __m512i words[8];
    rows.of(unit,
            [&](const Rows& some, int64_t at) __attribute__((always_inline)) { some.base_words(at, words); });
    if (unit % 2 == 0)
      for (int p = 0; p < weight.bits - kCoarsest; ++p)
        rows.whole.plane_words(p, 2 * unit, weight.blocks() - 2 * unit, planes[p]);
    const auto of = [&](int p, int block)
                      __attribute__((always_inline)) { return planes[p][unit % 2 * 2 + block]; };
    if (weight.bits <= kCoarsest + 1) {
#pragma GCC unroll 16
      for (int q = 0; q < kQuads; ++q)
        codes[q] = _mm512_and_si512(moved(words[q / 2], q % 2 * 4, 4), _mm512_set1_epi8(-16));
      if (weight.bits > kCoarsest)
#pragma GCC unroll 16
        for (int q = 0; q < kQuads; ++q)
          codes[q] = _mm512_ternarylogic_epi32(moved(of(0, q / 8), q % 8, 3), _mm512_set1_epi8(8), codes[q],
                                               0xea);  // a & b | c
    } else {
#pragma GCC unroll 2
      for (int b = 0; b < 2; ++b)
        eight_bits(words + 4 * b, of(0, b), of(1, b), of(2, b), of(3, b),
                   [&](int q, __m512i eight) __attribute__((always_inline)) { codes[8 * b + q] = eight; });
    }
  }
};

// Tokens of one precision. What sums of products of their codes mean: the integer I is `factor` times them,
// plus `constant` times the sum of activations, all of it times 2^-down; which may as well be done to I as a
// float.
struct Tokens {
  int first, end, bits, factor, constant;
  __m512 scale;  // makes scales steps, times 2^-down

  Tokens() = default;
  Tokens(const Packed& weight, const Span& span)
    : first(span.first), end(span.first + span.count), bits(span.bits) {
    const Meaning means = meaning(bits, weight.truncate);
    int down = bits < kFinest ? kFinest - 1 - bits : 0;
    factor = means.factor;
    if (factor == 2 && down) --down, factor = 1;
    constant = means.constant * (1 << down);
    scale = scale_factor(weight, means.shift + down);
  }
};

// Sums of products of a unit with some tokens.
template <int Count>
OTARO_INLINE void byte_dots(const __m512i (&codes)[kQuads], const Activations& x, int64_t unit, int token,
                            __m512i (&dots)[Count]) {
  const int8_t* digits = x.digits + x.first_block(unit, token) * 2 * kBlock;
  __m512i high[Count];
  for (int t = 0; t < Count; ++t) high[t] = dots[t] = _mm512_setzero_si512();
#pragma GCC unroll 16
  for (int q = 0; q < kQuads; ++q)
    for (int t = 0; t < Count; ++t) {
      const int8_t* at = digits + t * 4 * kBlock + 4 * digit_quad(q / 8, q % 8);
      add_bytes(high[t], codes[q], at);
      add_bytes(dots[t], codes[q], at + 2 * kBlock);
    }
  for (int t = 0; t < Count; ++t) dots[t] = _mm512_add_epi32(_mm512_slli_epi32(high[t], 8), dots[t]);
}

// The same at nine bits, by pairs of words: weights 0 and 2 of a quad, then 1 and 3. (The empty asm keeps gcc
// from making the words of all quads before the loop over tokens, which would store them.)
template <bool Truncate, int Count>
OTARO_INLINE void word_dots(const __m512i (&codes)[kQuads], const Unpacked& rows, const Activations& x,
                            int64_t unit, int token, __m512i (&dots)[Count]) {
  constexpr int kChains = Count > 4 ? 1 : 2;  // so that no sum has to wait for the last one
  const int16_t* words = x.words + x.first_block(unit, token) * kBlock;
  __m512i sums[kChains][Count];
  for (auto& chain : sums)
    for (auto& sum : chain) sum = _mm512_setzero_si512();
#pragma GCC unroll 2
  for (int block = 0; block < 2; ++block) {
    const __m512i plane = rows.planes[kPlanes - 1][unit % 2 * 2 + block];
    __m512i last[2] = {last_bits(plane, 0), last_bits(plane, 1)};
    asm volatile("" : "+v"(last[0]), "+v"(last[1]));
#pragma GCC unroll 8
    for (int q = 0; q < 8; ++q) {
      __m512i eight = codes[8 * block + q];
      asm volatile("" : "+v"(eight));
      for (int i = 0; i < 2; ++i) {
        const __m512i nine = raised_nine<Truncate>(nine_bits(eight, last[i], q, i));
        for (int t = 0; t < Count; ++t)
          add_words(sums[i % kChains][t], nine, words + t * 2 * kBlock + block * kBlock + 4 * q + 2 * i);
      }
    }
  }
  for (int t = 0; t < Count; ++t)
    dots[t] = kChains > 1 ? _mm512_add_epi32(sums[0][t], sums[kChains - 1][t]) : sums[0][t];
}

template <int N>
struct Count {
  static constexpr int value = N;
};

// body(Count<n>(), token) for neighbours of these tokens, as many at a time as registers suffice for.
template <int Most, class Body>
OTARO_INLINE void by_some(const Tokens& tokens, Body body) {
  int t = tokens.first;
#pragma GCC unroll 1
  for (; t + Most <= tokens.end; t += Most) body(Count<Most>(), t);
  if (Most > 4 && tokens.end - t >= 4) body(Count<4>(), t), t += 4;
  if (tokens.end - t == 3) body(Count<3>(), t);
  if (tokens.end - t == 2) body(Count<2>(), t);
  if (tokens.end - t == 1) body(Count<1>(), t);
}

// Codes at nine bits, as `word_dots` makes them, kept for many tokens.
template <bool Truncate>
OTARO_ONCE void nine_bit_words(const __m512i* codes, const Unpacked& rows, int64_t unit, __m512i* words) {
  for (int q = 0; q < kQuads; ++q)
    for (int odd = 0; odd < 2; ++odd) {
      const __m512i last = last_bits(rows.planes[kPlanes - 1][unit % 2 * 2 + q / 8], odd);
      words[2 * q + odd] = raised_nine<Truncate>(nine_bits(codes[q], last, q % 8, odd));
    }
}

// Products with them.
template <int Count>
OTARO_INLINE void kept_dots(const __m512i* words, const Activations& x, int64_t unit, int token,
                            __m512i (&dots)[Count]) {
  const int16_t* at = x.words + x.first_block(unit, token) * kBlock;
  __m512i even[Count], odd[Count];  // so that no sum has to wait for the last one
  for (int t = 0; t < Count; ++t) even[t] = odd[t] = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int q = 0; q < kQuads; ++q, at += 4)
    for (int t = 0; t < Count; ++t) {
      add_words(even[t], words[2 * q], at + t * 2 * kBlock);
      add_words(odd[t], words[2 * q + 1], at + t * 2 * kBlock + 2);
    }
  for (int t = 0; t < Count; ++t) dots[t] = _mm512_add_epi32(even[t], odd[t]);
}

// What becomes of the terms of tokens, unit by unit.
//
// Of a few tokens: units come in ascending order, and lanes are simply sixteen sums.
struct FewSums {
  static constexpr bool kFew = true;
  static OTARO_INLINE int64_t after(int64_t unit, int64_t) { return unit + 1; }

  alignas(64) float lanes[kFewTokens][kLanes][kTileRows];
  int64_t unit = 0;

  OTARO_INLINE void begin(int64_t now, int64_t) { unit = now; }
  OTARO_INLINE void add(int t, __m512 term, float*, __mmask16) {
    float* lane = lanes[t][unit % kLanes];
    const __m512 before = unit < kLanes ? _mm512_setzero_ps() : _mm512_load_ps(lane);
    _mm512_store_ps(lane, _mm512_add_ps(before, term));
  }
  OTARO_INLINE void end(const Activations& x, float* out, int64_t stride, __mmask16 wanted) const {
    for (int t = 0; t < x.tokens; ++t) {
      // A lane without units is 0, and no other is -0, which is all that 0 would change.
      __m512 sums[kLanes / 2];
      for (int j = 0; j < kLanes / 2; ++j) {
        sums[j] = j < x.units ? _mm512_load_ps(lanes[t][j]) : _mm512_setzero_ps();
        if (j + kLanes / 2 < x.units)
          sums[j] = _mm512_add_ps(sums[j], _mm512_load_ps(lanes[t][j + kLanes / 2]));
      }
      for (int half = kLanes / 4; half; half /= 2)
        for (int j = 0; j < half; ++j) sums[j] = _mm512_add_ps(sums[j], sums[j + half]);
      _mm512_mask_storeu_ps(out + t * stride, wanted, sums[0]);
    }
  }
};

// Of many tokens, sixteen sums of each would not stay in the first-level cache. Lanes are added in halves
// (sefp.h, step 4): with even ones in bit-reversed order, those that belong together follow each other, and
// a handful of sums is kept. An odd lane comes after the even one before it, whose planes it shares. A lane
// without units is left out: it is 0, and no other is -0, which is all that 0 would change.
struct ManySums {
  static constexpr bool kFew = false;
  static OTARO_INLINE int64_t after(int64_t unit, int64_t units) {
    if (unit % 2 == 0 && unit + 1 < units) return unit + 1;
    unit = unit / 2 * 2 + kLanes;
    if (unit < units) return unit;
    constexpr int kNext[] = {8, 10, 12, 14, 4, 6, 2, kLanes};  // of even lanes: 0 8 4 12 2 10 6 14
    int64_t lane = unit % kLanes;
    do lane = kNext[lane / 2];
    while (lane < kLanes && lane >= units);
    return lane < kLanes ? lane : units;
  }

  static constexpr int kUnfinished = 4, kOdd = 5, kSlots = 9;  // slots 5 to 8 are of odd lanes
  alignas(64) float kept[kManyTokens][kSlots][kTileRows];
  int unfinished = 0, to = 0;
  int with[4] = {}, merged = 0;
  bool first = false, result = false;

  OTARO_INLINE void begin(int64_t unit, int64_t units) {
    const int lane = static_cast<int>(unit % kLanes), odd = lane % 2;
    const auto slot = [&](int level) { return odd && level < 3 ? kOdd + level : level; };
    unfinished = odd ? kOdd + 3 : kUnfinished;
    first = unit < kLanes, result = false, merged = 0, to = unfinished;
    if (unit + kLanes < units) return;
    // The last unit may be even, without an odd one beside it: then what is even is complete last.
    const bool even_last = units == 3 || units == 7 || units % kLanes == kLanes - 1;
    for (int half = kLanes / 2, level = 0; half; half /= 2, ++level) {
      const int place = lane & (2 * half - 1);
      if (half == 1 && even_last ? !odd : place >= half) {
        with[merged++] = slot(level);
      } else if (place + half < units) {
        to = slot(level);
        return;
      }
    }
    result = true;
  }
  OTARO_INLINE void add(int t, __m512 term, float* out, __mmask16 wanted) {
    float (*sums)[kTileRows] = kept[t];
    __m512 sum = _mm512_add_ps(first ? _mm512_setzero_ps() : _mm512_load_ps(sums[unfinished]), term);
#pragma GCC unroll 1
    for (int i = 0; i < merged; ++i) sum = _mm512_add_ps(_mm512_load_ps(sums[with[i]]), sum);
    if (result)
      _mm512_mask_storeu_ps(out, wanted, sum);
    else
      _mm512_store_ps(sums[to], sum);
  }
  OTARO_INLINE void end(const Activations&, float*, int64_t, __mmask16) const {}
};

// body(i) for i < N, without a loop: gcc would keep what it indexes in memory.
template <int N, class Body>
OTARO_INLINE void unrolled(Body body) {
  if constexpr (N > 0) {
    unrolled<N - 1>(body);
    body(N - 1);
  }
}

template <bool Truncate, bool Nine, class Sums>
void tile(const Packed& weight, const Activations& x, const Tokens* spans, int count,
          __m512i (&planes)[kPlanes][4], int64_t first_row, int rows, float* out, int64_t stride) {
  const int64_t groups = weight.groups(), per_group = weight.units_per_group();
  const uint8_t* scales = weight.scales + first_row * groups;
  Unpacked unpacked(weight, first_row, rows, planes);
  Sums sums;
  const auto every = [](int bits) { return _mm512_set1_epi8(static_cast<char>(bits)); };
  const auto wanted = static_cast<__mmask16>((1u << rows) - 1);
  out += first_row;
  int64_t done = 0;
  for (int64_t unit = 0; unit < x.units; unit = Sums::after(unit, x.units)) {
    __m512i codes[kQuads];
    unpacked.unpack(unit, codes);
    prefetch_next<kTileRows>(weight, first_row, done++);  // not before this unit is read, which would wait
    const __m512 values = scale_values(scales + (per_group == 1 ? unit : unit / per_group), groups, rows);
    sums.begin(unit, x.units);
    for (const Tokens* span = spans + count; span-- > spans;) {  // the finest first
      const __m512 steps = _mm512_mul_ps(values, span->scale);
      const auto add = [&](auto& dots, int first) __attribute__((always_inline)) {
        unrolled<sizeof dots / sizeof dots[0]>([&](int i) __attribute__((always_inline)) {
          const int t = first + i;
          const int64_t slot = t * x.units + unit;
          __m512i dot = dots[i];
          if (span->factor == 2) dot = _mm512_add_epi32(dot, dot);
          dot = _mm512_add_epi32(dot, _mm512_set1_epi32(span->constant * x.sums[slot]));
          const __m512 scale = _mm512_mul_ps(steps, _mm512_set1_ps(x.scales[slot]));
          sums.add(t, _mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale), out + t * stride, wanted);
        });
      };
      if (Nine && span->bits == kFinest) {
        if (!Sums::kFew && span->end - span->first > kFewTokens) {
          __m512i words[2 * kQuads];
          nine_bit_words<Truncate>(codes, unpacked, unit, words);
          by_some<4>(*span, [&](auto count, int t) __attribute__((always_inline)) {
            __m512i dots[count.value];
            kept_dots(words, x, unit, t, dots);
            add(dots, t);
          });
          continue;
        }
        by_some<8>(*span, [&](auto count, int t) __attribute__((always_inline)) {
          __m512i dots[count.value];
          word_dots<Truncate>(codes, unpacked, x, unit, t, dots);
          add(dots, t);
        });
        continue;
      }
      __m512i raised[kQuads];
      if (span->bits != weight.bits)
#pragma GCC unroll 16
        for (int q = 0; q < kQuads; ++q)
          codes[q] = _mm512_and_si512(codes[q], every(0xff << (7 - span->bits)));
      if constexpr (Truncate)  // where they are negative
#pragma GCC unroll 16
        for (int q = 0; q < kQuads; ++q)
          raised[q] = _mm512_mask_add_epi8(codes[q], _mm512_testn_epi8_mask(codes[q], every(0x80)), codes[q],
                                           every(1 << (7 - span->bits)));
      by_some<4>(*span, [&](auto count, int t) __attribute__((always_inline)) {
        __m512i dots[count.value];
        byte_dots(Truncate ? raised : codes, x, unit, t, dots);
        add(dots, t);
      });
    }
  }
  sums.end(x, out, stride, wanted);
}

template <class Sums>
auto tile_for(const Packed& weight) {
  return weight.truncate          ? tile<true, true, Sums>
         : weight.bits == kFinest ? tile<false, true, Sums>
                                  : tile<false, false, Sums>;
}

// `whole_rows` of two tokens and more, by precision; null where it is no cheaper than to transpose.
auto few_whole_rows(int bits, int64_t tokens) {
  using WholeRows = decltype(&whole_rows<8, false, 2>);
  static constexpr WholeRows kFew[kPlanes + 1][4] = {
    {whole_rows<3, false, 2>},
    {whole_rows<4, false, 2>, whole_rows<4, false, 3>},
    {whole_rows<5, false, 2>, whole_rows<5, false, 3>, whole_rows<5, false, 4>},
    {whole_rows<6, false, 2>, whole_rows<6, false, 3>, whole_rows<6, false, 4>},
    {whole_rows<7, false, 2>, whole_rows<7, false, 3>, whole_rows<7, false, 4>},
    {whole_rows<8, false, 2>, whole_rows<8, false, 3>, whole_rows<8, false, 4>, whole_rows<8, false, 5>}};
  return tokens >= 2 && tokens <= 5 ? kFew[bits - kCoarsest][tokens - 2] : WholeRows{};
}

void many(const Packed& weight, const Activations& x, const Span* spans, int count, int64_t begin,
          int64_t end, float* out, int64_t stride) {
  if (x.tokens == 1)
    return kAvx512.linear[weight.bits - kCoarsest][weight.truncate](weight, x, begin, end, out, stride);
  if (count == 1 && !weight.truncate && weight.units_per_group() == 1 && weight.blocks() % 2 == 0)
    if (const auto whole = few_whole_rows(weight.bits, x.tokens))
      begin = whole(weight, x, begin, end, out, stride);
  const auto tile = x.tokens <= kFewTokens ? tile_for<FewSums>(weight) : tile_for<ManySums>(weight);
  Tokens of_spans[kManyTokens];
  __m512i planes[kPlanes][4] = {};
  for (int i = 0; i < count; ++i) of_spans[i] = Tokens(weight, spans[i]);
  for (int64_t row = begin; row < end; row += kTileRows) {
    const int rows = end - row < kTileRows ? static_cast<int>(end - row) : kTileRows;
    tile(weight, x, of_spans, count, planes, row, rows, out, stride);
  }
}

}  // namespace otaro::avx512

namespace otaro {
const Kernels kAvx512 = {"avx512",
                         0,
                         avx512::ByPair::digit_weight,
                         avx512::quantize<avx512::ByPair>,
                         OTARO_INSTANCES(avx512::For<avx512::Machine>::linear),
                         avx512::many,
                         OTARO_ALL(avx512::decode)};
const Instances<Dots> kAvx512Dots = OTARO_INSTANCES(avx512::For<avx512::Machine>::dots);
}  // namespace otaro
