// The kernels for WebAssembly, by its 128-bit vectors (the relaxed ones are not used: their results differ
// from CPU to CPU).
//
// Four blocks, two units of weights, are unpacked together. FORMAT.md: a quad is four weights, 4 j to 4 j + 3
// of a block; a word of 32 bits of its base has two quads, in low and high nibbles, and a plane has bit j of
// its four bytes for quad j. With the words of four blocks side by side, a quad of each is a register of
// bytes, and its bits lie at the same place in all lanes, so that plain shifts bring them where they belong.
// Bits of two planes, and then of four, are first put side by side for all quads at once: four planes cost
// hardly more than two.
//
// A byte is the code's upper eight bits, u << (7 - M), and E5M8's is its lower eight, with a byte that has
// the sign. There is no product of bytes: they are widened, which leaves the quads of one unit in one
// register and those of the other in another, and multiplied with activations of 16 bits in that order
// (`weight_of_word`).
//
// That leaves a register of partial sums per unit. Four units are summed across together, which gives their
// integers I in one register. For several tokens the four blocks are those of four rows (`Tile`).
#define OTARO_ISA wasm
#include <wasm_simd128.h>

#include "floats.h"
#include "many.h"

namespace otaro::wasm {

// Quads of both blocks of a unit take turns in `words`.
constexpr int weight_of_word(int i, int unit_blocks) {
  return unit_blocks == 1 ? i : i / 4 % 2 * kBlock + i / 8 * 4 + i % 4;
}

// Kernels of words alone have no use for digits.
inline void quantize(const float* x, int64_t length, const Activations& out, int token) {
  constexpr float kRound =
    12582912.0f;  // 1.5 * 2^23: adding it leaves a whole number, ties to even, in the low bits
  const int64_t unit_weights = out.unit_weights();
  for (int64_t unit = 0; unit < out.units; ++unit) {
    const float* values = x + unit * unit_weights;
    const int64_t count = length - unit * unit_weights;
    float filled[2 * kBlock];
    if (count < unit_weights) {
      for (int64_t i = 0; i < unit_weights; ++i) filled[i] = i < count ? values[i] : 0.0f;
      values = filled;
    }
    v128_t largest = wasm_i32x4_const_splat(0);
    for (int64_t i = 0; i < unit_weights; i += 4)
      largest = wasm_i32x4_max(largest,
                               wasm_v128_and(wasm_v128_load(values + i), wasm_i32x4_const_splat(kMagnitude)));
    largest = wasm_i32x4_max(largest, wasm_i32x4_shuffle(largest, largest, 2, 3, 0, 1));
    largest = wasm_i32x4_max(largest, wasm_i32x4_shuffle(largest, largest, 1, 0, 3, 2));
    const Power power = activation_power(static_cast<uint32_t>(wasm_i32x4_extract_lane(largest, 0)));
    const int64_t slot = token * out.units + unit;
    out.scales[slot] = power.scale;
    const v128_t inverse = wasm_f32x4_splat(power.inverse), round = wasm_f32x4_const_splat(kRound);
    // Where a value is not finite, so that inverse is 0, all integers are.
    const v128_t finite = wasm_i32x4_splat(power.inverse != 0.0f ? -1 : 0);
    v128_t sum = wasm_i32x4_const_splat(0);
    int16_t* words = out.words + out.first_block(unit, token) * kBlock;
    v128_t codes[2][4];  // of each block, in order
    for (int b = 0; b < out.unit_blocks; ++b, values += kBlock) {
      for (int i = 0; i < 4; ++i) {
        const auto four = [&](const float* from) __attribute__((always_inline)) {
          const v128_t rounded = wasm_f32x4_add(wasm_f32x4_mul(wasm_v128_load(from), inverse), round);
          return wasm_v128_and(wasm_i32x4_sub(rounded, round), finite);
        };
        codes[b][i] = wasm_i16x8_narrow_i32x4(four(values + 8 * i), four(values + 8 * i + 4));
        sum = wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(codes[b][i], wasm_i16x8_const_splat(1)));
      }
    }
    for (int i = 0; i < 4; ++i) {
      if (out.unit_blocks == 1) {
        wasm_v128_store(words + 8 * i, codes[0][i]);
      } else {
        wasm_v128_store(words + 16 * i, wasm_i64x2_shuffle(codes[0][i], codes[1][i], 0, 2));
        wasm_v128_store(words + 16 * i + 8, wasm_i64x2_shuffle(codes[0][i], codes[1][i], 1, 3));
      }
    }
    sum = wasm_i32x4_add(sum, wasm_i32x4_shuffle(sum, sum, 2, 3, 0, 1));
    out.sums[slot] = wasm_i32x4_extract_lane(sum, 0) + wasm_i32x4_extract_lane(sum, 1);
  }
}

