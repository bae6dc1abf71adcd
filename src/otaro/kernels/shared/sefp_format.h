// What the kernels for CPUs (../csrc) and GPUs (../cuda_src) share: the limits of the format, what its codes
// and bytes mean, how activations become integers and a cache's numbers codes. The law is
// ../../sefp/codec.py, of bytes FORMAT.md, "Blocks". Included by C++ and CUDA, and by NVRTC, which has no
// headers of its own.
#pragma once

#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
using int8_t = signed char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int64_t = long long;
#define offsetof(type, member) __INTADDR__(&static_cast<type*>(nullptr)->member)
#else
#include <cstddef>
#include <cstdint>
#include <cstring>
#endif

// Functions are each file's own: the linker would merge plain inline ones of files compiled for different
// CPUs.
#ifdef __CUDACC__
#define OTARO_SHARED static __device__ __forceinline__
#define OTARO_CONSTANT __host__ __device__ constexpr
#else
#define OTARO_SHARED static inline __attribute__((always_inline))
#define OTARO_CONSTANT constexpr
#endif

namespace otaro {

constexpr int kBlock = 32;      // weights that share their bytes
constexpr int kBaseBytes = 16;  // of a block
constexpr int kPlaneBytes = 4;  // of a block
constexpr int kPlanes = 5;
constexpr int kCoarsest = 3, kFinest = kCoarsest + kPlanes;  // mantissa bits
constexpr int kLanes = 16;                                   // partial sums of a row

// The largest activation integer: 127 * 256 + 127, so that it is two signed bytes, high and low, both at most
// 127 in magnitude.
constexpr int kMaxActivation = 32639;
constexpr int kActivationBits = 15;
// Exponents below this count as this: its product with the smallest step, 2^-126, is a normal number.
constexpr int kMinActivationExponent = -80;

// A scale is a byte: a sign, four bits e and three bits f are (1 + f/8) 2^(e-7), or f 2^-9 where e is 0,
// times two to the tensor's scale exponent.
constexpr int kScaleFractionBits = 3, kScaleBias = 7;
constexpr int kMinScaleExponent = -13, kMaxScaleExponent = 7;

// A packed cache: a group of a key or value is a block, and its scale a power of two, whose exponent is a
// byte.
constexpr int kMinCacheExponent = -15, kMaxCacheExponent = 16;

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000, kNan = 0x7fc00000;  // bits of a float32

// What a stored u means at m bits: the weight is (factor * u + constant) * scale * 2^-shift.
struct Meaning {
  int factor, constant, shift;
  bool raise_negative;  // `truncate` stores negative weights in one's complement: where u's top bit is clear,
                        // u counts as u + 1
};

OTARO_CONSTANT Meaning meaning(int bits, bool truncate) {
  return truncate ? Meaning{1, -(1 << bits), bits, true}
                  : Meaning{2, 1 - (2 << bits) - (1 << (bits - kCoarsest)), bits + 1, false};
}

// Which weight of a block bit i of a plane's 32 belongs to.
OTARO_CONSTANT int plane_weight(int i) { return 4 * (i % 8) + i / 8; }

OTARO_SHARED float from_bits(uint32_t bits) {
#ifdef __CUDACC__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// 2^e for e from -126 to 127.
OTARO_SHARED float power_of_two(int e) { return from_bits(static_cast<uint32_t>(e + 127) << 23); }

// The smallest e with magnitude < 2^e, from a magnitude's bits; below 2^-126 one that is too small.
OTARO_SHARED int exponent_of(uint32_t magnitude) { return static_cast<int>(magnitude >> 23) - 126; }

// The exponent e of a unit of activations, x = a * 2^(e - 15), from the bits of its largest magnitude, which
// is finite: one more than that magnitude's where rounding to multiples of 2^(e - 15) would pass
// kMaxActivation.
OTARO_SHARED int activation_exponent(uint32_t largest) {
  int e = exponent_of(largest);
  if (e < kMinActivationExponent) e = kMinActivationExponent;
  if (from_bits(largest) * power_of_two(kActivationBits - e) >= kMaxActivation + 0.5f) ++e;
  return e;
}

// What a packed cache stores of a value at the finest precision, u in `midpoint`. `scaled` is the value in
// steps of its group, value * 2^(kFinest - exponent), and `floor` the floor of that.
OTARO_SHARED int cache_code(float value, float scaled, int floor) {
  constexpr int kMidpointShift = 1 << (kPlanes - 1), kMaxCode = (1 << kFinest) - 1;
  floor -= value < 0.0f && scaled == 0.0f;  // a tiny negative one scaled to -0
  const int code = floor + kMidpointShift;
  return (code < kMaxCode ? code : kMaxCode) + (1 << kFinest);
}

}  // namespace otaro
