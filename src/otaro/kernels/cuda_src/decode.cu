// What a decoding step does between products: embed, rms_norm, rope and the cache, gate, quantize, route to
// experts and add what they give, cap logits, argmax. Attention has a file of its own, attend.cu. ../steps.py
// says what each computes, in torch.
//
// A step has up to 16 tokens. Each belongs to a sequence and has a position in it; both are read from the
// GPU's memory, so that a captured launch serves all positions.
//
// Constants that kernels do not need may be left out: BITS, TRUNCATE, GROUP_SIZE (embed); UNIT (32 or 64),
// HALF_IN, HALF_OUT (rms_norm, quantize), BFLOAT (halves are bfloat16), VECTORS (rms_norm); HEAD, KV_BITS
// (rope_and_cache; 0 is float16). What few models have is compiled only where it is asked for:
//
//   embed           SCALED: rows times a scale
//   rms_norm        DELTA_NORM, SCALED: delta is normed, and scaled; NORM 0: x itself goes on;
//                   FLOATS: as floats too
//   quantize        GELU, not SiLU
//   both            ARRANGED: halves in the order of hopper_halves.cu, for passes of so many tokens
//   rope_and_cache  ROPE_PAIRS: of a head, that are rotated; WHOLE_NORM: a norm is of all heads at once;
//                   HALF_QUERIES: queries are float16
//   route           NORMALIZE: scores of those chosen add up to one
#include "sefp.cuh"

#ifndef BITS
#define BITS 3
#define TRUNCATE 0
#define GROUP_SIZE 64
#endif
#ifndef UNIT
#define UNIT 64
#endif
#ifndef ARRANGED
#define ARRANGED 0
#endif
#ifndef HALF_IN
#define HALF_IN 0
#endif
#ifndef HALF_OUT
#define HALF_OUT 0
#endif
#ifndef BFLOAT
#define BFLOAT 0
#endif
#ifndef VECTORS
#define VECTORS 1
#endif
#ifndef HEAD
#define HEAD 64
#define KV_BITS 0
#endif
#ifndef SCALED
#define SCALED 0
#endif
#ifndef DELTA_NORM
#define DELTA_NORM 0
#endif
#ifndef NORM
#define NORM 1
#endif
#ifndef FLOATS
#define FLOATS 0
#endif
#ifndef GELU
#define GELU 0
#endif
#ifndef ROPE_PAIRS
#define ROPE_PAIRS (HEAD / 2)
#endif
#ifndef WHOLE_NORM
#define WHOLE_NORM 0
#endif
#ifndef HALF_QUERIES
#define HALF_QUERIES 0
#endif
#ifndef NORMALIZE
#define NORMALIZE 0
#endif

using Half = typename Choice<BFLOAT, BFloat16, Float16>::Type;
using In = typename Choice<HALF_IN, Half, Float32>::Type;

// Four in a row.
template <class Type>
__device__ __forceinline__ void load_four(const typename Type::Stored* from, float (&to)[4]) {
  if constexpr (sizeof(typename Type::Stored) == 4) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  } else {
    const ushort4 four = *reinterpret_cast<const ushort4*>(from);
    to[0] = Type::load(four.x), to[1] = Type::load(four.y), to[2] = Type::load(four.z),
    to[3] = Type::load(four.w);
  }
}

// Four of a token. Arranged: by passes, units, a pair's place in its quarter of a unit, tokens, quarters.
__device__ __forceinline__ void store_halves(uint16_t* halves, int64_t token, int64_t length, int64_t at,
                                             const float (&x)[4]) {
  const ushort4 four =
    make_ushort4(Half::store(x[0]), Half::store(x[1]), Half::store(x[2]), Half::store(x[3]));
  if constexpr (ARRANGED > 0) {
    constexpr int kColumns = ARRANGED > 0 ? ARRANGED : 1, kUnit = 64, kPairs = 8, kQuarters = 4;
    const int64_t eight = (token / kColumns * (length / kUnit) + at / kUnit) * kPairs + at % 16 / 2;
    uint32_t* to = reinterpret_cast<uint32_t*>(halves) + (eight * kColumns + token % kColumns) * kQuarters +
                   at % kUnit / 16;
    to[0] = four.x | static_cast<uint32_t>(four.y) << 16;
    to[kColumns * kQuarters] = four.z | static_cast<uint32_t>(four.w) << 16;
  } else {
    *reinterpret_cast<ushort4*>(halves + token * length + at) = four;
  }
}