OTARO_INLINE v128_t shift(v128_t v, int from, int to) {  // bits, of bytes that have none to lose
  return from > to ? wasm_u16x8_shr(v, static_cast<uint32_t>(from - to))
                   : wasm_i16x8_shl(v, static_cast<uint32_t>(to - from));
}

// Bits `from` on of every byte, to where the mask has its ones, `to` on.
OTARO_INLINE v128_t field(v128_t v, int from, int to, v128_t mask) {
  return wasm_v128_and(from == to ? v : shift(v, from, to), mask);
}

// Two planes side by side, or one and nothing: bits of quad j at 2 (j / 2), even quads and odd ones.
struct Pairs {
  v128_t even, odd;

  OTARO_INLINE Pairs(v128_t plane) {
    const v128_t evens = wasm_i8x16_const_splat(0x55);
    even = shift(wasm_v128_and(plane, evens), 0, 1), odd = wasm_v128_andnot(plane, evens);
  }
  OTARO_INLINE Pairs(v128_t first, v128_t second) : Pairs(first) {
    const v128_t evens = wasm_i8x16_const_splat(0x55);
    even = wasm_v128_or(even, wasm_v128_and(second, evens));
    odd = wasm_v128_or(odd, field(second, 1, 0, evens));
  }
};

// Four planes side by side: first of quads with bits at 0 and 4 of such pairs, then of the others.
struct Fours {
  v128_t of[2];

  OTARO_INLINE Fours(v128_t first, v128_t second) {
    const v128_t low = wasm_i8x16_const_splat(0x33);
    of[0] = wasm_v128_or(shift(wasm_v128_and(first, low), 0, 2), wasm_v128_and(second, low));
    of[1] = wasm_v128_or(wasm_v128_andnot(first, low), field(second, 2, 0, low));
  }
  OTARO_INLINE v128_t quad(int w) const { return field(of[w % 2], w / 2 * 4, 0, wasm_i8x16_const_splat(15)); }
};

// The bytes of four blocks.
template <int M>
struct Blocks {
  static constexpr int kPlanesHere = M - kCoarsest;
  v128_t base[4], planes[M > kCoarsest ? M - kCoarsest : 1];

  OTARO_INLINE Blocks(const Bytes<M>& bytes) {
    for (int b = 0; b < 4; ++b) base[b] = wasm_v128_load(bytes.base + b * kBaseBytes);
    for (int p = 0; p < kPlanesHere; ++p) planes[p] = wasm_v128_load(bytes.planes[p]);
  }
  // Only the first `count`, at most two.
  OTARO_INLINE Blocks(const Bytes<M>& bytes, int count) {
    base[2] = base[3] = wasm_i32x4_const_splat(0);
    base[0] = wasm_v128_load(bytes.base),
    base[1] = count > 1 ? wasm_v128_load(bytes.base + kBaseBytes) : base[2];
    for (int p = 0; p < kPlanesHere; ++p)
      planes[p] = count > 1 ? wasm_v128_load64_zero(bytes.planes[p]) : wasm_v128_load32_zero(bytes.planes[p]);
  }

