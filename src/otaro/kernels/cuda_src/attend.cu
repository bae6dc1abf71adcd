// Attention of up to 16 tokens, each over the positions of its own sequence, straight from a cache in float16
// or packed.
//
// The positions that a token sees are cut into as many slices as there are splits, or fewer; a block takes
// one slice for some query heads that share a kv head. Partial softmaxes go to memory, and the block that
// finishes last merges them in ascending order. Where slices begin depends on the token's position alone, so
// that a token gets the same bits alone and in a batch.
//
// A warp takes 16 positions at a time on the tensor cores, in float16 with sums in float32. Queries and
// weights, which are floats, enter as two halves each: what rounding leaves of the first is in the second.
// Which dimension stands where in a fragment is free as long as both sides agree, so threads load eight
// neighbours of a key, four of a value, and unpack what they loaded:
//
//   scores   [8 heads, 2 parts] x [8 positions]: thread (g, t) of a warp (g = lane / 4, t = lane % 4) has
//            dimensions 32 c + 8 t ... + 7 of query head g and of the key at position g; it gets head g at
//            positions 2t and 2t + 1
//   values   [16 dimensions] x [8 heads]: it has dimensions 32 c + 4 g ... + 3 of the values at positions 2t,
//            2t + 1, 2t + 8, 2t + 9, and, from the scores, the weights of head g at these positions; it gets
//            heads 2t and 2t + 1
//
// Packed numbers become halves, exactly but for multiples of 2^-25 below 2^-14, at half their size: 2^16 is
// no half.
//
// Set by the caller: HEAD, HEADS (of a block, at most 8), KV_BITS (0: float16), OUT (0: integers in units of
// UNIT, 1: float16, 2: float32), UNIT; CAPPED, where scores are.
#include "halves.cuh"

#ifndef CAPPED
#define CAPPED 0
#endif

constexpr int kWarps = 4, kTile = 16, kRound = kWarps * kTile;
constexpr int kChunks = (HEAD + kBlock - 1) / kBlock;  // of 32 dimensions
constexpr int kPitch = kChunks * kBlock;
constexpr int kPlanesUsed = KV_BITS ? KV_BITS - kCoarsest : 0;
constexpr int kMostSplits = 64, kAtOnce = 32;  // partial results that a thread has under way
#define kNever __int_as_float(0xff800000)

struct Attend {
  const float* queries;    // [tokens, heads, HEAD], scaled
  CacheRows keys, values;  // [sequences, kv heads, capacity]
  const int* positions;    // [tokens]
  const int* sequences;
  float* partial;  // [tokens, heads, splits, kPitch]
  float* states;   // [tokens, heads, splits, 2]: largest score, sum of weights
  int* tickets;    // [tokens, blocks of heads], zero between launches
  Activations out;
  uint16_t* halves;  // [tokens, heads, HEAD]
  float* floats;
  int64_t capacity;
  int heads, kv_heads, blocks, window;  // blocks: that share a kv head; window: 0 for all positions
  float cap;
};

__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
  asm(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
    "%1, %2, %3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t pair(uint16_t first, uint16_t second) {
  return first | static_cast<uint32_t>(second) << 16;
}

// Two floats as two pairs of halves that add up to them.
__device__ __forceinline__ void split(float first, float second, uint32_t& high, uint32_t& low) {
  const uint16_t a = to_half(first), b = to_half(second);
  high = pair(a, b);
  low = pair(to_half(first - from_half(a)), to_half(second - from_half(b)));
}

// How a chunk's numbers, which are a group, come from its bytes: byte * factor + constant (+ last * extra);
// the halves of a pair may be of two positions.
struct Scale {
  uint32_t factor, constant, extra;
};