__device__ __forceinline__ float scaled(float value, float scale) {
  return SCALED ? __fmul_rn(value, scale) : value;
}

// Rows of an embedding: a thread has four weights.
struct Embed {
  Packed matrix;
  const int* ids;  // [tokens]
  float* x;        // [tokens, length]
  int length, blocks, groups;
  float scale;
};

extern "C" __global__ void embed(const __grid_constant__ Embed p) {
  let_successor_start();
  wait_for_predecessor();
  constexpr Meaning means = meaning(BITS, TRUNCATE);
  const int token = blockIdx.y, quad = blockIdx.x * blockDim.x + threadIdx.x, block = quad / 8, j = quad % 8;
  if (4 * quad >= p.length) return;
  const int64_t row = min(static_cast<int64_t>(max(p.ids[token], 0)), p.matrix.rows - 1),
                at = row * p.blocks + block;
  const uint32_t base = p.matrix.base[kBaseWords * at + j / 2] >> (4 * (j % 2));
  uint32_t planes[BITS > kCoarsest ? BITS - kCoarsest : 1];
#pragma unroll
  for (int k = 0; k < BITS - kCoarsest; ++k) planes[k] = p.matrix.planes[k][at] >> j;
  const float step =
    step_of(p.matrix.scales[row * p.groups + 4 * quad / GROUP_SIZE], step_factor(p.matrix, means.shift));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int u = base >> 8 * i & 15;
#pragma unroll
    for (int k = 0; k < BITS - kCoarsest; ++k) u = 2 * u | (planes[k] >> 8 * i & 1);
    if (means.raise_negative) u += u < 1 << BITS;
    if (4 * quad + i < p.length)
      p.x[static_cast<int64_t>(token) * p.length + 4 * quad + i] =
        scaled(static_cast<float>(means.factor * u + means.constant) * step, p.scale);
  }
}

// A sum over a block of at most 32 warps: each leaves its part, and after a barrier every thread collects
// them.
__device__ __forceinline__ void begin_block_sum(float sum, float* sums) {
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
}
__device__ __forceinline__ float end_block_sum(const float* sums) {
  return warp_sum(threadIdx.x % kWarp < blockDim.x / kWarp ? sums[threadIdx.x % kWarp] : 0.0f);
}

// x += delta, where there is one, which may be normed and scaled before; then weight * x / sqrt(mean(x^2) +
// eps), or x itself, as integers or in float16, and as floats for a router. One block is one token.
struct RmsNorm {
  float* x;             // [tokens, length]
  const void* delta;    // the same, or null
  const float* weight;  // [length]
  Activations out;
  uint16_t* halves;  // [tokens, length]
  int length, units;
  float eps, scale;
  const float* delta_weight;  // [length]
  float* floats;              // [tokens, length]
};