  // The same block of four rows.
  OTARO_INLINE Blocks(const Packed& weight, const int64_t* rows, int64_t block) {
    uint32_t words[M > kCoarsest ? M - kCoarsest : 1][4];
    for (int r = 0; r < 4; ++r) {
      const Bytes<M> bytes(weight, rows[r]);
      base[r] = wasm_v128_load(bytes.base + block * kBaseBytes);
      for (int p = 0; p < kPlanesHere; ++p)
        std::memcpy(&words[p][r], bytes.planes[p] + block * kPlaneBytes, kPlaneBytes);
    }
    for (int p = 0; p < kPlanesHere; ++p) planes[p] = wasm_v128_load(words[p]);
  }

  // take(j, words of quad j of the first two blocks, of the other two), for all quads.
  template <bool Truncate, class Take>
  OTARO_INLINE void unpack(Take take) const {
    const auto even = [](v128_t a, v128_t b)
                        __attribute__((always_inline)) { return wasm_i32x4_shuffle(a, b, 0, 4, 1, 5); };
    const auto odd = [](v128_t a, v128_t b)
                       __attribute__((always_inline)) { return wasm_i32x4_shuffle(a, b, 2, 6, 3, 7); };
    const v128_t s[4] = {even(base[0], base[2]), even(base[1], base[3]), odd(base[0], base[2]),
                         odd(base[1], base[3])};
    const v128_t quads[4] = {even(s[0], s[1]), odd(s[0], s[1]), even(s[2], s[3]), odd(s[2], s[3])};
    if constexpr (M == 3) {
      each<Truncate>(quads, take, [](int, bool) __attribute__((always_inline)) { return v128_t{}; });
    } else if constexpr (M == 4) {
      each<Truncate>(quads, take, [&](int w, bool high) __attribute__((always_inline)) {
        return field(planes[0], 2 * w + high, 3, wasm_i8x16_const_splat(8));
      });
    } else if constexpr (M == 5) {
      const Pairs pairs(planes[0], planes[1]);
      each<Truncate>(quads, take, [&](int w, bool high) __attribute__((always_inline)) {
        return field(high ? pairs.odd : pairs.even, 2 * w, 2, wasm_i8x16_const_splat(12));
      });
    } else {
      constexpr int kFirst = M == kFinest;
      const Pairs first(planes[kFirst], planes[kFirst + 1]);
      const Pairs second = M == 6 ? Pairs(planes[2]) : Pairs(planes[kFirst + 2], planes[kFirst + 3]);
      const Fours low(first.even, second.even), high_quads(first.odd, second.odd);
      each<Truncate>(quads, take, [&](int w, bool high) __attribute__((always_inline)) {
        const v128_t four = high ? high_quads.quad(w) : low.quad(w);
        if constexpr (M < kFinest) return four;
        return wasm_v128_or(four, field(planes[0], 2 * w + high, 4, wasm_i8x16_const_splat(16)));
      });
    }
  }

