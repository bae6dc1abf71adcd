// Products of several tokens with packed rows on Hopper's matrix units (`wgmma`, compute capability 9.0).
//
// Four groups of four warps multiply 64 rows each: weights are unpacked into registers, where the instruction
// takes them from, and the digits of activations stay in shared memory for good, where it takes those from,
// 2 TOKENS columns at once: high digits, then low ones. Which weight a byte stands for is free as long as
// both sides agree, so a thread unpacks the bytes it happens to load, and activations lie accordingly.
// Digits of rows too long for that are STREAMED: four more warps carry those of a stage's units to the ring.
//
// A cluster of two blocks shares 64 rows: of the sixteen lanes, dealt out in chunks of four neighbours, each
// block takes every second chunk, and of a chunk each group of warps one lane. Two warps copy weights to a
// ring of STAGES stages, each of two chunks of 64 rows; nobody waits for anybody but through barriers in
// shared memory. At the rows' end groups leave their sums in the shared memory of the block that has this
// half of the rows, where two more warps add them and write, while they go on. The order of a sum is that of
// ../reference.py, step 4, whoever takes it.
//
// Set by the caller: BITS, TRUNCATE, TOKENS (8 or 16), STAGES, STREAMED. Units are 64 weights and have a
// scale each; rows are whole sixteens of them.
#include "hopper.cuh"

constexpr int kMatrices = 3, kGroups = 4, kConsumers = kGroups * kGroupWarps;
constexpr int kAdders = 2, kCopiers = 2, kCarriers = 4;  // warps, besides; carriers where digits are STREAMED
constexpr int kCount = kWarp * (kConsumers + kAdders + kCopiers + STREAMED * kCarriers);
constexpr int kRows = kTileRows, kChunk = kStageUnits;
constexpr int kTaken = STREAMED ? 96 : 104, kLeft = STREAMED ? 48 : 64;  // registers, dealt out anew
constexpr int kCluster = 2, kEach = kGroups / kCluster;                  // lanes of a group: `kSlots` apart
constexpr int kSlots = kGroups * kCluster, kOwn = kRows / kCluster;      // sums and rows that a block adds
constexpr int kPlanesUsed = BITS - kCoarsest;
constexpr int kSpare = BITS == 8 ? 0 : 7 - BITS;  // zeros below u in its byte
constexpr Meaning kMeaning = meaning(BITS, TRUNCATE);
constexpr int kConstant = kMeaning.constant * (1 << kSpare);
// Where the constant is a multiple of the factor, the factor is left to the scale.
constexpr bool kInside = kConstant % kMeaning.factor == 0;

using Chunk = Stage<kRows, kPlanesUsed>;
constexpr int kColumns = 2 * TOKENS, kDigits = kUnit * kColumns;  // bytes of a unit
constexpr int kDigitsAt = kEach * Chunk::kBytes;                  // in a stage
constexpr int kStage = kDigitsAt + (STREAMED ? kEach * kGroups * kDigits : 0);
constexpr int kBarriers = 2 * STAGES + 2, kRingAt = 256;
static_assert(8 * kBarriers <= kRingAt);

struct Wide {
  Packed matrix[kMatrices];
  float* out[kMatrices];          // [tokens, rows]
  const float* bias[kMatrices];   // [rows], or null
  int64_t stride[kMatrices];      // of out, from token to token
  int first_tile[kMatrices + 1];  // tiles of kRows rows, numbered through the matrices
  Activations x;
  int tokens, units;
};

#define A_OPERANDS "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(upon)
#define C4(i) "+r"(c[i]), "+r"(c[i + 1]), "+r"(c[i + 2]), "+r"(c[i + 3])
// Adds 64 rows of 32 bytes times columns of 32 to c, or to zero unless `upon`.
__device__ __forceinline__ void multiply_async(int (&c)[8], uint32_t a0, uint32_t a1, uint32_t a2,
                                               uint32_t a3, uint64_t b, int upon) {
  asm volatile(
    "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n16k32.s32.u8.s8 {%0, %1, %2, %3, %4, %5, %6, %7}, "
    "{%8, %9, %10, %11}, %12, p;\n}"
    : C4(0), C4(4)
    : A_OPERANDS);
}
__device__ __forceinline__ void multiply_async(int (&c)[16], uint32_t a0, uint32_t a1, uint32_t a2,
                                               uint32_t a3, uint64_t b, int upon) {
  asm volatile(
    "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n32k32.s32.u8.s8 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
    "%12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p;\n}"
    : C4(0), C4(4), C4(8), C4(12)
    : A_OPERANDS);
}