extern "C" __global__ void __launch_bounds__(1024) rms_norm(const __grid_constant__ RmsNorm p) {
  __shared__ float sums[1 + DELTA_NORM][kWarp];
  let_successor_start();
  const int64_t token = blockIdx.x, row = token * p.length;
  float weight[VECTORS][4] = {}, x[VECTORS][4] = {}, delta[VECTORS][4] = {};
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int at = 4 * (v * blockDim.x + threadIdx.x);
    if (NORM && at < p.length) load_four<Float32>(p.weight + at, weight[v]);  // nobody's output
  }
  wait_for_predecessor();
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int at = 4 * (v * blockDim.x + threadIdx.x);
    if (at >= p.length) continue;
    load_four<Float32>(p.x + row + at, x[v]);
    if (p.delta) load_four<In>(static_cast<const In::Stored*>(p.delta) + row + at, delta[v]);
  }
  if constexpr (DELTA_NORM) {
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += delta[v][i] * delta[v][i];
    begin_block_sum(sum, sums[DELTA_NORM]);
    __syncthreads();
    const float factor = 1.0f / sqrtf(end_block_sum(sums[DELTA_NORM]) / static_cast<float>(p.length) + p.eps);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int at = 4 * (v * blockDim.x + threadIdx.x);
      float of_delta[4] = {};
      if (at < p.length) load_four<Float32>(p.delta_weight + at, of_delta);
#pragma unroll
      for (int i = 0; i < 4; ++i) delta[v][i] = __fmul_rn(of_delta[i], __fmul_rn(delta[v][i], factor));
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[v][i] = __fadd_rn(x[v][i], scaled(delta[v][i], p.scale));
      sum += x[v][i] * x[v][i];
    }
  if constexpr (NORM) begin_block_sum(sum, sums[0]);
  if (p.delta) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int at = 4 * (v * blockDim.x + threadIdx.x);
      if (at < p.length)
        *reinterpret_cast<float4*>(p.x + row + at) = make_float4(x[v][0], x[v][1], x[v][2], x[v][3]);
    }
  }
  if constexpr (NORM) {
    __syncthreads();
    sum = end_block_sum(sums[0]);
  }
  const float factor = NORM ? 1.0f / sqrtf(sum / static_cast<float>(p.length) + p.eps) : 1.0f;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int at = 4 * (v * blockDim.x + threadIdx.x);
    if constexpr (NORM) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[v][i] = weight[v][i] * (x[v][i] * factor);
    }
    if constexpr (FLOATS) {
      if (at < p.length)
        *reinterpret_cast<float4*>(p.floats + row + at) = make_float4(x[v][0], x[v][1], x[v][2], x[v][3]);
    }
    if constexpr (HALF_OUT) {
      if (at < p.length) store_halves(p.halves, token, p.length, at, x[v]);
    } else {
      quantize_quads<UNIT>(x[v], at < p.units * UNIT, token * p.units + at / UNIT, p.out);
    }
  }
}

// Numbers as integers, or in float16; where `up` is given, silu(x) * up, or gelu(x) * up by its tanh.
__device__ __forceinline__ float activated(float x) {
  if constexpr (GELU) return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  return x / (1.0f + __expf(-x));
}

struct Quantize {
  const void* x;   // [tokens, length]
  const void* up;  // the same, or null
  int64_t stride;  // of both, from token to token
  Activations out;
  uint16_t* halves;  // [tokens, length]
  int tokens, length, units;
};

extern "C" __global__ void quantize(const __grid_constant__ Quantize p) {
  let_successor_start();
  wait_for_predecessor();
  const int64_t at = 4 * (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x), slot = at / UNIT;
  const int64_t token = slot / p.units, in_row = at - token * p.units * UNIT;
  const bool there = token < p.tokens;
  float x[4] = {}, up[4];
  if (there && in_row < p.length) {
    load_four<In>(static_cast<const In::Stored*>(p.x) + token * p.stride + in_row, x);
    if (p.up) {
      load_four<In>(static_cast<const In::Stored*>(p.up) + token * p.stride + in_row, up);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = activated(x[i]) * up[i];
    }
  }
  if constexpr (HALF_OUT) {
    if (there && in_row < p.length) store_halves(p.halves, token, p.length, in_row, x);
  } else {
    quantize_quads<UNIT>(x, there, slot, p.out);
  }
}

// Norms and rotates queries and keys; keys and values go into the cache. A warp has one head of one token.
struct RopeAndCache {
  const void* vectors[3];  // queries, keys, values [tokens, heads, HEAD]
  int64_t strides[3];      // from token to token
  const float* norms[2];   // of queries and keys [HEAD], or [heads, HEAD] of all heads at once, or null
  const float* offsets;    // what packed keys are kept less [kv heads, HEAD], or null
  const float* cosines;    // [positions, ROPE_PAIRS]
  const float* sines;
  const int* positions;  // [tokens]
  const int* sequences;
  void* queries;      // [tokens, heads, HEAD], scaled
  CacheRows rows[2];  // keys, values [sequences, kv heads, capacity]
  int* refused;       // set where the cache cannot hold a number
  int64_t capacity;
  float eps, scale;
  int heads, kv_heads;
};

constexpr int kCacheWarps = 4;
constexpr int kHalf = HEAD / 2;
static_assert(ROPE_PAIRS <= kHalf, "a head has no more pairs");

// The two elements of pair i, which are rotated together if i < ROPE_PAIRS.
__device__ __forceinline__ int first_of(int i) { return i < ROPE_PAIRS ? i : ROPE_PAIRS + i; }
__device__ __forceinline__ int second_of(int i) { return i < ROPE_PAIRS ? ROPE_PAIRS + i : kHalf + i; }

constexpr int kHeadBlocks = (HEAD + kBlock - 1) / kBlock;

