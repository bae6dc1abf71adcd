// The kernels in plain C++: correct on any CPU, and a model for the next instruction set. See sefp.h for what
// is computed.
#define OTARO_ISA portable
#include "backend.h"
#include "floats.h"

namespace otaro::portable {

inline void quantize(const float* x, int64_t length, const Activations& out, int token) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
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
    const Power power = activation_power(largest);
    out.scales[slot] = power.scale;
    int16_t codes[2 * kBlock];
    int32_t sum = 0;
    for (int i = 0; i < 2 * kBlock; ++i) {
      const float rounded = power.inverse != 0.0f ? (values[i] * power.inverse + kRound) - kRound : 0.0f;
      codes[i] = static_cast<int16_t>(static_cast<int32_t>(rounded));
      sum += codes[i];
    }
    out.sums[slot] = sum;
    int8_t* digits = out.digits + out.first_block(unit, token) * 2 * kBlock;
    int16_t* words = out.words + out.first_block(unit, token) * kBlock;
    for (int i = 0; i < unit_weights; ++i) {
      const int16_t code = codes[digit_weight_by_block(i, out.unit_blocks)];
      const int8_t low = static_cast<int8_t>(code);
      digits[i] = static_cast<int8_t>((code - low) >> 8);
      digits[unit_weights + i] = low;
      words[i] = codes[i / kBlock * kBlock + word_weight(i % kBlock)];
    }
  }
}

// The step of one group of weights or of a cache.
inline float step_of(const Packed& weight, int64_t group, int shift) {
  const int byte = weight.scales[group], e = byte >> kScaleFractionBits & 15, f = byte & 7;
  if (weight.of_cache) return power_of_two(static_cast<int8_t>(byte) - shift);
  const int exponent = (e ? e : 1) - kScaleBias - kScaleFractionBits + weight.scale_exponent - shift;
  const float size = static_cast<float>(e ? 8 + f : f) * power_of_two(exponent);
  return byte & 0x80 ? -size : size;
}

// The codes of a block, raised where `truncate` wants it. Precision and reconstruction are no template
// parameters here: one copy of every loop is enough.
void unpack(const Packed& weight, int64_t block, uint16_t* u) {
  const uint8_t* base = weight.base + block * kBaseBytes;
  for (int i = 0; i < kBlock; ++i) u[digit_weight(i)] = base[i % kBaseBytes] >> (i < kBaseBytes ? 0 : 4) & 15;
  for (int p = 0; p < weight.bits - kCoarsest; ++p) {
    const uint8_t* plane = weight.planes[p] + block * kPlaneBytes;
    for (int i = 0; i < kBlock; ++i) u[i] = static_cast<uint16_t>(2 * u[i] + (plane[i % 4] >> i / 4 & 1));
  }
  if (weight.truncate)
    for (int i = 0; i < kBlock; ++i) u[i] = static_cast<uint16_t>(u[i] + !(u[i] >> weight.bits));
}

void unit_dots(const Packed& weight, const Activations& x, int64_t row, int64_t unit, int32_t* dots,
               int64_t stride) {
  const Meaning means = meaning(weight.bits, weight.truncate);
  const int64_t blocks = weight.blocks(), first = unit * x.unit_blocks;
  for (int t = 0; t < x.tokens; ++t) dots[t * stride] = means.constant * x.sums[t * x.units + unit];
  for (int64_t b = first; b < first + x.unit_blocks && b < blocks; ++b) {
    uint16_t u[kBlock], ordered[kBlock];
    unpack(weight, row * blocks + b, u);
    for (int i = 0; i < kBlock; ++i) ordered[i] = u[word_weight(i)];
    for (int t = 0; t < x.tokens; ++t) {
      const int16_t* a = x.words + (x.first_block(unit, t) + b - first) * kBlock;
      int32_t dot = 0;
      for (int i = 0; i < kBlock; ++i) dot += int32_t{ordered[i]} * a[i];
      dots[t * stride] += means.factor * dot;
    }
  }
}

void linear(const Packed& weight, const Activations& x, int64_t begin, int64_t end, float* out,
            int64_t stride) {
  const Meaning means = meaning(weight.bits, weight.truncate);
  const int64_t groups = weight.groups(), per_group = weight.units_per_group();
  for (int64_t row = begin; row < end; ++row) {
    float lanes[kMaxTokens][kLanes] = {};
    for (int64_t unit = 0; unit < x.units; ++unit) {
      int32_t dots[kMaxTokens];
      unit_dots(weight, x, row, unit, dots, 1);
      const float step = step_of(weight, row * groups + unit / per_group, means.shift);
      for (int t = 0; t < x.tokens; ++t)
        lanes[t][unit % kLanes] += static_cast<float>(dots[t]) * (step * x.scales[t * x.units + unit]);
    }
    for (int t = 0; t < x.tokens; ++t) {
      for (int half = kLanes / 2; half; half /= 2)
        for (int j = 0; j < half; ++j) lanes[t][j] += lanes[t][j + half];
      out[t * stride + row] = lanes[t][0];
    }
  }
}

void dots(const Packed& weight, const Activations& x, int64_t begin, int64_t end, int32_t* out) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t unit = 0; unit < x.units; ++unit)
      unit_dots(weight, x, row, unit, out + row * x.units + unit, weight.rows * x.units);
}

void decode(const Packed& weight, int64_t row, float* out) {
  const Meaning means = meaning(weight.bits, weight.truncate);
  const int64_t blocks = weight.blocks();
  for (int64_t b = 0; b < blocks; ++b) {
    uint16_t u[kBlock];
    unpack(weight, row * blocks + b, u);
    const int64_t at = b * kBlock, count = weight.length - at < kBlock ? weight.length - at : kBlock;
    const float step = step_of(weight, row * weight.groups() + at / weight.group_size, means.shift);
    for (int64_t i = 0; i < count; ++i)
      out[at + i] = static_cast<float>(means.factor * u[i] + means.constant) * step;
  }
}

}  // namespace otaro::portable

namespace otaro {
const Kernels kPortable = {"portable",
                           0,
                           portable::digit_weight_by_block,
                           portable::quantize,
                           OTARO_ALL(portable::linear),
                           nullptr,
                           OTARO_ALL(portable::decode)};
const Instances<Dots> kPortableDots = OTARO_ALL(portable::dots);
}  // namespace otaro
