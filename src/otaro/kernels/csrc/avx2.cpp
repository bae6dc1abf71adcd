#define OTARO_ISA avx2
#include "avx2_one.h"
#include "floats.h"

namespace otaro::avx2 {

// The bits of `high` in `mask` and those of `low` that are `by` above change places.
OTARO_INLINE void exchange(__m256i& high, __m256i& low, int by, int mask) {
  const __m256i differ = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi32(low, by), high), every(mask));
  high = _mm256_xor_si256(high, differ);
  low = _mm256_xor_si256(low, _mm256_slli_epi32(differ, by));
}

// Bits of three or four planes of eight units of a row, joined to numbers: register i has those of unit i.
// Joined two by two, then four by four, a word has four bits of quads q and q + 4 in every byte. The halves
// of a register have words 0 2 0 2 and 1 3 1 3, of the first block, of the second one.
template <int M>
struct Joined {
  static constexpr int kCount = M < 7 ? M - kCoarsest : 4;
  __m256i units[8];

  OTARO_INLINE explicit Joined(const Bytes<M>& bytes) {
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      __m256i words[4] = {};
      for (int p = 0; p < kCount; ++p) words[4 - kCount + p] = load(bytes.planes[p] + i * 2 * kPlaneBytes);
      exchange(words[0], words[1], 1, 0x55), exchange(words[2], words[3], 1, 0x55);
      exchange(words[0], words[2], 2, 0x33), exchange(words[1], words[3], 2, 0x33);
      const auto place = [&](int to, __m256i even, __m256i odd) __attribute__((always_inline)) {
        units[i + to] = _mm256_permute2x128_si256(even, odd, 0x20);
        units[i + to + 2] = _mm256_permute2x128_si256(even, odd, 0x31);
      };
      place(0, _mm256_unpacklo_epi32(words[3], words[1]), _mm256_unpacklo_epi32(words[2], words[0]));
      place(1, _mm256_unpackhi_epi32(words[3], words[1]), _mm256_unpackhi_epi32(words[2], words[0]));
    }
  }

  // Those of a block, in the order of codes.
  OTARO_INLINE __m256i of(int unit, int block) const {
    const __m256i both = units[unit],
                  one = block ? _mm256_unpackhi_epi64(both, both) : _mm256_unpacklo_epi64(both, both);
    return _mm256_and_si256(_mm256_srlv_epi32(one, _mm256_setr_epi32(0, 0, 4, 4, 0, 0, 4, 4)), every(15));
  }
};

template <int M, bool Truncate>
struct Eights {
  using X86 = avx2::X86<Avx2>;
  static constexpr int kConstant = Avx2::constant(M, Truncate);
  static constexpr bool kWide = M > Avx2::kBytesUpTo;

  // What products want of units, one after the other.
  static OTARO_INLINE void lay_out(const Activations& x, const int64_t (&units)[8], int8_t* to) {
    for (int64_t unit : units)
      for (int i = 0; i < 4; ++i, to += kBlock)
        store(to,
              kWide ? load(x.words + (4 * unit + i) * kBlock / 2) : load(x.digits + (4 * unit + i) * kBlock));
  }

  static OTARO_INLINE __m256i integers(const Bytes<M>& bytes, const int8_t* activations) {
    X86::Sums sums[8];
    const auto products = [&](const X86::Codes<M>& first, const X86::Codes<M>& second,
                              int i) __attribute__((always_inline)) {
      const int8_t* at = activations + i * 4 * kBlock;
      sums[i] = X86::products(first, second, at, reinterpret_cast<const int16_t*>(at));
    };
    if constexpr (M > 5) {
      const Joined<M> joined(bytes);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const auto codes = [&](int block) __attribute__((always_inline)) {
          return X86::Codes<M>(bytes, 2 * i + block, Truncate, joined.kCount, joined.of(i, block));
        };
        products(codes(0), codes(1), i);
      }
    } else {
      constexpr int kTogether = 4;
#pragma GCC unroll 1
      for (int i = 0; i < 8; i += kTogether)
#pragma GCC unroll 8
        for (int j = i; j < i + kTogether; ++j)
          products({bytes, 2 * j, Truncate}, {bytes, 2 * j + 1, Truncate}, j);
    }
    const __m256i across = X86::across(sums);
    return Truncate ? across : _mm256_add_epi32(across, across);
  }
};