// A row into the cache; a block is a group. Lane l holds the weight of a block whose bit of a plane is bit l:
// FORMAT.md, "Blocks".
__device__ __forceinline__ void encode(const float* x, const CacheRows& rows, int64_t row, int* refused) {
  const int lane = threadIdx.x % kWarp, weight = plane_weight(lane);
#pragma unroll
  for (int block = 0; block < kHeadBlocks; ++block) {
    const bool there = block * kBlock + weight < HEAD;
    const float value = there ? x[block * kBlock + weight] : 0.0f;
    const uint32_t largest = __reduce_max_sync(kAll, __float_as_uint(value) & kMagnitude);
    int exponent = exponent_of(largest);
    if (exponent > kMaxCacheExponent) {
      if (lane == 0) *refused = 1;
      exponent = kMaxCacheExponent;
    }
    exponent = max(exponent, kMinCacheExponent);
    const int64_t at = row * kHeadBlocks + block;
    if (lane == 0) rows.exponents[at] = static_cast<int8_t>(exponent);
    const float scaled = value * power_of_two(kFinest - exponent);
    const float floor = floorf(fminf(fmaxf(scaled, -256.0f), 255.0f));
    const int u = there ? cache_code(value, scaled, static_cast<int>(floor)) : 0;  // padding is zero
    const uint32_t nibble = u >> kPlanes, other = __shfl_down_sync(kAll, nibble, 1);
    if (lane % 2 == 0)
      reinterpret_cast<uint8_t*>(rows.base + kBaseWords * at)[4 * (lane % 8 / 2) + lane / 8] =
        static_cast<uint8_t>(nibble | other << 4);
#pragma unroll
    for (int k = 0; k < KV_BITS - kCoarsest; ++k) {
      const uint32_t plane = __ballot_sync(kAll, u >> (kPlanes - 1 - k) & 1);
      if (lane == 0) rows.planes[k][at] = plane;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kCacheWarps* kWarp)
  rope_and_cache(const __grid_constant__ RopeAndCache p) {
  constexpr int kMine = (kHalf + kWarp - 1) / kWarp, kPitch = kHeadBlocks * kBlock;
  __shared__ float shared[kCacheWarps][HEAD];
  wait_for_predecessor();
  let_successor_start();  // not before: attend reads what others wrote, before it waits for this
  const int64_t token = blockIdx.y;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int head = blockIdx.x * kCacheWarps + warp, kind = 0;  // queries, keys, values
  if (head >= p.heads) head -= p.heads, kind = 1;
  if (kind == 1 && head >= p.kv_heads) head -= p.kv_heads, kind = 2;
  if (kind == 2 && head >= p.kv_heads) return;
  const int position = p.positions[token], sequence = p.sequences[token];
  const typename In::Stored* all =
    static_cast<const typename In::Stored*>(p.vectors[kind]) + token * p.strides[kind];
  const typename In::Stored* from = all + head * HEAD;
  float first[kMine] = {}, second[kMine] = {};
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    const int i = lane + kWarp * k;
    if (i < kHalf) first[k] = In::load(from[first_of(i)]), second[k] = In::load(from[second_of(i)]);
  }
  if (kind < 2) {
    if (const float* weight = p.norms[kind]) {
      float sum = 0.0f;
      const int length = WHOLE_NORM ? (kind == 0 ? p.heads : p.kv_heads) * HEAD : HEAD;
      if constexpr (WHOLE_NORM) {
        weight += head * HEAD;
        for (int i = lane; i < length; i += kWarp) sum += In::load(all[i]) * In::load(all[i]);
      } else {
#pragma unroll
        for (int k = 0; k < kMine; ++k) sum += first[k] * first[k] + second[k] * second[k];
      }
      const float factor = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(length) + p.eps);
#pragma unroll
      for (int k = 0; k < kMine; ++k) {
        const int i = lane + kWarp * k;
        if (i < kHalf)
          first[k] = weight[first_of(i)] * (first[k] * factor),
          second[k] = weight[second_of(i)] * (second[k] * factor);
      }
    }
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const int i = lane + kWarp * k;
      if (i >= ROPE_PAIRS) continue;
      const float cosine = p.cosines[static_cast<int64_t>(position) * ROPE_PAIRS + i],
                  sine = p.sines[static_cast<int64_t>(position) * ROPE_PAIRS + i];
      const float a = first[k], b = second[k];
      // Nothing is fused, so that the CPU's decoder and torch give the same.
      first[k] = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
      second[k] = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine));
    }
  }
  if (kind == 0) {
    using Query = typename Choice<HALF_QUERIES, Float16, Float32>::Type;
    Query::Stored* to = static_cast<Query::Stored*>(p.queries) + (token * p.heads + head) * HEAD;
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const int i = lane + kWarp * k;
      if (i >= kHalf) continue;
      to[first_of(i)] = Query::store(first[k] * p.scale),
      to[second_of(i)] = Query::store(second[k] * p.scale);
    }
    return;
  }
  if (position >= p.capacity) return;
  const int64_t row = (static_cast<int64_t>(sequence) * p.kv_heads + head) * p.capacity + position;
  const CacheRows& rows = p.rows[kind - 1];
  if constexpr (KV_BITS) {
    const float* offsets = kind == 1 && p.offsets ? p.offsets + head * HEAD : nullptr;
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const int i = lane + kWarp * k;
      if (i >= kHalf) continue;
      const int one = first_of(i), other = second_of(i);
      shared[warp][one] = offsets ? __fsub_rn(first[k], offsets[one]) : first[k];
      shared[warp][other] = offsets ? __fsub_rn(second[k], offsets[other]) : second[k];
    }
    __syncwarp();
    encode(shared[warp], rows, row, p.refused);
  } else {
    uint16_t* to = reinterpret_cast<uint16_t*>(rows.base) + row * kPitch;
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const int i = lane + kWarp * k;
      if (i >= kHalf) continue;
      const uint16_t a = to_half(first[k]), b = to_half(second[k]);
      if ((a & 0x7c00) == 0x7c00 || (b & 0x7c00) == 0x7c00) *p.refused = 1;  // infinite, or not a number
      to[first_of(i)] = a, to[second_of(i)] = b;
    }
  }
}

