// Arithmetic on pairs of halves, and codes as halves: small integers, which a half holds exactly.
#pragma once

#include "sefp.cuh"

__device__ __forceinline__ uint32_t add_halves(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

__device__ __forceinline__ uint32_t fuse_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// A scale byte as a half, twice: its sign, exponent and fraction, put where a half has its own, are 2^8 times
// too small. Here they are 2^4 times too small: then no code's product with one, nor 1152 times one, is more
// than a half holds, and none but zero is less than its normal numbers are.
constexpr int kScaleShift = -4;
__device__ __forceinline__ uint32_t scale_halves(int scale) {
  constexpr uint32_t kRaise = (15u + 8 + kScaleShift) << 10;
  return multiply_halves(__byte_perm(scale << 7 & 0xbf80, 0, 0x1010), kRaise << 16 | kRaise);
}

// The half 1024 + v holds a code u in v = 2^kRaised u, whose meaning then is whole steps away from zero.
template <int Bits, bool Truncate>
struct Codes {
  static constexpr Meaning kMeaning = meaning(Bits, Truncate);
  static constexpr bool kDoubled = Bits == 8 || (Bits == 7 && !Truncate);
  static constexpr int kRaised = kDoubled ? 1 : 7 - Bits;
  static constexpr int kZero = -kMeaning.constant * (1 << kRaised) / kMeaning.factor;
  static_assert(kZero * kMeaning.factor == -kMeaning.constant * (1 << kRaised));
  static constexpr uint32_t kWithout = 0xe400e400u + 0x10001u * kZero;             // -(1024 + kZero), twice
  static constexpr int kShift = kMeaning.shift + kRaised - (kMeaning.factor - 1);  // of a step
  static constexpr int kPlanesUsed = Bits - kCoarsest, kQuads = 4;

  // The halves 1024 + v of sixteen weights in a row, two to a word: of eight base bytes, and planes whose
  // lowest bits are theirs.
  static __device__ __forceinline__ void raised(const uint32_t* base, const uint32_t* planes,
                                                uint32_t (&halves)[kQuads][2]) {
    uint32_t u[kQuads];
    unpack<Bits, kQuads>(base, planes, u);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      uint32_t last = 0;  // twice the last of nine bits
      if constexpr (Bits == 8) last = 2 * last_bits(planes[kPlanesUsed - 1], quad);
      if constexpr (Truncate) {
        const uint32_t added = (~u[quad] & 0x80808080u) >> (Bits == 8 ? 6 : Bits);
        (Bits == 8 ? last : u[quad]) += added;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        constexpr uint32_t kThousand = 0x64646464u;  // high bytes of 1024
        const uint32_t selector = h ? 0x4342 : 0x4140;
        if constexpr (kDoubled) {
          halves[quad][h] = Bits == 8 ? __byte_perm(last, kThousand, selector) : 0x64006400u;
          halves[quad][h] += (Bits == 8 ? 4 : 2) * __byte_perm(u[quad], 0, selector);
        } else {
          halves[quad][h] = __byte_perm(u[quad], kThousand, selector);
        }
      }
    }
  }

  // What the codes mean, in steps.
  static __device__ __forceinline__ void codes(const uint32_t* base, const uint32_t* planes,
                                               uint32_t (&halves)[kQuads][2]) {
    raised(base, planes, halves);
#pragma unroll
    for (int i = 0; i < 2 * kQuads; ++i) halves[i / 2][i % 2] = add_halves(halves[i / 2][i % 2], kWithout);
  }

  // The same times a scale. Where 1024 + kZero times any scale is a half, one instruction does both.
  static __device__ __forceinline__ void weights(const uint32_t* base, const uint32_t* planes, uint32_t scale,
                                                 uint32_t (&halves)[kQuads][2]) {
    constexpr bool kFused =
      (1024 + kZero) % 16 == 0 && (1024 + kZero) / 16 < 1 << (11 - 1 - kScaleFractionBits);
    const uint32_t without = multiply_halves(kWithout, scale);
    raised(base, planes, halves);
#pragma unroll
    for (int i = 0; i < 2 * kQuads; ++i) {
      uint32_t& both = halves[i / 2][i % 2];
      both = kFused ? fuse_halves(both, scale, without) : multiply_halves(add_halves(both, kWithout), scale);
    }
  }
};