 private:
  template <bool Truncate, class Take, class Lower>
  static OTARO_INLINE void each(const v128_t (&quads)[4], Take take, Lower lower) {
#pragma clang loop unroll(full)
    for (int w = 0; w < 4; ++w)
#pragma clang loop unroll(full)
      for (int high = 0; high < 2; ++high) {
        const v128_t top = high ? quads[w] : shift(quads[w], 0, 4);  // the base, in the upper nibble
        v128_t byte = M == kFinest ? field(top, 0, 1, wasm_i8x16_const_splat(static_cast<int8_t>(0xe0)))
                                   : wasm_v128_and(top, wasm_i8x16_const_splat(static_cast<int8_t>(0xf0)));
        if constexpr (M > kCoarsest) byte = wasm_v128_or(byte, lower(w, high));
        if constexpr (Truncate && M < kFinest) {
          const v128_t negative = wasm_i8x16_gt(byte, wasm_i8x16_const_splat(-1));
          byte =
            wasm_i8x16_add(byte, wasm_v128_and(negative, wasm_i8x16_const_splat(1 << (7 - (M < 8 ? M : 7)))));
        }
        v128_t low, upper;
        if constexpr (M < kFinest) {
          low = wasm_u16x8_extend_low_u8x16(byte), upper = wasm_u16x8_extend_high_u8x16(byte);
        } else {
          const v128_t negative = wasm_i8x16_gt(top, wasm_i8x16_const_splat(-1));  // u - 256 is, then
          low = wasm_i8x16_shuffle(byte, negative, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
          upper =
            wasm_i8x16_shuffle(byte, negative, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
          if constexpr (Truncate) {
            low = wasm_i16x8_add(low, wasm_u16x8_shr(low, 15));
            upper = wasm_i16x8_add(upper, wasm_u16x8_shr(upper, 15));
          }
        }
        take(2 * w + high, low, upper);
      }
  }
};

// Two units with one token, into sums[0] and sums[1]; `apart` words from one to the next.
template <int M, bool Truncate>
OTARO_INLINE void two_units(const Blocks<M>& blocks, const int16_t* words, int64_t apart, v128_t* sums) {
  v128_t first = wasm_i32x4_const_splat(0), second = first;
  blocks.template unpack<Truncate>([&](int j, v128_t a, v128_t b) __attribute__((always_inline)) {
    first = wasm_i32x4_add(first, wasm_i32x4_dot_i16x8(a, wasm_v128_load(words + 8 * j)));
    second = wasm_i32x4_add(second, wasm_i32x4_dot_i16x8(b, wasm_v128_load(words + apart + 8 * j)));
  });
  sums[0] = first, sums[1] = second;
}

// One unit, of one block or of two of which the second may be missing, into sums[t * 4].
template <int M, bool Truncate>
OTARO_INLINE void one_unit(const Blocks<M>& blocks, const int16_t* words, int unit_blocks, int tokens,
                           v128_t* sums) {
  v128_t codes[8];
  blocks.template unpack<Truncate>([&](int j, v128_t a, v128_t)
                                     __attribute__((always_inline)) { codes[j] = a; });
  for (int t = 0; t < tokens; ++t) {
    v128_t sum = wasm_i32x4_const_splat(0);
    for (int j = 0; j < 8; ++j) {
      const v128_t x =
        unit_blocks == 2 ? wasm_v128_load(words + 8 * j) : wasm_v128_load64_zero(words + 4 * j);
      sum = wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(codes[j], x));
    }
    sums[t * 4] = sum;
    words += unit_blocks * kBlock;
  }
}

OTARO_INLINE v128_t across(const v128_t* p) {
  const auto pair = [](v128_t a, v128_t b) __attribute__((always_inline)) {
    return wasm_i32x4_add(wasm_i32x4_shuffle(a, b, 0, 4, 1, 5), wasm_i32x4_shuffle(a, b, 2, 6, 3, 7));
  };
  const v128_t a = pair(p[0], p[1]), b = pair(p[2], p[3]);
  return wasm_i32x4_add(wasm_i64x2_shuffle(a, b, 0, 2), wasm_i64x2_shuffle(a, b, 1, 3));
}

// The integers I of four units. E5M8's codes were u - 256, those below u << (7 - M).
template <int M, bool Truncate>
OTARO_INLINE v128_t integers(const v128_t* sums, v128_t activation_sums) {
  constexpr Meaning means = meaning(M, Truncate);
  constexpr int kConstant = means.constant + (M == kFinest ? means.factor << kFinest : 0);
  constexpr int kDown = M == kFinest ? 0 : 7 - M;
  const v128_t products = wasm_i32x4_shr(across(sums), kDown);
  return wasm_i32x4_add(means.factor == 2 ? wasm_i32x4_add(products, products) : products,
                        wasm_i32x4_mul(activation_sums, wasm_i32x4_const_splat(kConstant)));
}

OTARO_INLINE v128_t wide_bytes(uint32_t bytes) {
  return wasm_i32x4_extend_low_i16x8(wasm_i16x8_extend_low_i8x16(wasm_u32x4_make(bytes, 0, 0, 0)));
}

// Four scales times 2^-120 from their bytes: with the bits of e and f where a float has its exponent and
// fraction. Subnormal where e is 0, which WebAssembly never flushes.
OTARO_INLINE v128_t scales_of(v128_t bytes) {
  return wasm_v128_and(wasm_i32x4_shl(bytes, 20), wasm_i32x4_const_splat(static_cast<int>(0x87f00000)));
}

// Four units' steps.
OTARO_INLINE v128_t steps_of(const Packed& weight, int down, uint32_t bytes) {
  const v128_t wide = wide_bytes(bytes);
  if (weight.of_cache) return wasm_i32x4_shl(wasm_i32x4_add(wide, wasm_i32x4_splat(127 - down)), 23);
  return wasm_f32x4_mul(wasm_f32x4_mul(scales_of(wide), wasm_f32x4_const_splat(0x1p120f)),
                        wasm_f32x4_splat(power_of_two(weight.scale_exponent - down)));
}

// The first `count` of four words, zero beyond.
OTARO_INLINE v128_t some_of(const void* from, int count) {
  if (count == 4) return wasm_v128_load(from);
  if (count == 1) return wasm_v128_load32_zero(from);
  const v128_t two = wasm_v128_load64_zero(from);
  return count == 2 ? two : wasm_v128_load32_lane(static_cast<const int32_t*>(from) + 2, two, 2);
}

// Tokens: 1, or 0 for as many as there are of units of one block.
template <int M, bool Truncate, int Tokens>
OTARO_INLINE void linear_rows(const Packed& weight, const Activations& x, int64_t begin, int64_t end,
                              float* out, int64_t stride) {
  constexpr int kShift = meaning(M, Truncate).shift;
  const int tokens = Tokens ? Tokens : x.tokens;
  const int64_t groups = weight.groups(), per_group = weight.units_per_group(), units = x.units;
  const int64_t apart = int64_t{x.stride} * x.unit_weights();
  const int pair = x.unit_blocks;
  const bool odd = pair == 2 && weight.blocks() % 2;
  for (int64_t row = begin; row < end; ++row) {
    Bytes<M> bytes(weight, row);
    const uint8_t* scales = weight.scales + row * groups;
    v128_t lanes[Tokens ? Tokens : kMaxTokens][4] =
      {};  // those of the next four units first: they take turns
    const auto add = [&](int64_t unit, int count, const v128_t* sums) __attribute__((always_inline)) {
      uint32_t four = 0;
      if (per_group == 1 && count == 4)
        std::memcpy(&four, scales + unit, sizeof four);
      else
        for (int i = 0; i < count; ++i) four |= uint32_t{scales[(unit + i) / per_group]} << 8 * i;
      const v128_t steps = steps_of(weight, kShift, four);
      for (int t = 0; t < tokens; ++t) {
        const int64_t slot = t * units + unit;
        const v128_t of_x = some_of(x.sums + slot, count), scale = some_of(x.scales + slot, count);
        const v128_t dots = integers<M, Truncate>(sums + 4 * t, of_x);
        const v128_t term = wasm_f32x4_mul(wasm_f32x4_convert_i32x4(dots), wasm_f32x4_mul(steps, scale));
        const v128_t added = wasm_f32x4_add(lanes[t][0], term);
        lanes[t][0] = lanes[t][1], lanes[t][1] = lanes[t][2], lanes[t][2] = lanes[t][3], lanes[t][3] = added;
      }
    };
    int64_t unit = 0;
    const int16_t* words = x.words;
    if (Tokens == 1 && pair == 2)
      for (; unit + 4 <= units - odd; unit += 4, words += 4 * apart) {
        v128_t sums[4];
#pragma clang loop unroll(full)
        for (int i = 0; i < 4; i += 2, bytes.skip(4))
          two_units<M, Truncate>(Blocks<M>(bytes), words + i * apart, apart, sums + i);
        add(unit, 4, sums);
      }
    for (; unit < units; unit += 4, words += 4 * apart) {
      v128_t sums[(Tokens ? Tokens : kMaxTokens) * 4] = {};
      const int count = units - unit < 4 ? static_cast<int>(units - unit) : 4;
#pragma clang loop unroll(disable)
      for (int i = 0; i < count; ++i, bytes.skip(pair)) {
        const int blocks = odd && unit + i == units - 1 ? 1 : pair;
        one_unit<M, Truncate>(Blocks<M>(bytes, blocks), words + i * apart, pair, tokens, sums + i);
      }
      add(unit, count, sums);
    }
    for (int t = 0; t < tokens; ++t) {  // taking turns has left lanes j and j + 8 two apart
      v128_t sum =
        wasm_f32x4_add(wasm_f32x4_add(lanes[t][0], lanes[t][2]), wasm_f32x4_add(lanes[t][1], lanes[t][3]));
      sum = wasm_f32x4_add(sum, wasm_i32x4_shuffle(sum, sum, 2, 3, 0, 1));
      out[t * stride + row] = wasm_f32x4_extract_lane(sum, 0) + wasm_f32x4_extract_lane(sum, 1);
    }
  }
}

// The tile of many.h: a unit of eight rows. A register has a quad of two rows, and is multiplied with a
// token's quad twice, so that two lanes are a row's.
struct Tile {
  using Element = int16_t;
  static constexpr int kRows = 8, kUnits = 1, kStride = 2 * kBlock, kQuads = 2 * kBlock / 4;
  static const int16_t* activations(const Activations& x) { return x.words; }