// Several tokens. Eight rows are turned as they are unpacked, so that a register has two weights of each, of
// 16 bits: their products with two activations, broadcast, need no sum across, and a row stays in its lane to
// the end. Sixteen rows share a broadcast. (avx512.cpp does the like with bytes, for which it has an
// instruction that adds four products at once.)
//
// The top bit of a code is in the same place at all precisions: bit 8 where E5M8 is among those of a call,
// else bit 7. So the codes of a coarser precision are those of a finer one with fewer bits, and a unit is
// unpacked once for all of them. The power of two by which sums are too large is left out of the steps: both
// are exact.
constexpr int kTileRows = 16, kHalves = kTileRows / 8, kPairs = kBlock;  // pairs of weights of a unit

constexpr int top_bit(int finest) { return finest < kFinest ? kFinest - 1 : kFinest; }

// Where the bytes of eight rows are.
struct EightRows {
  const uint8_t *base, *planes[kPlanes], *scales[8];
  int64_t rows[8];  // in bytes of a plane: few enough for registers, and all planes share them

  EightRows() = default;
  template <class RowOf>
  EightRows(const Packed& weight, RowOf row_of) : base(weight.base) {
    for (int p = 0; p < weight.bits - kCoarsest; ++p) planes[p] = weight.planes[p];
    for (int r = 0; r < 8; ++r) {
      rows[r] = row_of(r) * weight.blocks() * kPlaneBytes;
      scales[r] = weight.scales + row_of(r) * weight.groups();
    }
  }

  // The scale bytes of up to eight groups, of all rows each.
  OTARO_INLINE void some_scales(int64_t group, int64_t count, uint64_t (&some)[8]) const {
    if (count < 8) {
      for (int64_t g = 0; g < count; ++g) {
        some[g] = 0;
        for (int r = 0; r < 8; ++r) some[g] |= static_cast<uint64_t>(scales[r][group + g]) << 8 * r;
      }
      return;
    }
    const auto two = [&](int r) __attribute__((always_inline)) {  // rows r and r + 1
      const auto row = [&](int r) __attribute__((always_inline)) {
        return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales[r] + group));
      };
      return _mm_unpacklo_epi8(row(r), row(r + 1));
    };
    const __m128i a = two(0), b = two(2), c = two(4), d = two(6);
    const __m128i four[2][2] = {{_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b)},
                                {_mm_unpacklo_epi16(c, d), _mm_unpackhi_epi16(c, d)}};
    for (int i = 0; i < 2; ++i)
      store(some + 4 * i, _mm256_set_m128i(_mm_unpackhi_epi32(four[0][i], four[1][i]),
                                           _mm_unpacklo_epi32(four[0][i], four[1][i])));
  }

  // The four words of a block's base, each of all rows: rows 0 to 3 and 4 to 7 in the halves of a register,
  // and there the lower two bytes of every word before the upper two, as they are widened later.
  OTARO_INLINE void base_words(int64_t block, __m256i (&words)[4]) const {
    const uint8_t* at = base + block * kBaseBytes;
    const auto two = [&](int r) __attribute__((always_inline)) {  // rows r and r + 4
      const auto row = [&](int r) __attribute__((always_inline)) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + kBaseBytes / kPlaneBytes * rows[r]));
      };
      return _mm256_set_m128i(row(r + 4), row(r));
    };
    const __m256i v[] = {two(0), two(1), two(2), two(3)};
    turn(_mm256_unpacklo_epi16(v[0], v[2]), _mm256_unpacklo_epi16(v[1], v[3]), words);
    turn(_mm256_unpackhi_epi16(v[0], v[2]), _mm256_unpackhi_epi16(v[1], v[3]), words + 2);
  }

  // Those of a plane, of both blocks of a unit.
  OTARO_INLINE void plane_words(int plane, int64_t unit, __m256i* words) const {
    const uint8_t* at = planes[plane] + unit * 2 * kPlaneBytes;
    const auto two = [&](int r) __attribute__((always_inline)) {  // rows r and r + 1
      const auto row = [&](int r) __attribute__((always_inline)) { return at + rows[r]; };
      const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row(r)));
      return _mm_castps_si128(
        _mm_loadh_pi(_mm_castsi128_ps(first), reinterpret_cast<const __m64*>(row(r + 1))));
    };
    const __m256i v[] = {_mm256_set_m128i(two(4), two(0)), _mm256_set_m128i(two(6), two(2))};
    turn(_mm256_unpacklo_epi16(v[0], v[1]), _mm256_unpackhi_epi16(v[0], v[1]), words);
  }

  static OTARO_INLINE void turn(__m256i even, __m256i odd, __m256i* words) {
    words[0] = _mm256_unpacklo_epi16(even, odd), words[1] = _mm256_unpackhi_epi16(even, odd);
  }
};

