// Activations to integers or halves, and packed rows to values.
//
// Set by the caller: DTYPE (0 float32, 1 float16, 2 bfloat16); for `quantize` UNIT; for `decode` BITS,
// TRUNCATE, GROUP_SIZE, IDS.
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

struct Halve {
  const Stored* x;  // [tokens, length]
  uint16_t* out;    // [tokens, padded]
  float* sizes;     // [tokens]
  int64_t length, padded;
};

// A block makes halves of a token, times a power of two that leaves none of them too large.
extern "C" __global__ void halve(const __grid_constant__ Halve p) {
  constexpr int kHalfExponent = 15;  // of numbers that are less than 2^15
  __shared__ uint32_t of_warps[kWarp];
  wait_for_predecessor();
  let_successor_start();
  const Stored* row = p.x + blockIdx.x * p.length;
  uint32_t largest = 0;
  for (int64_t i = threadIdx.x; i < p.length; i += blockDim.x)
    largest = max(largest, __float_as_uint(Float::load(row[i])) & kMagnitude);
  largest = __reduce_max_sync(kAll, largest);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = largest;
  __syncthreads();
  for (int i = 0; i < static_cast<int>(blockDim.x) / kWarp; ++i) largest = max(largest, of_warps[i]);
  const int exponent =
    largest < kInfinity ? max(exponent_of(largest), kMinActivationExponent) : kHalfExponent;
  const float inverse = power_of_two(kHalfExponent - exponent);
  for (int64_t i = threadIdx.x; i < p.padded; i += blockDim.x)
    p.out[blockIdx.x * p.padded + i] = to_half(i < p.length ? Float::load(row[i]) * inverse : 0.0f);
  if (threadIdx.x == 0) p.sizes[blockIdx.x] = power_of_two(exponent - kHalfExponent);
}

constexpr int kDecoded = 4;

// Up to four matrices of one length, precision and group size, each by rows of blocks of its own.
struct Decode {
  Packed packed[kDecoded];
  Stored* out[kDecoded];          // [counts, length]
  int counts[kDecoded];           // of rows
  int first_block[kDecoded + 1];  // of blockIdx.y
  const int64_t* ids;             // rows of the only matrix to decode, or null for all
  int length, blocks, groups;     // of a row
};

#ifdef BITS
// A float32 with the code's byte as the second of its mantissa, and the ninth bit below it, is 2^23 and the
// code times 2^kAt. What is left without 2^23 and the code's constant is exact, and so is its product with
// the step.
constexpr Meaning kMeans = meaning(BITS, TRUNCATE);
constexpr int kPlanesUsed = BITS - kCoarsest, kSpare = BITS == 8 ? 0 : 7 - BITS,
              kAt = BITS == 8 ? 7 : 8 + kSpare;
constexpr uint32_t kTwo23 = 0x4b000000;

__device__ __forceinline__ void decode_eight(uint32_t base, const uint32_t* planes, float step,
                                             float (&values)[8]) {
  uint32_t u[2];
  unpack<BITS, 2>(&base, planes, u);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int quad = i / 4, byte = i % 4;
    uint32_t bits;
    if constexpr (BITS == 8) {
      const uint32_t ninth = last_bits(planes[kPlanesUsed - 1], quad) << 7;
      const uint32_t two = __byte_perm(ninth, u[quad], byte < 2 ? 0x5140 : 0x7362);
      bits = __byte_perm(two, kTwo23, byte % 2 ? 0x7432 : 0x7410);
    } else {
      bits = __byte_perm(u[quad], kTwo23, 0x7404 | byte << 4);
    }
    if (kMeans.raise_negative) bits += (~bits >> 15 & 1) << kAt;
    // 2^kAt times the code, and constant / factor more
    constexpr float kWithout =
      -(8388608.0f - static_cast<float>((1 << kAt) / kMeans.factor * kMeans.constant));
    values[i] = __fmul_rn(__fadd_rn(__uint_as_float(bits), kWithout), step);
  }
}

// Words are put together by hand: the compiler would store what lies in an array in pieces.
template <class Type>
__device__ __forceinline__ void store_eight(typename Type::Stored* to, const float (&x)[8]) {
  if constexpr (sizeof(typename Type::Stored) == 4) {
    reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else {
    const auto pair = [&](int i) -> int { return Type::store(x[i]) | Type::store(x[i + 1]) << 16; };
    *reinterpret_cast<int4*>(to) = int4{pair(0), pair(2), pair(4), pair(6)};
  }
}

// A thread decodes the eight weights of one base word, of kAtOnce rows at a time: loads then wait together.
extern "C" __global__ void decode(const __grid_constant__ Decode p) {
  constexpr int kAtOnce = 4;
  let_successor_start();
  wait_for_predecessor();
  int matrix = 0;
#pragma unroll
  for (int m = 1; m < kDecoded; ++m) matrix += static_cast<int>(blockIdx.y) >= p.first_block[m];
  const Packed& packed = p.packed[matrix];
  const uint32_t word = blockIdx.x * blockDim.x + threadIdx.x, start = 8 * word, in_block = word % kBaseWords,
                 length = p.length, blocks = p.blocks, groups = p.groups;
  if (start >= length) return;
  const int count = p.counts[matrix], stride = p.first_block[matrix + 1] - p.first_block[matrix];
  const float factor = step_factor(packed, kMeans.shift + kAt - (kMeans.factor - 1));
  for (int first = static_cast<int>(blockIdx.y) - p.first_block[matrix]; first < count;
       first += kAtOnce * stride) {
    uint32_t base[kAtOnce], planes[kAtOnce][kPlanesUsed ? kPlanesUsed : 1];
    int scales[kAtOnce];
    bool there[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      int64_t number = min(first + r * stride, count - 1);
      if (IDS) number = p.ids[number];
      there[r] = !IDS || (number >= 0 && number < packed.rows);
      const uint32_t row = there[r] ? number : 0;
      const uint64_t at = static_cast<uint64_t>(row) * blocks + word / kBaseWords;
      base[r] = __ldg(packed.base + kBaseWords * at + in_block);
#pragma unroll
      for (int k = 0; k < kPlanesUsed; ++k) planes[r][k] = __ldg(packed.planes[k] + at) >> (2 * in_block);
      scales[r] = __ldg(packed.scales + static_cast<uint64_t>(row) * groups + start / GROUP_SIZE);
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int number = first + r * stride;
      if (number >= count) return;
      float values[8];
      decode_eight(base[r], planes[r], step_of(scales[r], factor), values);
      if (!there[r])
        for (float& value : values) value = from_bits(kNan);
      Stored* out = p.out[matrix] + static_cast<uint64_t>(static_cast<uint32_t>(number)) * length + start;
      if (length % 8) {
        for (uint32_t i = 0; i < 8 && start + i < length; ++i) out[i] = Float::store(values[i]);
      } else {  // so rows, and eights, lie at multiples of 16 bytes
        store_eight<Float>(out, values);
      }
    }
  }
}
#endif