// What a thread has of a unit, unpacked: of row g of its warp's sixteen, then of row g + 8.
struct Fragment {
  uint32_t u[2 * kQuads], last[2 * kQuads];
  int scale[2];
};

// A plane has half a word for a thread. Those of both rows make up one, unpacked as that of a block is.
__device__ __forceinline__ Fragment load(const int8_t* stage, const Places& at) {
  constexpr int kBelow = 8;  // rows
  Fragment fragment;
  uint32_t base[kQuads], planes[kPlanesUsed ? kPlanesUsed : 1];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int2 two = *reinterpret_cast<const int2*>(stage + at.base + kBasePitch * kBelow * r);
    base[2 * r] = static_cast<uint32_t>(two.x), base[2 * r + 1] = static_cast<uint32_t>(two.y);
    fragment.scale[r] = stage[at.scale + kChunk * kBelow * r];
    settle(fragment.scale[r]);
  }
#pragma unroll
  for (int k = 0; k < kPlanesUsed; ++k) {
    const int8_t* plane = stage + at.planes + kPlanePitch * kRows * k;
    planes[k] = select_bits(
      *reinterpret_cast<const uint32_t*>(plane) >> at.shift,
      *reinterpret_cast<const uint32_t*>(plane + kPlanePitch * kBelow) << (4 - at.shift), 0x0f0f0f0fu);
  }
  unpack<BITS, 2 * kQuads>(base, planes, fragment.u);
#pragma unroll
  for (int i = 0; i < 2 * kQuads; ++i) {
    uint32_t &u = fragment.u[i], &last = fragment.last[i];
    last = BITS == 8 ? last_bits(planes[kPlanesUsed ? kPlanesUsed - 1 : 0], i) : 0;
    if constexpr (TRUNCATE) (BITS == 8 ? last : u) += (~u & 0x80808080u) >> (BITS == 8 ? 7 : BITS);
  }
  return fragment;
}

// Begins the products of a unit.
__device__ __forceinline__ void multiply(const Fragment& a, uint32_t digits, int (&c)[TOKENS]) {
  const uint64_t b = columns_at<kColumns>(digits);
  constexpr uint64_t kHalf = 2 * kColumns;  // 32 bytes further, in sixteens
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) settle(c[i]);
  begin_products();
#pragma unroll
  for (int turn = 0; turn < (BITS == 8 ? 2 : 1); ++turn) {  // twice what counts twice as much as the last bit
    multiply_async(c, a.u[0], a.u[4], a.u[1], a.u[5], b, turn);
    multiply_async(c, a.u[2], a.u[6], a.u[3], a.u[7], b + kHalf, 1);
  }
  if constexpr (BITS == 8) {
    multiply_async(c, a.last[0], a.last[4], a.last[1], a.last[5], b, 1);
    multiply_async(c, a.last[2], a.last[6], a.last[3], a.last[7], b + kHalf, 1);
  }
  commit_products();
}

// Ends them, and adds their terms to a lane.
__device__ __forceinline__ void add_terms(int (&c)[TOKENS], const Fragment& a, const Term* terms,
                                          float factor, float (&lane)[TOKENS / 2]) {
  const float steps[2] = {step_of(a.scale[0], factor), step_of(a.scale[1], factor)};
  int4 both[TOKENS / 8];  // of this thread's two tokens
#pragma unroll
  for (int m = 0; m < TOKENS / 8; ++m) both[m] = *reinterpret_cast<const int4*>(terms + 8 * m);
  await_products();
#pragma unroll
  for (int i = 0; i < 2 * kQuads; ++i) {
    hold(a.u[i]);
    if (BITS == 8) hold(a.last[i]);
  }
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) settle(c[i]);
#pragma unroll
  for (int m = 0; m < TOKENS / 8; ++m) {
    const int constants[2] = {both[m].x, both[m].z};
    const float scales[2] = {__int_as_float(both[m].y), __int_as_float(both[m].w)};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int sum = 256 * c[4 * m + k] + c[TOKENS / 2 + 4 * m + k];
      const int dot = (kInside ? 1 : kMeaning.factor) * sum + constants[k % 2];
      // Scales are powers of two, products no less than 2^-126: this is rounded like the reference's product.
      lane[4 * m + k] =
        __fmaf_rn(__fmul_rn(__int2float_rn(dot), steps[k / 2]), scales[k % 2], lane[4 * m + k]);
    }
  }
}

