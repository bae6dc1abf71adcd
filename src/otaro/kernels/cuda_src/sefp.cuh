// The words of the GPU kernels: types, packed rows, activations as integers. What is computed stands in
// ../reference.py.
//
// Sources are compiled at first use by NVRTC (../nvrtc.py), which has no headers of its own: what they would
// bring (halves, bytes) is spelt out here and in sefp_format.h. Constants in CAPITALS are set by the caller,
// with -D.
#pragma once

#include "sefp_format.h"

using namespace otaro;

constexpr int kWarp = 32;
constexpr int kBaseWords = kBaseBytes / 4;  // of a block
constexpr unsigned kAll = 0xffffffffu;

// A packed matrix. Scale bytes are signed, so that a load spreads the sign.
struct Packed {
  const uint32_t* base;
  const uint32_t* planes[kPlanes];
  const int8_t* scales;
  int64_t rows;
  int scale_exponent;
};

// What a unit of activations has besides its integers: their sum, and 2^(e - 15), or NaN where an activation
// was not finite.
struct alignas(8) Term {
  int sum;
  float scale;
};

// Activations as integers: token by token, unit by unit, the high bytes and then the low bytes of a unit's
// weights in their order.
struct Activations {
  int8_t* digits;  // [tokens, units, 2, unit]
  Term* terms;     // [tokens, units]
};

