// What every instruction set computes by the same source: included by one file each, which names itself
// OTARO_ISA and is compiled with its own flags. The namespace keeps their machine code apart; a plain
// `inline` function would be merged by the linker, and a CPU without AVX2 could end up in another file's
// copy. For the same reason nothing here calls the standard library's templates. Loops are written so that a
// compiler turns them into vectors without changing a sum's order.
#pragma once

#include <cstring>

#include "sefp.h"

// For functions that the compiler thinks too large to inline, yet whose arguments are constants that must
// vanish, or registers.
#define OTARO_INLINE inline __attribute__((always_inline))

// For functions that every precision has: once each, with no copies for arguments that happen to be
// constants.
#ifdef __clang__
#define OTARO_ONCE __attribute__((noinline))
#else
#define OTARO_ONCE __attribute__((noinline, noclone))
#endif

#define OTARO_INSTANCES(name)                                                                          \
  {                                                                                                    \
    {name<3, false>, name<3, true>}, {name<4, false>, name<4, true>}, {name<5, false>, name<5, true>}, \
    {name<6, false>, name<6, true>}, {name<7, false>, name<7, true>}, {name<8, false>, name<8, true>}, \
  }

// Where one function serves all of them.
#define OTARO_ALL(name)                                                                  \
  {                                                                                      \
    {name, name}, {name, name}, {name, name}, {name, name}, {name, name}, { name, name } \
  }

namespace otaro::OTARO_ISA {

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The power of two of a unit of activations: x = a * scale, a = x * inverse, rounded.
struct Power {
  float scale, inverse;
};

// From the bits of the largest magnitude. Where a value is not finite, the scale is NaN and all integers are
// 0.
inline Power activation_power(uint32_t largest) {
  if (largest >= kInfinity) return {from_bits(kNan), 0.0f};
  const int e = activation_exponent(largest);
  return {power_of_two(e - kActivationBits), power_of_two(kActivationBits - e)};
}

// Digits block by block.
inline int digit_weight_by_block(int i, int) { return i / kBlock * kBlock + digit_weight(i % kBlock); }

}  // namespace otaro::OTARO_ISA