// Lane 0 after lane j got lane j + Count / 2 added, then j + Count / 4, ...: the same sums, depth first.
template <int Count>
__device__ __forceinline__ float sum_lanes(const float* lanes, int pitch) {
  if constexpr (Count == 1)
    return *lanes;
  else
    return __fadd_rn(sum_lanes<Count / 2>(lanes, 2 * pitch), sum_lanes<Count / 2>(lanes + pitch, 2 * pitch));
}

// What groups have summed up, as threads hold it: four sums each, of eight tokens and a block's share of
// rows.
constexpr int kFragments = TOKENS / 8 * kOwn * 2;

__device__ __forceinline__ void sum_slots(const float4* slots, float (&sum)[4]) {
  float lanes[4][kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const float4 four = slots[kFragments * i];
    lanes[0][i] = four.x, lanes[1][i] = four.y, lanes[2][i] = four.z, lanes[3][i] = four.w;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) sum[k] = sum_lanes<kSlots>(lanes[k], 1);
}

extern "C" __global__ void __launch_bounds__(kCount, 1) __cluster_dims__(kCluster, 1, 1)
  wide(const __grid_constant__ Wide p) {
  extern __shared__ int4 buffer[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, t = lane % 4, g = lane / 4;
  const int rank = blockIdx.x % kCluster, first = blockIdx.x / kCluster, stride = gridDim.x / kCluster;
  const int tiles = p.first_tile[kMatrices], chunks = p.units / kLanes * kEach;

  uint64_t* full = reinterpret_cast<uint64_t*>(buffer);
  uint64_t* empty = full + STAGES;
  uint64_t *summed = empty + STAGES, *written = summed + 1;
  int8_t* ring = reinterpret_cast<int8_t*>(buffer) + kRingAt;
  int8_t* digits = STREAMED ? ring + kDigitsAt : ring + STAGES * kStage;  // [chunks, groups], or of a stage
  Term* terms = reinterpret_cast<Term*>(                                  // [chunks, groups, TOKENS]
    STREAMED ? ring + STAGES * kStage : digits + chunks * kGroups * kDigits);
  float4* sums = reinterpret_cast<float4*>(terms + chunks * kGroups * TOKENS);  // [kSlots, kFragments]

  let_successor_start();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
      begin_barrier(full + s, kWarp * kCopiers + STREAMED * kCarriers), begin_barrier(empty + s, kConsumers);
    begin_barrier(summed, 1);
    begin_barrier(written, kCluster * kAdders);
    publish_barriers();
  }
  __syncthreads();
  arrive_at_cluster();

  const auto matrix_of = [&](int tile) {
    int matrix = 0;
#pragma unroll
    for (int i = 1; i < kMatrices; ++i) matrix += tile >= p.first_tile[i];
    return matrix;
  };
  // The unit of a row that this block has as the first of its n-th chunk.
  const auto unit_of = [&](int n) { return kChunk * (kCluster * n + rank); };

  const int units = chunks * kGroups;  // that this block has

  // By so many threads: each takes one token and every so many chunks, so that addresses cost nothing.
  const auto load_terms = [&](int thread, int threads) {
    constexpr int kAhead = TOKENS / 2;
    const int token = min(thread % TOKENS, p.tokens - 1), step = threads / TOKENS;
    int n = thread / TOKENS;
    const Term* from = p.x.terms + static_cast<int64_t>(token) * p.units + unit_of(n / kGroups) + n % kGroups;
    Term* to = terms + thread;
    for (; n < units; n += kAhead * step, from += kAhead * kCluster * step, to += kAhead * threads) {
      Term some[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (n + step * j < units) some[j] = from[kCluster * step * j];
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (n + step * j < units)
          to[threads * j] = {(kInside ? kConstant / kMeaning.factor : kConstant) * some[j].sum,
                             some[j].scale};
    }
  };

  if (warp >= kConsumers) {
    leave_registers<kLeft>();
    if (STREAMED && warp >= kConsumers + kAdders + kCopiers) {  // carries digits
      await_all_of_cluster();
      wait_for_predecessor();
      // A thread takes so many pieces in a row from a token: of a few of a stage's units, both digits.
      constexpr int kOfToken = 2 * kGroups * kEach, kPieces = kOfToken * TOKENS * 4 / (kWarp * kCarriers);
      const int thread = threadIdx.x - kWarp * (kConsumers + kAdders + kCopiers);
      const int at = thread % 4, token = thread / 4 % TOKENS, unit = thread / 4 / TOKENS * kPieces / 2;
      const int64_t row = static_cast<int64_t>(min(token, p.tokens - 1)) * p.units;
      const int8_t* from =
        p.x.digits + 2 * kUnit * (row + unit_of(unit / kGroups) + unit % kGroups) + 16 * at;
      int8_t* to = digits + kDigits * unit + 16 * token + 4 * at;
      int slot = 0, phase = 1;
      for (int tile = first; tile < tiles; tile += stride)
        for (int n = 0; n < p.units; n += kLanes) {
          int4 four[kPieces];
#pragma unroll
          for (int i = 0; i < kPieces; ++i)
            four[i] = *reinterpret_cast<const int4*>(from + 2 * kUnit * n + kUnit * i);
          await(empty + slot, phase);
#pragma unroll
          for (int i = 0; i < kPieces; ++i) {
            int* word =
              reinterpret_cast<int*>(to + slot * kStage + kDigits * (i / 2) + 16 * TOKENS * (i % 2));
            word[0] = four[i].x, word[4 * kColumns] = four[i].y, word[8 * kColumns] = four[i].z,
            word[12 * kColumns] = four[i].w;
          }
          publish();
          __syncwarp();
          if (lane == 0) arrive(full + slot);
          if (++slot == STAGES) slot = 0, phase ^= 1;
        }
    } else if (warp >= kConsumers + kAdders) {  // copies; weights are nobody's output, so they need not wait
      const int thread = threadIdx.x - kWarp * (kConsumers + kAdders);
      Copier<kRows, kPlanesUsed, kCopiers> copier(thread);
      int slot = 0, phase = 1;
      for (int tile = first; tile < tiles; tile += stride) {
        const int matrix = matrix_of(tile);
        copier.enter(p.matrix[matrix], static_cast<int64_t>(kRows) * (tile - p.first_tile[matrix]), p.units);
        for (int n = 0; n < chunks; n += kEach) {
          await(empty + slot, phase);
#pragma unroll
          for (int j = 0; j < kEach; ++j)
            copier.copy(ring + slot * kStage + j * Chunk::kBytes, unit_of(n + j));
          arrive_with_copies(full + slot);
          if (++slot == STAGES) slot = 0, phase ^= 1;
        }
      }
      await_all_of_cluster();
    } else {  // adds what groups have summed
      await_all_of_cluster();
      wait_for_predecessor();
      const int thread = threadIdx.x - kWarp * kConsumers;
      if constexpr (!STREAMED) {
        load_terms(thread, kWarp * kAdders);
        meet<kWarp*(kConsumers + kAdders)>();
      }
      int phase = 0;
      for (int tile = first; tile < tiles; tile += stride, phase ^= 1) {
        const int matrix = matrix_of(tile);
        const int64_t row = static_cast<int64_t>(tile - p.first_tile[matrix]) * kRows + kOwn * rank;
        const int rows = static_cast<int>(min(static_cast<int64_t>(kOwn), p.matrix[matrix].rows - row));
        const float* bias = p.bias[matrix];
        float* out = p.out[matrix] + row;
        if (thread == 0) arrive_expecting(summed, 4 * kSlots * kOwn * TOKENS);
        await(summed, phase);
        for (int i = thread; i < kFragments; i += kWarp * kAdders) {
          const int token = i / (2 * kOwn) * 8 + 2 * t, at = i / kWarp % (kOwn / 16) * 16 + g;
          float sum[4];
          sum_slots(sums + i, sum);
#pragma unroll
          for (int k = 0; k < 4; ++k)
            if (at + 8 * (k / 2) < rows && token + k % 2 < p.tokens) {
              if (bias) sum[k] = __fadd_rn(sum[k], bias[row + at + 8 * (k / 2)]);
              out[(token + k % 2) * p.stride[matrix] + at + 8 * (k / 2)] = sum[k];
            }
        }
        __syncwarp();
        if (lane < kCluster && tile + stride < tiles) arrive_remote(remote(written, lane));
      }
    }
  } else {
    take_registers<kTaken>();
    const int group = __shfl_sync(kAll, warp / kGroupWarps, 0);  // the same for all, for the compiler too
    const int row = kRows / kGroupWarps * (warp % kGroupWarps) + g;
    await_all_of_cluster();
    wait_for_predecessor();
    constexpr int kAhead = 8, kThreads = kWarp * kConsumers;
    if constexpr (STREAMED) {
      load_terms(threadIdx.x, kThreads);
      meet<kThreads>();
    } else {
      // A thread holds sixteen weights in a row, four to a word; the four threads of a row make up sixteen
      // bytes of the products' depth.
      constexpr int kStep = kThreads / (4 * kColumns);  // units of all threads
      const int at = threadIdx.x % 4, column = threadIdx.x / 4 % kColumns, token = column % TOKENS;
      int n = token < p.tokens ? static_cast<int>(threadIdx.x) / (4 * kColumns) : units;
      const int64_t unit = static_cast<int64_t>(token) * p.units + unit_of(n / kGroups) + n % kGroups;
      const int8_t* from = p.x.digits + 2 * kUnit * unit + kUnit * (column / TOKENS) + 16 * at;
      int8_t* to = digits + n * kDigits + 16 * column + 4 * at;
      for (; n < units; n += kAhead * kStep) {
        int4 four[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
          if (n + kStep * j < units)
            four[j] = *reinterpret_cast<const int4*>(from + 2 * kUnit * kCluster * kStep * j);
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
          if (n + kStep * j < units) {
            int* word = reinterpret_cast<int*>(to + kStep * kDigits * j);
            word[0] = four[j].x, word[4 * kColumns] = four[j].y, word[8 * kColumns] = four[j].z,
            word[12 * kColumns] = four[j].w;
          }
        from += 2 * kUnit * kCluster * kStep * kAhead, to += kStep * kDigits * kAhead;
      }
      publish();
      meet<kWarp*(kConsumers + kAdders)>();
    }

    Places places = places_of<Chunk>(row, t);
    places.base ^= 2 * kBaseBytes * group, places.planes ^= 2 * kPlaneBytes * group, places.scale += group;
    settle(places.base), settle(places.planes), settle(places.scale), settle(places.shift);
    const uint32_t digits_at =
      (static_cast<uint32_t>(__cvta_generic_to_shared(digits)) % (1 << 18) + group * kDigits) / 16;
    // In the stage so many bytes into the ring. Compilers would make these addresses anew for each unit.
    const auto places_at = [&](int stage) {
      Places here = {places.base + stage, places.planes + stage, places.scale + stage, places.shift};
      settle(here.base), settle(here.planes), settle(here.scale);
      return here;
    };

    const auto leave = [&](int slot) {
      __syncwarp();
      if (lane == 0) arrive(empty + slot);
    };

    // Weights of the next unit are unpacked while those of the last are multiplied.
    int slot = 0, stage = 0, phase = 0, sum_phase = 1;
    int left = (tiles - first + stride - 1) / stride * chunks / kEach;
    Fragment next = {};
    Places here = places_at(0);
    if (left > 0) {
      await(full, 0);
      next = load(ring, here);
    }

    for (int tile = first; tile < tiles; tile += stride, sum_phase ^= 1) {
      const float factor =
        (kInside ? kMeaning.factor : 1) * step_factor(p.matrix[matrix_of(tile)], kMeaning.shift + kSpare);
      float lanes[kEach][TOKENS / 2] = {};
      int terms_at = sizeof(Term) * (group * TOKENS + 2 * t);
      for (int n = 0; n < chunks; n += kEach) {
        const int now = slot;
        const uint32_t columns =
          digits_at + (STREAMED ? static_cast<uint32_t>(stage) / 16 : n * (kGroups * kDigits / 16));
        const auto* these = reinterpret_cast<const Term*>(reinterpret_cast<const int8_t*>(terms) + terms_at);
        terms_at += sizeof(Term) * kEach * kGroups * TOKENS, settle(terms_at);
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const Fragment a = next;
          // No branch between a product and the wait for it: there compilers forget what it still reads.
          if (j + 1 == kEach) {
            if (!STREAMED) leave(slot);
            stage += kStage;
            if (++slot == STAGES) slot = stage = 0, phase ^= 1;
            if (--left) await(full + slot, phase);
            here = places_at(stage);
          }
          int c[TOKENS];
          multiply(a, columns + j * (kGroups * kDigits / 16), c);
          next = load(ring + (j + 1) % kEach * Chunk::kBytes, here);
          add_terms(c, a, these + j * kGroups * TOKENS, factor, lanes[j]);
          if (STREAMED && j + 1 == kEach) leave(now);  // until here products read its digits
        }
      }
      const int block = warp % kGroupWarps * kCluster / kGroupWarps;  // that has these rows
      const int part =
        kFragments * (kGroups * rank + group) + kWarp * (warp % kGroupWarps % (kOwn / 16)) + lane;
      const uint32_t to = remote(sums + part, block), barrier = remote(summed, block);
      await(written, sum_phase);
#pragma unroll
      for (int m = 0; m < TOKENS / 8; ++m) {
        float sum[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] = sum_lanes<kEach>(&lanes[0][4 * m + k], TOKENS / 2);
        store_async(to + 16 * 2 * kOwn * m, sum[0], sum[1], sum[2], sum[3], barrier);
      }
    }
  }
  __syncwarp();
  arrive_at_cluster();  // nobody leaves while others reach into its memory
  await_all_of_cluster();
}