  v128_t codes[kRows / 4][kQuads][2];  // quads in the order of `words`

  struct Precision {
    void (*unpack)(const Packed& weight, const int64_t (&rows)[kRows], int64_t unit, Tile& to);
    int factor, constant, shift;
  };

  Tile(const Packed& weight, const Precision& is, const int64_t (&rows)[kRows], int64_t unit) {
    is.unpack(weight, rows, unit, *this);
  }

  template <int Tokens, class Take>
  OTARO_INLINE void multiply(const int16_t* words, int, Take take) const {
    for (int four = 0; four < kRows / 4; ++four) {
      v128_t sums[Tokens][2];
      for (auto& of_token : sums) of_token[0] = of_token[1] = wasm_i32x4_const_splat(0);
#pragma clang loop unroll_count(4)
      for (int k = 0; k < kQuads; ++k)
        for (int t = 0; t < Tokens; ++t) {
          const v128_t x = wasm_v128_load64_splat(words + t * kStride + 4 * k);
          for (int i = 0; i < 2; ++i)
            sums[t][i] = wasm_i32x4_add(sums[t][i], wasm_i32x4_dot_i16x8(codes[four][k][i], x));
        }
      for (int t = 0; t < Tokens; ++t) {
        const FourInts of_rows[] = {
          FourInts(wasm_i32x4_add(wasm_i32x4_shuffle(sums[t][0], sums[t][1], 0, 2, 4, 6),
                                  wasm_i32x4_shuffle(sums[t][0], sums[t][1], 1, 3, 5, 7)))};
        take(0, four, t, of_rows);
      }
    }
  }