// Copies of a unit of eight rows of which the second block is missing: nothing may be read beyond the last
// row. What stands in for it does not matter, as its activations are 0.
struct HalfUnit : EightRows {
  uint8_t of_base[8][2 * kBaseBytes] = {}, of_planes[kPlanes][8][2 * kPlaneBytes] = {};

  HalfUnit(const Packed& weight, const EightRows& from, int64_t unit) {
    base = of_base[0];
    for (int r = 0; r < 8; ++r) {
      const int64_t at = from.rows[r] + unit * 2 * kPlaneBytes;
      rows[r] = r * 2 * kPlaneBytes;
      std::memcpy(of_base[r], from.base + at * (kBaseBytes / kPlaneBytes), kBaseBytes);
      for (int p = 0; p < weight.bits - kCoarsest; ++p) {
        planes[p] = of_planes[p][0];
        std::memcpy(of_planes[p][r], from.planes[p] + at, kPlaneBytes);
      }
    }
  }
  HalfUnit(const HalfUnit&) = delete;
};

struct Codes {
  __m256i pairs[kPairs];
};

// Eight rows of a unit, pairs in the order of the activations' `words`. FORMAT.md: byte 4 j + k of a block's
// base has weights 8 j + k and 8 j + 4 + k, and bit i of byte k of a plane is weight 4 i + k's: so four
// weights, a quad, are the nibbles of one word, and one bit of every byte of another. Planes are joined two
// by two, so that a register has two bits of every other quad, then four of every fourth.
template <int M, bool Truncate>
void unpack(const EightRows& rows, int64_t unit, Codes& out) {
  constexpr int kUsed = M < 7 ? M - kCoarsest : 4, kJoined = kUsed < 3 ? kUsed : 4;
  __m256i bits[kPlanes][2] = {};
  for (int p = 0; p < M - kCoarsest; ++p) rows.plane_words(p, unit, bits[p]);
#pragma GCC unroll 2
  for (int b = 0; b < 2; ++b) {
    __m256i words[4], joined[] = {bits[0][b], bits[1][b], bits[2][b], bits[3][b]};
    rows.base_words(2 * unit + b, words);
    if constexpr (kJoined > 1) exchange(joined[0], joined[1], 1, 0x55);
    if constexpr (kJoined > 2) {
      exchange(joined[2], joined[3], 1, 0x55);
      exchange(joined[0], joined[2], 2, 0x33);
      exchange(joined[1], joined[3], 2, 0x33);
    }
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      const __m256i word = words[quad / 2];
      __m256i low = _mm256_and_si256(quad % 2 ? word : _mm256_slli_epi32(word, 4), every(0xf0));
      if constexpr (kJoined > 0) {
        constexpr int kTo = 4 - kJoined;
        const int of = quad % kJoined, from = quad - of;
        const __m256i some = joined[kJoined - 1 - of];
        low = _mm256_or_si256(low, _mm256_and_si256(from > kTo ? _mm256_srli_epi32(some, from - kTo)
                                                               : _mm256_slli_epi32(some, kTo - from),
                                                    every(15 >> kTo << kTo)));
      }
      if constexpr (Truncate && M < kFinest)  // raised where negative
        low = _mm256_add_epi8(low, _mm256_and_si256(_mm256_cmpgt_epi8(low, every(-1)), every(1 << (7 - M))));
      // In `words` quads 0 2 1 3 follow each other, then 4 6 5 7.
      __m256i* to = out.pairs + 16 * b + quad / 4 * 8 + quad % 2 * 4 + quad / 2 % 2 * 2;
      if constexpr (M < kFinest) {
        to[0] = _mm256_unpacklo_epi8(low, _mm256_setzero_si256());
        to[1] = _mm256_unpackhi_epi8(low, _mm256_setzero_si256());
      } else {  // the last bit comes from the byte below
        const __m256i last = _mm256_slli_epi32(bits[4][b], 7 - quad);
        to[0] = _mm256_srli_epi16(_mm256_unpacklo_epi8(last, low), 7);
        to[1] = _mm256_srli_epi16(_mm256_unpackhi_epi8(last, low), 7);
        if constexpr (Truncate)
          for (int i = 0; i < 2; ++i)
            to[i] = _mm256_sub_epi16(to[i], _mm256_cmpgt_epi16(_mm256_set1_epi16(256), to[i]));
      }
    }
  }
}