__device__ __forceinline__ Scale scale_of(int first, int second) {
  constexpr int kBits = KV_BITS ? KV_BITS : kCoarsest;
  constexpr Meaning means = meaning(kBits, false);
  // A byte lacks the last of nine bits.
  constexpr float kFactor = kBits == 8 ? 2 * means.factor : means.factor;
  const float a = power_of_two(first - means.shift - 1), b = power_of_two(second - means.shift - 1);
  return {
    pair(to_half(kFactor * a), to_half(kFactor * b)),
    pair(to_half(static_cast<float>(means.constant) * a), to_half(static_cast<float>(means.constant) * b)),
    pair(to_half(static_cast<float>(means.factor) * a), to_half(static_cast<float>(means.factor) * b))};
}

// A pair of bytes, both below a byte 0x64, is the pair of halves 1024 + byte.
__device__ __forceinline__ uint32_t halves_of(uint32_t bytes, uint32_t last, uint32_t selector,
                                              const Scale& scale) {
  constexpr uint32_t kThousand = 0xe400e400u;  // -1024 twice
  uint32_t result = fuse_halves(add_halves(__byte_perm(bytes, 0x64646464u, selector), kThousand),
                                scale.factor, scale.constant);
  if constexpr (KV_BITS == 8)
    result =
      fuse_halves(add_halves(__byte_perm(last, 0x64646464u, selector), kThousand), scale.extra, result);
  return result;
}

// Four weights of a block, a byte each, from a nibble word and plane words shifted to their quad; of nine
// bits the last apart.
__device__ __forceinline__ uint32_t quad_of(uint32_t nibbles, const uint32_t* planes, int shift,
                                            uint32_t& last) {
  uint32_t u = nibbles & 0x0f0f0f0fu;
#pragma unroll
  for (int k = 0; k < (kPlanesUsed < 4 ? kPlanesUsed : 4); ++k)
    u = 2 * u | (planes[k] >> shift & 0x01010101u);
  last = 0;
  if constexpr (kPlanesUsed == 5) last = planes[4] >> shift & 0x01010101u;
  return u;
}

// One token's row of a chunk: what a thread loads of it.
struct Words {
  uint32_t base[kChunks * (KV_BITS ? 1 : 4)];  // of a value in float16, two to a chunk
  uint32_t planes[kChunks][kPlanesUsed ? kPlanesUsed : 1];
  int exponents[kChunks];
};

// Of a key: dimensions 32 c + 8 t and on. Of a value: 32 c + 4 g and on.
template <bool Key>
__device__ __forceinline__ void load(const CacheRows& rows, int64_t row, Words& words) {
  const int t = threadIdx.x % 4, g = threadIdx.x % kWarp / 4;
  if constexpr (KV_BITS == 0) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(rows.base) + row * kPitch;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if constexpr (Key) {
        const uint4 four = *reinterpret_cast<const uint4*>(from + 32 * c + 8 * t);
        words.base[4 * c] = four.x, words.base[4 * c + 1] = four.y, words.base[4 * c + 2] = four.z,
                       words.base[4 * c + 3] = four.w;
      } else {
        const uint2 two = *reinterpret_cast<const uint2*>(from + 32 * c + 4 * g);
        words.base[2 * c] = two.x, words.base[2 * c + 1] = two.y;
      }
    }
  } else {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      words.base[c] = rows.base[(row * kChunks + c) * kBaseWords + (Key ? t : g / 2)];
#pragma unroll
      for (int k = 0; k < kPlanesUsed; ++k) words.planes[c][k] = rows.planes[k][row * kChunks + c];
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) words.exponents[c] = rows.exponents[row * kChunks + c];
  }
}

// The four pairs of a key's chunk.
__device__ __forceinline__ void key_halves(const Words& words, int c, uint32_t (&b)[4]) {
  if constexpr (KV_BITS == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = words.base[4 * c + i];
  } else {
    const int t = threadIdx.x % 4;
    const Scale scale = scale_of(words.exponents[c], words.exponents[c]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t last;
      const uint32_t u = quad_of(words.base[c] >> 4 * i, words.planes[c], 2 * t + i, last);
      b[2 * i] = halves_of(u, last, 0x4140, scale);
      b[2 * i + 1] = halves_of(u, last, 0x4342, scale);
    }
  }
}

