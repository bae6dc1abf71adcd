// Activations to integers, and packed rows to values.
//
// Set by the caller: DTYPE (0 float32, 1 float16, 2 bfloat16); for `quantize` UNIT; for `decode` BITS,
// TRUNCATE, IDS.
#include "sefp.cuh"

template <int>
struct Of {
  using Type = Float32;
};
template <>
struct Of<1> {
  using Type = Float16;
};
template <>
struct Of<2> {
  using Type = BFloat16;
};
using Float = Of<DTYPE>::Type;
using Stored = Float::Stored;

struct Quantize {
  const Stored* x;  // [tokens, length]
  Activations out;
  int64_t tokens, length, units;
};

#ifdef UNIT
extern "C" __global__ void quantize(const __grid_constant__ Quantize p) {
  wait_for_predecessor();
  let_successor_start();  // not earlier: `linear` loads weights at once, and whoever wrote those must be done
  const int lane = threadIdx.x % kWarp;
  const int64_t slot = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  if (slot >= p.tokens * p.units) return;
  const int64_t first = slot % p.units * UNIT + lane, second = first + kWarp;
  const Stored* row = p.x + slot / p.units * p.length;
  quantize_unit<UNIT>(first < p.length ? Float::load(row[first]) : 0.0f,
                      UNIT == 64 && second < p.length ? Float::load(row[second]) : 0.0f, slot, p.out);
}
#endif

struct Decode {
  Packed packed;
  const int64_t* ids;  // rows to decode, or null for all
  Stored* out;         // [count, length]
  int64_t count, length;
  int blocks, groups, group_size;
};

#ifdef BITS
// A thread decodes the eight weights of one base word, of kAtOnce rows at a time: loads then wait together.
extern "C" __global__ void decode(const __grid_constant__ Decode p) {
  constexpr Meaning means = meaning(BITS, TRUNCATE);
  constexpr int kPlanesUsed = BITS - kCoarsest, kSpare = BITS == 8 ? 0 : 7 - BITS, kAtOnce = 4;
  let_successor_start();
  wait_for_predecessor();
  const int word = blockIdx.x * blockDim.x + threadIdx.x, start = 8 * word, in_block = word % kBaseWords;
  if (start >= p.length) return;
  const float factor = step_factor(p.packed, means.shift + kSpare);
  const int stride = gridDim.y;
  for (int64_t first = blockIdx.y; first < p.count; first += kAtOnce * stride) {
    uint32_t base[kAtOnce][1], planes[kAtOnce][kPlanesUsed ? kPlanesUsed : 1];
    int scales[kAtOnce];
    bool there[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int64_t number = first + r * stride;
      const int64_t row = number >= p.count ? 0 : IDS ? p.ids[number] : number;
      there[r] = !IDS || (row >= 0 && row < p.packed.rows);
      const int64_t block = there[r] ? row * p.blocks + word / kBaseWords : 0;
      base[r][0] = __ldg(p.packed.base + kBaseWords * block + in_block);
#pragma unroll
      for (int k = 0; k < kPlanesUsed; ++k)
        planes[r][k] = __ldg(p.packed.planes[k] + block) >> (2 * in_block);
      scales[r] = __ldg(p.packed.scales + (there[r] ? row * p.groups + start / p.group_size : 0));
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int64_t number = first + r * stride;
      if (number >= p.count) return;
      uint32_t u[2];
      unpack<BITS, 2>(base[r], planes[r], u);
      const float step = step_of(scales[r], factor);
      alignas(16) Stored values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t byte = u[i / 4] >> (8 * (i % 4)) & 255;
        int code = static_cast<int>(byte);
        if (BITS == 8)
          code = 2 * code + (planes[r][kPlanesUsed ? kPlanesUsed - 1 : 0] >> (8 * (i % 4) + i / 4) & 1);
        if (means.raise_negative) code += byte < 128 ? 1 << kSpare : 0;
        const float value = static_cast<float>(means.factor * code + means.constant * (1 << kSpare)) * step;
        values[i] = Float::store(there[r] ? value : from_bits(kNan));
      }
      Stored* out = p.out + number * p.length + start;
      if (p.length % 8 == 0) {  // so rows, and eights, lie at multiples of 16 bytes
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof values / 16); ++i)
          reinterpret_cast<int4*>(out)[i] = reinterpret_cast<const int4*>(values)[i];
      } else {
        for (int i = 0; i < 8 && start + i < p.length; ++i) out[i] = values[i];
      }
    }
  }
}
#endif