constexpr Instances<void (*)(const EightRows& rows, int64_t unit, Codes& out)> kUnpack =
  OTARO_INSTANCES(unpack);

// Codes of a coarser precision, in place of a finer one's. In `truncate` they are rounded towards the top
// bit, which stands for 0.
OTARO_INLINE void coarsen(Codes* codes, int bits, int top, bool truncate) {
  const int less = top - bits;
  const __m256i mask = _mm256_set1_epi16(static_cast<short>(-(1 << less))),
                zero = _mm256_set1_epi16(static_cast<short>(1 << top));
  const __m128i all_but = _mm_cvtsi32_si128(16 - less);
  for (int h = 0; h < kHalves; ++h)
#pragma GCC unroll 8  // where a loop of many turns ends is guessed wrong
    for (__m256i& u : codes[h].pairs) {
      if (truncate) u = _mm256_add_epi16(u, _mm256_srl_epi16(_mm256_sub_epi16(u, zero), all_but));
      u = _mm256_and_si256(u, mask);
    }
}

// One lane of all tokens. (One token more than there can be: lanes 4096 bytes apart would share a place in
// the cache.)
using Lanes = float[kManyTokens + 1][kTileRows];

alignas(32) constexpr float kNoLanes[kTileRows] = {};

// The terms of a unit of sixteen rows with up to four tokens from t on, which are added to their lanes. A
// code u means 2 u + constant. (Registers by name: an array gcc would keep in memory.)
template <int Tokens>
OTARO_INLINE void add_terms(const Codes* codes, const __m256* steps, int constant, const Activations& x,
                            int64_t unit, int64_t t, Lanes* lanes) {
  __m256i a0 = _mm256_setzero_si256(), a1 = a0, b0 = a0, b1 = a0, c0 = a0, c1 = a0, d0 = a0, d1 = a0;
  const int16_t* words = x.words + x.first_block(unit, t) * kBlock;
#pragma GCC unroll 8
  for (int k = 0; k < kPairs; ++k) {
    const __m256i low = codes[0].pairs[k], high = codes[1].pairs[k];
    const auto add = [&](int i, __m256i& of_low, __m256i& of_high) __attribute__((always_inline)) {
      int32_t two;
      std::memcpy(&two, words + i * 2 * kBlock + 2 * k, sizeof two);
      const __m256i x = _mm256_set1_epi32(two);
      of_low = _mm256_add_epi32(of_low, _mm256_madd_epi16(low, x));
      of_high = _mm256_add_epi32(of_high, _mm256_madd_epi16(high, x));
    };
    add(0, a0, a1);
    if constexpr (Tokens > 1) add(1, b0, b1);
    if constexpr (Tokens > 2) add(2, c0, c1);
    if constexpr (Tokens > 3) add(3, d0, d1);
  }
  const int64_t units = x.units;
  const int32_t* sums = x.sums + t * units + unit;
  const float *scales = x.scales + t * units + unit,
              *before = unit < kLanes ? kNoLanes : lanes[unit % kLanes][t];
  float* lane = lanes[unit % kLanes][t];
  const int64_t apart = unit < kLanes ? 0 : kTileRows;
  const auto add = [&](__m256i of_low, __m256i of_high) __attribute__((always_inline)) {
    const __m256i offset = _mm256_set1_epi32(constant * *sums);
    const __m256 scale = _mm256_set1_ps(*scales);
    const auto half = [&](int h, __m256i sum) __attribute__((always_inline)) {
      const __m256i dots = _mm256_add_epi32(_mm256_add_epi32(sum, sum), offset);
      const __m256 term = _mm256_mul_ps(_mm256_cvtepi32_ps(dots), _mm256_mul_ps(steps[h], scale));
      _mm256_store_ps(lane + 8 * h, _mm256_add_ps(_mm256_load_ps(before + 8 * h), term));
    };
    half(0, of_low), half(1, of_high);
    sums += units, scales += units, lane += kTileRows, before += apart;
  };
  add(a0, a1);
  if constexpr (Tokens > 1) add(b0, b1);
  if constexpr (Tokens > 2) add(c0, c1);
  if constexpr (Tokens > 3) add(d0, d1);
}