// Of the values at two positions, four pairs: each a dimension at both.
__device__ __forceinline__ void value_halves(const Words& first, const Words& second, int c,
                                             uint32_t (&a)[4]) {
  if constexpr (KV_BITS == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[2 * i] = __byte_perm(first.base[2 * c + i], second.base[2 * c + i], 0x5410);
      a[2 * i + 1] = __byte_perm(first.base[2 * c + i], second.base[2 * c + i], 0x7632);
    }
  } else {
    const int g = threadIdx.x % kWarp / 4;
    const Scale scale = scale_of(first.exponents[c], second.exponents[c]);
    uint32_t last[2];
    const uint32_t u[2] = {quad_of(first.base[c] >> 4 * (g % 2), first.planes[c], g, last[0]),
                           quad_of(second.base[c] >> 4 * (g % 2), second.planes[c], g, last[1])};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t mixed = __byte_perm(u[0], u[1], i ? 0x7362 : 0x5140),
                     mixed_last = __byte_perm(last[0], last[1], i ? 0x7362 : 0x5140);
      a[2 * i] = halves_of(mixed, mixed_last, 0x4140, scale);
      a[2 * i + 1] = halves_of(mixed, mixed_last, 0x4342, scale);
    }
  }
}

// What came out for a head: four dimensions to a thread, numbered through the heads of the block.
__device__ __forceinline__ void finish(const Attend& p, int64_t token, int first_head, int heads_here,
                                       int item, const float (&x)[4]) {
  const int head = item / (kPitch / 4), dimension = item % (kPitch / 4) * 4;
  const bool there = head < heads_here && dimension < HEAD;
  const int64_t at = (token * p.heads + first_head + head) * HEAD + dimension;
  if constexpr (OUT == 0) {
    static_assert(OUT || HEAD % UNIT == 0, "a unit must not span heads");
    quantize_quads<UNIT>(x, there, at / UNIT, p.out);
  } else if (there) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (dimension + i >= HEAD) continue;
      if constexpr (OUT == 1)
        p.halves[at + i] = to_half(x[i]);
      else
        p.floats[at + i] = x[i];
    }
  }
}

