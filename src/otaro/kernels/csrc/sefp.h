// The words of the kernels: a packed matrix, activations as integers, and the table of functions that a
// backend fills in.
//
// The numbers are those of sefp/codec.py and the bytes those of FORMAT.md, "Blocks". A product is computed
// like this (kernels/reference.py has the same in plain torch, and is the oracle):
//
//   1. A row of weights is cut into *units* of 64 weights (32 where the group size is no multiple of 64); a
//      group is one or more whole units. Activations are cut the same way.
//   2. Each unit of activations becomes 16-bit integers a with one power of two: x = a * 2^(e - 15),
//      |a| <= kMaxActivation.
//   3. A unit of a row and of a token gives one integer, I = sum of (n u + k) a, where u is the stored code
//      at the precision in use and (n, k) say what it means: a weight is (n u + k) steps, and a step is
//      scale * 2^-shift. `Meaning` of sefp_format.h. |I| < 2^31, so 32-bit integers are exact in any order.
//   4. float(I), rounded to nearest, times the product of the step and the activations' power of two, which
//      is exact, is the unit's term. Unit i is added to lane i mod 16, units in ascending order; then lane j
//      gets lane j + 8, then j + 4, j + 2, j + 1 added. Every operation is one of IEEE's on float32 and none
//      is fused, so that every backend returns the same bits, whatever its registers or threads.
//
// None of these floats is ever subnormal, and none on the way from a scale byte to its float: a CPU that is
// told to flush them computes the same.
#pragma once

#include "sefp_format.h"

namespace otaro {

constexpr int kMaxTokens = 8;    // of one call of `Kernels::linear`
constexpr int kManyTokens = 64;  // of one call of `Kernels::many`

// A packed matrix, as it lies in the mapped file. A packed cache has rows of the same form.
struct Packed {
  const uint8_t* base = nullptr;
  const uint8_t* planes[kPlanes] = {};
  const uint8_t* scales = nullptr;
  int64_t rows = 0, length = 0;
  int group_size = 64;
  int bits = kCoarsest;  // mantissa bits in use; planes[0 .. bits - 4] are present
  bool truncate = false;
  int scale_exponent = 0;
  bool of_cache = false;  // scales are signed exponents of two then, and units are single blocks

  int64_t blocks() const { return (length + kBlock - 1) / kBlock; }
  int unit_blocks() const { return group_size % (2 * kBlock) ? 1 : 2; }
  int64_t units() const { return (blocks() + unit_blocks() - 1) / unit_blocks(); }
  int64_t groups() const { return (length + group_size - 1) / group_size; }
  int64_t units_per_group() const { return group_size / (kBlock * unit_blocks()); }
};

// Activations of some tokens as integers, in the orders that the kernels read. The last run is filled up with
// zeros; a run is a unit, or as many blocks as an instruction set unpacks together (`Kernels::run_blocks`).
// The `digits` of a run are the high bytes of its weights, then the low bytes, in the order in which the
// instruction set unpacks weights (`Kernels::digit_weight`); `words` are the same as 16-bit integers, for
// those that want them (`word_weight`). The tokens of a run stand next to each other: a kernel that has
// unpacked a run meets all of them.
struct Activations {
  int tokens = 0, stride = 0;  // tokens at hand, and from one unit to the next
  int64_t units = 0;
  int unit_blocks = 2, run_blocks = 2;
  int8_t* digits = nullptr;  // [runs, stride, 2, 32 run_blocks]
  int16_t* words = nullptr;  // [runs, stride, 32 run_blocks]
  int32_t* sums = nullptr;   // [tokens, units]: sum of a
  float* scales = nullptr;   // [tokens, units]: 2^(e - 15), NaN where an activation was not finite

  int64_t unit_weights() const { return int64_t{kBlock} * unit_blocks; }
  int64_t runs() const { return (units * unit_blocks + run_blocks - 1) / run_blocks; }
  // Where runs are units.
  int64_t first_block(int64_t unit, int64_t token) const { return (unit * stride + token) * unit_blocks; }

  Activations some(int first, int count) const {
    const int64_t block = int64_t{first} * run_blocks, slot = first * units;
    return {count,
            stride,
            units,
            unit_blocks,
            run_blocks,
            digits + block * 2 * kBlock,
            words + block * kBlock,
            sums + slot,
            scales + slot};
  }
};

// Neighbouring tokens of one precision.
struct Span {
  int first, count, bits;
};

// Which weight of a block the byte i stands for as AVX2 unpacks it, and which one the i-th of these bytes
// once widened to words.
constexpr int digit_weight(int i) { return 8 * (i % 16 / 4) + 4 * (i / 16) + i % 4; }
constexpr int word_weight(int i) { return digit_weight(i / 8 % 2 * 16 + i / 16 * 8 + i % 8); }

// Functions on weights come in twelve instances.
template <class Function>
using Instances = Function[kPlanes + 1][2];  // [mantissa bits - 3][truncate]

// The functions of one instruction set.
struct Kernels {
  const char* name;
  // Blocks of a run of activations; 0: those of a unit.
  int run_blocks;
  // Which weight of a run digit byte i stands for.
  int (*digit_weight)(int i, int run_blocks);
  // One token's activations x [length] into slot `token`.
  void (*quantize)(const float* x, int64_t length, const Activations& out, int token);
  // Rows [begin, end) of the product for all tokens: out[token * stride + row].
  Instances<void (*)(const Packed& weight, const Activations& x, int64_t begin, int64_t end, float* out,
                     int64_t stride)>
    linear;
  // The same for tokens of several precisions, in spans of ascending bits: codes nest, so that weights can be
  // unpacked once for all. Null where there is none. `weight.bits` are those of the last span.
  void (*many)(const Packed& weight, const Activations& x, const Span* spans, int count, int64_t begin,
               int64_t end, float* out, int64_t stride);
  // The values of one row, exactly: out [length].
  Instances<void (*)(const Packed& weight, int64_t row, float* out)> decode;
};

// The integers I of step 3, for tests: out[(token * rows + row) * units + unit]. They are not in `Kernels`,
// so that a program that never asks for them is linked without.
using Dots = void (*)(const Packed& weight, const Activations& x, int64_t begin, int64_t end, int32_t* out);

extern const Kernels kPortable;
extern const Instances<Dots> kPortableDots;
#ifdef OTARO_X86
extern const Kernels kAvx2;
extern const Instances<Dots> kAvx2Dots;
#ifdef OTARO_AVXVNNI  // which compilers of before 2021 cannot make
extern const Kernels kAvxVnni;
extern const Instances<Dots> kAvxVnniDots;
#endif
extern const Kernels kAvx512;
extern const Instances<Dots> kAvx512Dots;
#endif
#ifdef OTARO_ARM
extern const Kernels kNeon;
extern const Instances<Dots> kNeonDots;
extern const Kernels kDotprod;
extern const Instances<Dots> kDotprodDots;
extern const Kernels kI8mm;
extern const Instances<Dots> kI8mmDots;
#endif
#ifdef __wasm_simd128__
extern const Kernels kWasm;
extern const Instances<Dots> kWasmDots;
#endif

}  // namespace otaro