void many_tile(const Packed& weight, const Activations& x, const Span* spans, int count, int64_t first_row,
               int rows, float* out, int64_t stride) {
  const int top = top_bit(weight.bits);
  const int64_t per_group = weight.units_per_group(), half_unit = weight.blocks() % 2 ? x.units - 1 : -1;
  const int64_t groups = weight.groups();
  const Steps of_scales(weight, top + 1);
  const auto row_of = [&](int r) { return first_row + (r < rows ? r : rows - 1); };
  const EightRows halves[kHalves] = {{weight, row_of}, {weight, [&](int r) { return row_of(8 + r); }}};
  const auto unpack = kUnpack[weight.bits - kCoarsest][weight.truncate];
  alignas(32) Lanes lanes[kLanes];
  __m256 steps[kHalves] = {};
  uint64_t scales[kHalves][8];
  for (int64_t unit = 0, left = 0, group = 0; unit < x.units;
       ++unit, --left) {  // units that are left of the group
    Codes codes[kHalves];
    for (int h = 0; h < kHalves; ++h) {
      if (unit == half_unit)
        unpack(HalfUnit(weight, halves[h], unit), 0, codes[h]);
      else
        unpack(halves[h], unit, codes[h]);
      if (!left) {
        if (group % 8 == 0) halves[h].some_scales(group, groups - group, scales[h]);
        steps[h] = of_scales.eight(reinterpret_cast<const uint8_t*>(&scales[h][group % 8]));
      }
    }
    if (!left) left = per_group, ++group;
    prefetch_next<kTileRows>(weight, first_row, unit);  // not before this unit is read, which would wait
    int bits = weight.bits;
    for (const Span* span = spans + count; span-- > spans;) {  // the finest first
      if (span->bits < bits) coarsen(codes, bits = span->bits, top, weight.truncate);
      const Meaning means = meaning(bits, weight.truncate);
      const int constant = means.constant * ((means.factor == 2 ? 1 : 2) << (top - bits));
      int t = span->first, end = t + span->count;
      for (; t + 4 <= end; t += 4) add_terms<4>(codes, steps, constant, x, unit, t, lanes);
      if (end - t == 3)
        add_terms<3>(codes, steps, constant, x, unit, t, lanes);
      else if (end - t == 2)
        add_terms<2>(codes, steps, constant, x, unit, t, lanes);
      else if (end - t == 1)
        add_terms<1>(codes, steps, constant, x, unit, t, lanes);
    }
  }
  const int used = x.units < kLanes ? static_cast<int>(x.units) : kLanes;  // the others are 0
  for (int t = 0; t < x.tokens; ++t)
    for (int h = 0; h < kHalves && rows > 8 * h; ++h) {
      __m256 sums[kLanes / 2];
      for (int j = 0; j < kLanes / 2; ++j) {
        sums[j] = j < used ? _mm256_load_ps(lanes[j][t] + 8 * h) : _mm256_setzero_ps();
        if (j + kLanes / 2 < used)
          sums[j] = _mm256_add_ps(sums[j], _mm256_load_ps(lanes[j + kLanes / 2][t] + 8 * h));
      }
      for (int half = kLanes / 4; half; half /= 2)
        for (int j = 0; j < half; ++j) sums[j] = _mm256_add_ps(sums[j], sums[j + half]);
      float* to = out + t * stride + first_row + 8 * h;
      if (rows - 8 * h >= 8)
        _mm256_storeu_ps(to, sums[0]);
      else
        _mm256_maskstore_ps(to, first_lanes(rows - 8 * h), sums[0]);
    }
}

// (One token's rows are read by `linear` in their order, where it lies by itself.)
void many(const Packed& weight, const Activations& x, const Span* spans, int count, int64_t begin,
          int64_t end, float* out, int64_t stride) {
  if (x.tokens == 1 && x.stride == 1)
    return kAvx2.linear[weight.bits - kCoarsest][weight.truncate](weight, x, begin, end, out, stride);
  for (int64_t row = begin; row < end; row += kTileRows) {
    const int rows = end - row < kTileRows ? static_cast<int>(end - row) : kTileRows;
    many_tile(weight, x, spans, count, row, rows, out, stride);
  }
}

}  // namespace otaro::avx2

namespace otaro {
const Kernels kAvx2 = {"avx2",
                       0,
                       avx2::digit_weight_by_block,
                       avx2::quantize<avx2::ByBlock>,
                       OTARO_INSTANCES(avx2::For<avx2::Machine<avx2::Eights>>::linear),
                       avx2::many,
                       OTARO_ALL(avx2::decode)};
const Instances<Dots> kAvx2Dots = OTARO_INSTANCES(avx2::For<avx2::Machine<avx2::Eights>>::dots);
}  // namespace otaro