extern "C" __global__ void __launch_bounds__(kWarps* kWarp) attend(const __grid_constant__ Attend p) {
  __shared__ float parts[kWarps][HEADS][kPitch];
  __shared__ float largest[kWarps][8], sums[kWarps][8];
  __shared__ float factors[HEADS][kMostSplits];
  __shared__ float total[8];
  __shared__ bool is_last;
  let_successor_start();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, t = lane % 4, g = lane / 4;
  const int splits = gridDim.x, part = blockIdx.x;
  const int64_t token = blockIdx.z;
  const int kv_head = blockIdx.y / p.blocks, group = p.heads / p.kv_heads;
  const int in_group = blockIdx.y % p.blocks * HEADS, first_head = kv_head * group + in_group,
            heads_here = min(HEADS, group - in_group);
  // rope_and_cache lets this begin when all before it have ended. So positions are there (in the second-level
  // cache: the first may have those of the last step), and keys and values but for those that it writes: they
  // come closer meanwhile.
  const int position = __ldcg(p.positions + token);
  const int first = p.window ? max(0, position + 1 - p.window) : 0, count = position + 1 - first;
  const int slice = (count + splits * kRound - 1) / (splits * kRound) * kRound,
            active = (count + slice - 1) / slice;
  const int begin = first + part * slice, end = min(begin + slice, position + 1);
  if (begin >= end) return;
  const int64_t first_row =
    (static_cast<int64_t>(__ldcg(p.sequences + token)) * p.kv_heads + kv_head) * p.capacity;
  if (threadIdx.x < 2) {
    constexpr int kRowBytes = kChunks * (KV_BITS ? 4 * kBaseWords : 2 * kBlock);
    const uint32_t* base = (threadIdx.x ? p.values : p.keys).base;
    ask_for(base + (first_row + begin) * (kRowBytes / 4), (end - begin) * kRowBytes);
  }
  wait_for_predecessor();

  // The first ones before queries, which are looked at before. Packed ones would take too many registers, and
  // so would those of large heads.
  constexpr bool kEarly = KV_BITS == 0 && HEAD <= 128;
  Words keys[2], values[4];
  const auto load_tile = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) load<true>(p.keys, first_row + min(tile + 8 * i + g, end - 1), keys[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load<false>(p.values, first_row + min(tile + 8 * (i / 2) + 2 * t + i % 2, end - 1), values[i]);
  };
  if (kEarly) load_tile(begin + kTile * warp);

  uint32_t query[kChunks][2][4];  // two steps of 16 dimensions to a chunk: high parts, low parts
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int dimension = 32 * c + 8 * t + 2 * i;
      float two[2] = {};
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (g < heads_here && dimension + k < HEAD)
          two[k] =
            p.queries[(token * p.heads + first_head + g) * HEAD + dimension + k] * (KV_BITS ? 2.0f : 1.0f);
      split(two[0], two[1], query[c][i / 2][2 * (i % 2)], query[c][i / 2][2 * (i % 2) + 1]);
    }

  float most = kNever, sum = 0.0f;  // of head g
  float mixed[kChunks][2][4] = {};  // of heads 2t and 2t + 1
  for (int tile = begin + kTile * warp; tile < end; tile += kRound) {
    if (!kEarly || tile >= begin + kRound) load_tile(tile);
    float scores[2][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t b[4];
        key_halves(keys[i], c, b);
#pragma unroll
        for (int k = 0; k < 2; ++k)
          multiply(scores[i], query[c][k][0], query[c][k][1], query[c][k][2], query[c][k][3], b[2 * k],
                   b[2 * k + 1]);
      }
    float weights[2][2], next = most;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float score = scores[i][j] + scores[i][j + 2];
        if constexpr (CAPPED) score = p.cap * tanhf(score / p.cap);
        weights[i][j] = tile + 8 * i + 2 * t + j < end ? score : kNever;
        next = fmaxf(next, weights[i][j]);
      }
#pragma unroll
    for (int mate = 1; mate < 4; mate *= 2) next = fmaxf(next, __shfl_xor_sync(kAll, next, mate));
    const float faded = __expf(most - next);
    most = next;
    sum *= faded;
    uint32_t high[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        weights[i][j] = __expf(weights[i][j] - most);
        sum += weights[i][j];
      }
      split(weights[i][0], weights[i][1], high[i], low[i]);
    }
    const float faded_even = __shfl_sync(kAll, faded, 8 * t), faded_odd = __shfl_sync(kAll, faded, 8 * t + 4);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) value_halves(values[2 * i], values[2 * i + 1], c, a[i]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float (&into)[4] = mixed[c][j];
        into[0] *= faded_even, into[1] *= faded_odd, into[2] *= faded_even, into[3] *= faded_odd;
        multiply(into, a[0][2 * j], a[0][2 * j + 1], a[1][2 * j], a[1][2 * j + 1], high[0], high[1]);
        multiply(into, a[0][2 * j], a[0][2 * j + 1], a[1][2 * j], a[1][2 * j + 1], low[0], low[1]);
      }
    }
  }

  // Warps meet.