  static constexpr int kScaleDown = 120;
  static FourFloats four_scales(const uint8_t (&bytes)[4]) {
    uint32_t all;
    std::memcpy(&all, bytes, sizeof all);
    return FourFloats(scales_of(wide_bytes(all)));
  }
};

template <int M, bool Truncate>
void unpack(const Packed& weight, const int64_t (&rows)[Tile::kRows], int64_t unit, Tile& to) {
  for (int four = 0; four < Tile::kRows / 4; ++four)
    for (int b = 0; b < 2; ++b) {
      const int64_t block = 2 * unit + b;
      if (block < weight.blocks()) {
        Blocks<M>(weight, rows + 4 * four, block)
          .template unpack<Truncate>([&](int j, v128_t first, v128_t second) __attribute__((always_inline)) {
            to.codes[four][2 * j + b][0] = first, to.codes[four][2 * j + b][1] = second;
          });
      } else {
        for (int j = 0; j < kBlock / 4; ++j)
          to.codes[four][2 * j + b][0] = to.codes[four][2 * j + b][1] = wasm_i32x4_const_splat(0);
      }
    }
}

// Codes are u << up, or u - 256 of E5M8.
template <int M, bool Truncate>
constexpr Tile::Precision precision() {
  constexpr Meaning means = meaning(M, Truncate);
  constexpr int kUp = M == kFinest ? 0 : kFinest - 1 - M;
  return {unpack<M, Truncate>, means.factor,
          (means.constant + (M == kFinest ? means.factor << kFinest : 0)) * (1 << kUp), means.shift + kUp};
}

template <int M, bool Truncate>
void linear(const Packed& weight, const Activations& x, int64_t begin, int64_t end, float* out,
            int64_t stride) {
  static constexpr Tile::Precision kPrecision = precision<M, Truncate>();
  if (x.tokens == 1)
    linear_rows<M, Truncate, 1>(weight, x, begin, end, out, stride);
  else if (x.unit_blocks == 1)
    linear_rows<M, Truncate, 0>(weight, x, begin, end, out, stride);
  else
    ManyTokens<Tile>(weight, kPrecision, x).rows(begin, end, out, stride);
}

inline void many(const Packed& weight, const Activations& x, const Span* spans, int count, int64_t begin,
                 int64_t end, float* out, int64_t stride) {
  constexpr decltype(&linear<kCoarsest, false>) kLinear[kPlanes + 1][2] = OTARO_INSTANCES(linear);
  each_precision(kLinear, weight, x, spans, count, begin, end, out, stride);
}

template <int M, bool Truncate>
void dots(const Packed& weight, const Activations& x, int64_t begin, int64_t end, int32_t* out) {
  for (int64_t row = begin; row < end; ++row) {
    Bytes<M> bytes(weight, row);
    for (int64_t unit = 0; unit < x.units; ++unit, bytes.skip(x.unit_blocks)) {
      v128_t sums[kMaxTokens * 4] = {};
      const int blocks = x.unit_blocks == 2 && 2 * unit + 1 < weight.blocks() ? 2 : 1;
      one_unit<M, Truncate>(Blocks<M>(bytes, blocks), x.words + x.first_block(unit, 0) * kBlock,
                            x.unit_blocks, x.tokens, sums);
      for (int t = 0; t < x.tokens; ++t)
        out[(t * weight.rows + row) * x.units + unit] = wasm_i32x4_extract_lane(
          integers<M, Truncate>(sums + 4 * t, wasm_i32x4_splat(x.sums[t * x.units + unit])), 0);
    }
  }
}

template <int M, bool Truncate>
void decode(const Packed& weight, int64_t row, float* out) {
  constexpr Meaning means = meaning(M, Truncate);
  Bytes<M> bytes(weight, row);
  const uint8_t* scales = weight.scales + row * weight.groups();
  for (int64_t b = 0; b < weight.blocks(); ++b, bytes.skip(1)) {
    int16_t words[8][8];
    Blocks<M>(bytes, 1).template unpack<Truncate>(
      [&](int j, v128_t a, v128_t) __attribute__((always_inline)) { wasm_v128_store(words[j], a); });
    const int64_t at = b * kBlock, count = weight.length - at < kBlock ? weight.length - at : kBlock;
    const float step =
      wasm_f32x4_extract_lane(steps_of(weight, means.shift, scales[at / weight.group_size]), 0);
    for (int64_t i = 0; i < count; ++i) {
      const int code = M == kFinest ? words[i / 4][i % 4] + (1 << kFinest)
                                    : words[i / 4][i % 4] >> (M == kFinest ? 0 : 7 - M);
      out[at + i] = static_cast<float>(means.factor * code + means.constant) * step;
    }
  }
}

}  // namespace otaro::wasm

namespace otaro {
const Kernels kWasm = {"wasm",
                       0,
                       wasm::digit_weight_by_block,
                       wasm::quantize,
                       OTARO_INSTANCES(wasm::linear),
                       wasm::many,
                       OTARO_INSTANCES(wasm::decode)};
const Instances<Dots> kWasmDots = OTARO_INSTANCES(wasm::dots);
}  // namespace otaro