// The largest of these keys is that of the largest value, and of equals that of the first index. NaN is above
// all, both zeros are equal.
__device__ __forceinline__ unsigned long long argmax_key(float value, int index) {
  const uint32_t bits = __float_as_uint(value == 0.0f ? 0.0f : value);
  const uint32_t order = value != value ? kAll : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(order) << 32 | (kAll - static_cast<uint32_t>(index));
}

// The experts of a token: a warp scores one, and the block that finishes last chooses.
struct Route {
  const float* x;       // [tokens, length]
  const float* router;  // [experts, length]
  float* scores;        // [tokens, experts]
  int* tickets;         // [tokens], zero between launches
  int* chosen;          // [tokens, count], in ascending order
  float* weights;       // [tokens, count]
  int length, experts, count;
};

constexpr int kRouteWarps = 8, kMostExperts = 1024;

extern "C" __global__ void __launch_bounds__(kRouteWarps* kWarp) route(const __grid_constant__ Route p) {
  __shared__ bool is_last;
  let_successor_start();
  wait_for_predecessor();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, expert = blockIdx.x * kRouteWarps + warp;
  const int64_t token = blockIdx.y;
  float* scores = p.scores + token * p.experts;
  if (expert < p.experts) {
    const float* x = p.x + token * p.length;
    const float* row = p.router + static_cast<int64_t>(expert) * p.length;
    float sum = 0.0f;
    for (int at = 4 * lane; at < p.length; at += 4 * kWarp) {
      float a[4], b[4];
      load_four<Float32>(x + at, a);
      load_four<Float32>(row + at, b);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += a[i] * b[i];
    }
    sum = warp_sum(sum);
    if (lane == 0) scores[expert] = sum;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(p.tickets + token, 1) == static_cast<int>(gridDim.x) - 1;
    if (is_last) p.tickets[token] = 0;
    __threadfence();
  }
  __syncthreads();
  if (!is_last || warp) return;

  // Lane l has experts l, l + 32, ...
  float most = __int_as_float(0xff800000), all = 0.0f;
  for (int i = lane; i < p.experts; i += kWarp) most = fmaxf(most, __ldcg(scores + i));
  most = warp_max(most);
  for (int i = lane; i < p.experts; i += kWarp) all += expf(__ldcg(scores + i) - most);
  all = warp_sum(all);
  uint32_t mine = 0;  // bit j: expert lane + 32 j is chosen
  for (int n = 0; n < p.count; ++n) {
    unsigned long long best = 0;
    for (int j = 0; lane + kWarp * j < p.experts; ++j) {
      if (mine >> j & 1) continue;
      const int one = lane + kWarp * j;
      const unsigned long long key = argmax_key(__ldcg(scores + one), one);
      best = key > best ? key : best;
    }
    const uint32_t one = kAll - static_cast<uint32_t>(warp_max(best));
    if (one % kWarp == static_cast<uint32_t>(lane)) mine |= 1u << one / kWarp;
  }
  float of_chosen = 0.0f;
  if constexpr (NORMALIZE) {
    for (int j = 0; kWarp * j < p.experts; ++j)
      if (mine >> j & 1) of_chosen += expf(__ldcg(scores + lane + kWarp * j) - most) / all;
    of_chosen = warp_sum(of_chosen);
  }
  int before = 0;
  for (int j = 0; kWarp * j < p.experts; ++j) {
    const uint32_t those = __ballot_sync(kAll, mine >> j & 1);
    if (mine >> j & 1) {
      const int64_t at = token * p.count + before + __popc(those & ((1u << lane) - 1));
      const float share = expf(__ldcg(scores + lane + kWarp * j) - most) / all;
      p.chosen[at] = lane + kWarp * j;
      p.weights[at] = NORMALIZE ? share / of_chosen : share;
    }
    before += __popc(those);
  }
}