#pragma unroll
  for (int mate = 1; mate < 4; mate *= 2) sum += __shfl_xor_sync(kAll, sum, mate);
  if (t == 0) largest[warp][g] = most, sums[warp][g] = sum;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int head = 2 * t + k;
    float top = largest[0][head];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) top = fmaxf(top, largest[w][head]);
    const float factor = __expf(largest[warp][head] - top) * (KV_BITS ? 2.0f : 1.0f);
    if (head < HEADS) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            parts[warp][head][32 * c + 4 * g + 2 * j + i] = mixed[c][j][2 * i + k] * factor;
    }
  }
  if (threadIdx.x < HEADS) {
    const int head = threadIdx.x;
    float top = largest[0][head], all = 0.0f;
    for (int w = 1; w < kWarps; ++w) top = fmaxf(top, largest[w][head]);
    for (int w = 0; w < kWarps; ++w) all += sums[w][head] * __expf(largest[w][head] - top);
    total[head] = all;
    if (active > 1 && head < heads_here) {
      float* state = p.states + ((token * p.heads + first_head + head) * splits + part) * 2;
      state[0] = top, state[1] = all;
    }
  }
  __syncthreads();
  constexpr int kItems = HEADS * kPitch / 4, kThreads = kWarps * kWarp;
#pragma unroll
  for (int start = 0; start < kItems; start += kThreads) {
    const int item = start + threadIdx.x, head = item / (kPitch / 4), dimension = item % (kPitch / 4) * 4;
    float x[4] = {};
    if (item < kItems) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = parts[0][head][dimension + i];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) x[i] += parts[w][head][dimension + i];
        if (active == 1) x[i] /= total[head];
      }
    }
    if (active == 1)
      finish(p, token, first_head, heads_here, item, x);
    else if (item < kItems && head < heads_here)
      *reinterpret_cast<float4*>(
        p.partial + ((token * p.heads + first_head + head) * splits + part) * kPitch + dimension) =
        make_float4(x[0], x[1], x[2], x[3]);
  }
  if (active == 1) return;

  // Slices meet, in the block that is last.
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // of all that the block wrote
    int* ticket = p.tickets + token * gridDim.y + blockIdx.y;
    is_last = atomicAdd(ticket, 1) == active - 1;
    if (is_last) *ticket = 0;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  float4 slices[kAtOnce];
  const auto load_slices = [&](int item, int s) {
    const int head = min(item / (kPitch / 4), heads_here - 1), dimension = item % (kPitch / 4) * 4;
    const float* from = p.partial + (token * p.heads + first_head + head) * splits * kPitch + dimension;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (s + i < active)
        slices[i] = __ldcg(reinterpret_cast<const float4*>(from + static_cast<int64_t>(s + i) * kPitch));
  };
  load_slices(threadIdx.x, 0);
  for (int head = warp; head < heads_here; head += kWarps) {
    const float2* states =
      reinterpret_cast<const float2*>(p.states) + (token * p.heads + first_head + head) * splits;
    float2 state[kMostSplits / kWarp];
    float top = kNever, all = 0.0f;
#pragma unroll
    for (int i = 0; i < kMostSplits / kWarp; ++i) {
      const int s = kWarp * i + lane;
      state[i] = s < active ? __ldcg(states + s) : make_float2(kNever, 0.0f);
      top = fmaxf(top, state[i].x);
    }
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < kMostSplits / kWarp; ++i) {
      const float factor = __expf(state[i].x - top);
      factors[head][kWarp * i + lane] = factor;
      all += state[i].y * factor;
    }
    all = warp_sum(all);
    if (lane == 0) total[head] = all;
  }
  __syncthreads();
#pragma unroll
  for (int start = 0; start < kItems; start += kThreads) {
    const int item = start + threadIdx.x, head = item / (kPitch / 4);
    float x[4] = {};
    for (int s = 0; s < active; s += kAtOnce) {
      if (start + s) load_slices(item, s);
      if (item >= kItems || head >= heads_here) continue;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (s + i >= active) break;
        const float factor = factors[head][s + i];
        x[0] += slices[i].x * factor, x[1] += slices[i].y * factor, x[2] += slices[i].z * factor,
          x[3] += slices[i].w * factor;
      }
    }
    if (item < kItems && head < heads_here) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] /= total[head];
    }
    finish(p, token, first_head, heads_here, item, x);
  }
}