__device__ __forceinline__ float from_half(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ uint16_t to_half(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ __forceinline__ float from_bfloat(uint16_t bits) {
  return __int_as_float(static_cast<uint32_t>(bits) << 16);
}
__device__ __forceinline__ uint16_t to_bfloat(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// The three types that activations and decoded weights come in.
struct Float32 {
  using Stored = float;
  static __device__ __forceinline__ float load(float value) { return value; }
  static __device__ __forceinline__ float store(float value) { return value; }
};
struct Float16 {
  using Stored = uint16_t;
  static __device__ __forceinline__ float load(uint16_t value) { return from_half(value); }
  static __device__ __forceinline__ uint16_t store(float value) { return to_half(value); }
};
struct BFloat16 {
  using Stored = uint16_t;
  static __device__ __forceinline__ float load(uint16_t value) { return from_bfloat(value); }
  static __device__ __forceinline__ uint16_t store(float value) { return to_bfloat(value); }
};

template <bool First, class A, class B>
struct Choice {
  using Type = A;
};
template <class A, class B>
struct Choice<false, A, B> {
  using Type = B;
};

// Keys or values of one layer's cache: in float16, rows of whole blocks, or packed. Rows are numbered through
// sequences, heads and positions.
struct CacheRows {
  uint32_t* base;  // or halves
  uint32_t* planes[kPlanes];
  int8_t* exponents;
};

// A kernel that was launched as a dependent of the one before it starts early; it may touch what the other
// wrote after this.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Has memory come to the second-level cache: sixteens of bytes at a multiple of sixteen. Nobody waits for it,
// and what others write meanwhile is seen all the same.
__device__ __forceinline__ void ask_for(const void* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// A scale byte's sign, exponent and fraction, put where a float32 has its own, are a number 2^120 times too
// small: a subnormal one where the byte's exponent is 0, which a GPU multiplies like any other. So one
// product gives the step scale * 2^-shift.
__device__ __forceinline__ float step_factor(const Packed& matrix, int shift) {
  return power_of_two(127 - kScaleBias + matrix.scale_exponent - shift);
}
__device__ __forceinline__ float step_of(int scale, float factor) {
  return __fmul_rn(__uint_as_float(static_cast<uint32_t>(scale) << (23 - kScaleFractionBits) & 0x87f00000u),
                   factor);
}

// Quantizes one unit of 64 or 32 activations with one warp. Lane i holds weight i, and i + 32 in `second` if
// the unit is 64. Steps 1 and 2 of ../reference.py.
template <int Unit>
__device__ __forceinline__ void quantize_unit(float first, float second, int64_t slot,
                                              const Activations& out) {
  const int lane = threadIdx.x % kWarp;
  uint32_t largest = __float_as_uint(first) & kMagnitude;
  if (Unit == 64) largest = max(largest, __float_as_uint(second) & kMagnitude);
  largest = __reduce_max_sync(kAll, largest);
  const bool finite = largest < kInfinity;
  const int exponent = activation_exponent(largest);
  const float inverse = finite ? power_of_two(kActivationBits - exponent) : 0.0f;
  const int a = finite ? __float2int_rn(first * inverse) : 0,
            b = Unit == 64 && finite ? __float2int_rn(second * inverse) : 0;
  int8_t* digits = out.digits + slot * 2 * Unit;
  const int8_t low_a = static_cast<int8_t>(a), low_b = static_cast<int8_t>(b);
  digits[lane] = static_cast<int8_t>((a - low_a) >> 8);
  digits[Unit + lane] = low_a;
  if (Unit == 64) {
    digits[32 + lane] = static_cast<int8_t>((b - low_b) >> 8);
    digits[Unit + 32 + lane] = low_b;
  }
  const int sum = __reduce_add_sync(kAll, a + b);
  if (lane == 0) out.terms[slot] = {sum, finite ? power_of_two(exponent - kActivationBits) : from_bits(kNan)};
}

// (a & mask) | (b & ~mask) in one instruction. The compiler would rather split it, to share a mask that costs
// nothing.
__device__ __forceinline__ uint32_t select_bits(uint32_t a, uint32_t b, uint32_t mask) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(result) : "r"(mask), "r"(a), "r"(b));
  return result;
}

// The first `Quads` quads of a block, four bytes to a word: u in the top bits of a byte, zeros below. Of nine
// bits the last is left out: `last_bits` has it.
template <int Bits, int Quads>
__device__ __forceinline__ void unpack(const uint32_t* base, const uint32_t* planes, uint32_t* u) {
  constexpr uint32_t kHigh = 0xf0f0f0f0u;
  // Planes 4 to 7 are turned into nibbles: w[j] has those of quad j in the low and of quad j + 4 in the high
  // half of its bytes.
  uint32_t w[4] = {};
  if constexpr (Bits == 4) {
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = select_bits(planes[0] << (3 - j), 0, 0x88888888u);
  } else if constexpr (Bits > 4) {
    constexpr uint32_t kOdd = 0xaaaaaaaau, kUpper = 0xccccccccu;
    const uint32_t p4 = planes[0], p5 = planes[1], p6 = Bits > 5 ? planes[2] : 0,
                   p7 = Bits > 6 ? planes[3] : 0;
    const uint32_t even = select_bits(p4 << 1, p5, kOdd), odd = select_bits(p4, p5 >> 1, kOdd);
    const uint32_t even2 = select_bits(p6 << 1, p7, kOdd), odd2 = select_bits(p6, p7 >> 1, kOdd);
    w[0] = select_bits(even << 2, even2, kUpper);
    w[1] = select_bits(odd << 2, odd2, kUpper);
    w[2] = select_bits(even, even2 >> 2, kUpper);
    w[3] = select_bits(odd, odd2 >> 2, kUpper);
  }
#pragma unroll
  for (int quad = 0; quad < Quads; ++quad) {
    const uint32_t high = quad % 2 ? base[quad / 2] : base[quad / 2] << 4,
                   low = quad < 4 ? w[quad % 4] : w[quad % 4] >> 4;
    u[quad] = Bits == 3 ? high & kHigh : select_bits(high, low, kHigh);
  }
}

// The last of nine bits, in the lowest bit of each byte.
__device__ __forceinline__ uint32_t last_bits(uint32_t plane, int quad) {
  return (plane >> quad) & 0x01010101u;
}

// Of all lanes of a warp, for each of them.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int mate = kWarp / 2; mate; mate /= 2) value += __shfl_xor_sync(kAll, value, mate);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int mate = kWarp / 2; mate; mate /= 2) value = fmaxf(value, __shfl_xor_sync(kAll, value, mate));
  return value;
}
__device__ __forceinline__ unsigned long long warp_max(unsigned long long value) {
#pragma unroll
  for (int mate = kWarp / 2; mate; mate /= 2) {
    const unsigned long long other = __shfl_xor_sync(kAll, value, mate);
    value = other > value ? other : value;
  }
  return value;
}

// Asynchronous copies to shared memory.
template <int Bytes>
__device__ __forceinline__ void copy_to_shared(void* to, const void* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// As `quantize_unit`, with four activations to a lane: Unit / 4 neighbouring lanes hold a unit, each four
// weights in a row. All lanes of a warp come here; those that have nothing (`there` is false) come with
// zeros, and store nothing.
template <int Unit>
__device__ __forceinline__ void quantize_quads(const float (&x)[4], bool there, int64_t slot,
                                               const Activations& out) {
  constexpr int kMates = Unit / 4;
  const int at = static_cast<int>(threadIdx.x) % kMates;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = max(largest, __float_as_uint(x[i]) & kMagnitude);
#pragma unroll
  for (int mate = kMates / 2; mate; mate /= 2) largest = max(largest, __shfl_xor_sync(kAll, largest, mate));
  const bool finite = largest < kInfinity;
  const int exponent = activation_exponent(largest);
  const float inverse = finite ? power_of_two(kActivationBits - exponent) : 0.0f;
  uint32_t high = 0, low = 0;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int a = finite ? __float2int_rn(x[i] * inverse) : 0;
    sum += a;
    low |= (static_cast<uint32_t>(a) & 0xff) << 8 * i;
    high |= ((static_cast<uint32_t>(a - static_cast<int8_t>(a)) >> 8) & 0xff) << 8 * i;
  }
#pragma unroll
  for (int mate = kMates / 2; mate; mate /= 2) sum += __shfl_xor_sync(kAll, sum, mate);
  if (!there) return;
  uint32_t* digits = reinterpret_cast<uint32_t*>(out.digits + slot * 2 * Unit);
  digits[at] = high;
  digits[kMates + at] = low;
  if (at == 0) out.terms[slot] = {sum, finite ? power_of_two(exponent - kActivationBits) : from_bits(kNan)};
}