// What the experts of a token give, each times its weight, in ascending order: a token's bits do not depend
// on the others.
struct AddExperts {
  const float* parts;    // [tokens, count, length]
  const float* weights;  // [tokens, count]
  float* out;            // [tokens, length]
  int length, count;
};

extern "C" __global__ void add_experts(const __grid_constant__ AddExperts p) {
  let_successor_start();
  wait_for_predecessor();
  const int64_t token = blockIdx.y;
  const int at = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= p.length) return;
  float sum[4] = {};
  for (int n = 0; n < p.count; ++n) {
    const float weight = p.weights[token * p.count + n];
    float part[4];
    load_four<Float32>(p.parts + (token * p.count + n) * p.length + at, part);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(part[i], weight));
  }
  *reinterpret_cast<float4*>(p.out + token * p.length + at) = make_float4(sum[0], sum[1], sum[2], sum[3]);
}

// Logits times a scale, and softly between -cap and cap where there is one; in place.
struct CapLogits {
  float* logits;
  int64_t count;
  float scale, cap;
};

extern "C" __global__ void cap_logits(const __grid_constant__ CapLogits p) {
  let_successor_start();
  wait_for_predecessor();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= p.count) return;
  const float value = p.logits[at] * p.scale;
  p.logits[at] = p.cap ? p.cap * tanhf(value / p.cap) : value;
}

// The token of the largest logit, the first of equals; NaN is above all. It becomes the next step's, a
// position further on.
struct Argmax {
  const float* logits;           // [tokens, count]
  unsigned long long* best;      // [tokens]; zero between launches, as tickets are
  int* tickets;                  // [tokens]
  int *ids, *positions, *steps;  // [tokens]; steps counts what was chosen
  int* ring;                     // [ring_size, stride]: what the host reads
  int count, ring_size, stride;
};

extern "C" __global__ void argmax(const __grid_constant__ Argmax p) {
  __shared__ unsigned long long shared[kWarp];
  let_successor_start();
  wait_for_predecessor();
  const int token = blockIdx.y;
  const float* logits = p.logits + static_cast<int64_t>(token) * p.count;
  unsigned long long best = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += gridDim.x * blockDim.x) {
    const unsigned long long key = argmax_key(logits[i], i);
    best = key > best ? key : best;
  }
  best = warp_max(best);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < static_cast<int>(blockDim.x) / kWarp; ++i) best = shared[i] > best ? shared[i] : best;
  atomicMax(p.best + token, best);
  __threadfence();
  if (atomicAdd(p.tickets + token, 1) != static_cast<int>(gridDim.x) - 1) return;
  best = atomicExch(p.best + token, 0ull);
  p.tickets[token] = 0;
  const int id = static_cast<int>(kAll - static_cast<uint32_t>(best)), step = p.steps[token];
  p.ids[token] = id;
  p.ring[step % p.ring_size * p.stride + token] = id;
  p.steps[token] = step + 1;
  p.positions[token] += 1;
}
