// What every instruction set computes by the same source: included by one file each, which names itself OTARO_ISA and is compiled
// with its own flags. The namespace keeps their machine code apart; a plain `inline` function would be merged by the
// linker, and a CPU without AVX2 could end up in another file's copy. For the same reason nothing here calls the standard library's
// templates. Loops are written so that a compiler turns them into vectors without changing a sum's order.
#pragma once

#include <cstring>

#include "sefp.h"

#define OTARO_INSTANCES(name)                                                                                      \
  {                                                                                                                \
    {name<3, false>, name<3, true>}, {name<4, false>, name<4, true>}, {name<5, false>, name<5, true>},             \
      {name<6, false>, name<6, true>}, {name<7, false>, name<7, true>}, {name<8, false>, name<8, true>},           \
  }

namespace otaro::OTARO_ISA {

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// 2^e for e from -126 to 127.
inline float power_of_two(int e) { return from_bits(static_cast<uint32_t>(e + 127) << 23); }

// The exponent of a unit whose largest magnitude has these bits: the smallest e with magnitude < 2^e, or one more where rounding
// to multiples of 2^(e - 15) would pass kMaxActivation.
inline int activation_exponent(uint32_t largest) {
  int e = static_cast<int>(largest >> 23) - 126;
  if (e < kMinActivationExponent) return kMinActivationExponent;
  constexpr float limit = kMaxActivation + 0.5f;
  if (from_bits(largest) * power_of_two(kActivationBits - e) >= limit) ++e;
  return e;
}

inline void quantise(const float* x, int64_t length, const Activations& out, int token) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
  constexpr uint32_t kInfinity = 0x7f800000, kMagnitude = 0x7fffffff;
  const int64_t unit_weights = out.unit_weights();
  for (int64_t unit = 0; unit < out.units; ++unit) {
    const int64_t start = unit * unit_weights;
    float values[2 * kBlock] = {};
    const int64_t count = length - start < unit_weights ? length - start : unit_weights;
    std::memcpy(values, x + start, static_cast<size_t>(count) * sizeof(float));
    uint32_t largest = 0;
    for (float value : values) {
      const uint32_t magnitude = to_bits(value) & kMagnitude;
      largest = magnitude > largest ? magnitude : largest;
    }
    const int64_t slot = token * out.units + unit;
    const bool finite = largest < kInfinity;
    const int exponent = finite ? activation_exponent(largest) : 0;
    out.scales[slot] = finite ? power_of_two(exponent - kActivationBits) : from_bits(0x7fc00000);
    const float scale = finite ? power_of_two(kActivationBits - exponent) : 0.0f;
    int16_t codes[2 * kBlock];
    int32_t sum = 0;
    for (int i = 0; i < 2 * kBlock; ++i) {
      const float rounded = finite ? (values[i] * scale + kRound) - kRound : 0.0f;
      codes[i] = static_cast<int16_t>(static_cast<int32_t>(rounded));
      sum += codes[i];
    }
    out.sums[slot] = sum;
    for (int b = 0; b < out.unit_blocks; ++b) {
      const int16_t* block = codes + b * kBlock;
      int8_t* digits = out.digits + (out.first_block(unit, token) + b) * 2 * kBlock;
      int16_t* words = out.words + (out.first_block(unit, token) + b) * kBlock;
      for (int i = 0; i < kBlock; ++i) {
        const int16_t code = block[digit_weight(i)];
        const int8_t low = static_cast<int8_t>(code);
        digits[i] = static_cast<int8_t>((code - low) >> 8);
        digits[kBlock + i] = low;
        words[i] = block[word_weight(i)];
      }
    }
  }
}

}  // namespace otaro::OTARO_ISA
