// Products of several tokens with packed rows on Hopper's matrix units (`wgmma`, compute capability 9.0).
//
// Four groups of four warps multiply 64 rows each: weights are unpacked into registers, where the instruction
// takes them from, and the digits of activations stay in shared memory for good, where it takes those from,
// 2 TOKENS columns at once: high digits, then low ones. Which weight a byte stands for is free as long as
// both sides agree, so a thread unpacks the bytes it happens to load, and activations lie accordingly.
//
// A cluster of two blocks shares 64 rows: of the sixteen lanes, dealt out in chunks of four neighbours, each
// block takes every second chunk, and of a chunk each group of warps one lane. Two warps copy weights to a
// ring of STAGES stages, each of two chunks of 64 rows; nobody waits for anybody but through barriers in
// shared memory. At the rows' end groups leave their sums in the shared memory of the block that has this
// half of the rows, where two more warps add them and write, while they go on. The order of a sum is that of
// ../reference.py, step 4, whoever takes it.
//
// Set by the caller: BITS, TRUNCATE, TOKENS (8 or 16), STAGES. Units are 64 weights and have a scale
// each; rows are whole sixteens of them.
#include "hopper.cuh"

constexpr int kMatrices = 3, kGroups = 4, kConsumers = kGroups * kGroupWarps;
constexpr int kCopiers = 2, kAdders = 2;  // warps, besides
constexpr int kCount = kWarp * (kConsumers + kCopiers + kAdders), kRows = kTileRows, kChunk = kStageUnits;
constexpr int kCluster = 2, kEach = kGroups / kCluster;              // lanes of a group: `kSlots` apart
constexpr int kSlots = kGroups * kCluster, kOwn = kRows / kCluster;  // sums and rows that a block adds
constexpr int kPlanesUsed = BITS - kCoarsest;
constexpr int kSpare = BITS == 8 ? 0 : 7 - BITS;  // zeros below u in its byte
constexpr Meaning kMeaning = meaning(BITS, TRUNCATE);
constexpr int kConstant = kMeaning.constant * (1 << kSpare);
// Where the constant is a multiple of the factor, the factor is left to the scale.
constexpr bool kInside = kConstant % kMeaning.factor == 0;

using Chunk = Stage<kRows, kPlanesUsed>;
constexpr int kStage = kEach * Chunk::kBytes;
constexpr int kColumns = 2 * TOKENS, kDigits = kUnit * kColumns;  // bytes of a unit
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

// What a thread has of a unit: of the rows g and g + 8 of its warp's sixteen, unpacked.
struct Fragment {
  uint32_t u[2][kQuads], last[2][kQuads];
  int scale[2];
};

__device__ __forceinline__ Fragment load(const int8_t* stage, const Places& at) {
  Fragment fragment;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 8 * r;
    const int2 two = *reinterpret_cast<const int2*>(stage + at.base + kBasePitch * row);
    const uint32_t base[2] = {static_cast<uint32_t>(two.x), static_cast<uint32_t>(two.y)};
    uint32_t planes[kPlanesUsed ? kPlanesUsed : 1];
#pragma unroll
    for (int k = 0; k < kPlanesUsed; ++k)
      planes[k] =
        *reinterpret_cast<const uint32_t*>(stage + at.planes + kPlanePitch * (kRows * k + row)) >> at.shift;
    fragment.scale[r] = stage[at.scale + kChunk * row];
    unpack<BITS, kQuads>(base, planes, fragment.u[r]);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      fragment.last[r][quad] = BITS == 8 ? last_bits(planes[kPlanesUsed ? kPlanesUsed - 1 : 0], quad) : 0;
      if constexpr (TRUNCATE) {
        const uint32_t raised = (~fragment.u[r][quad] & 0x80808080u) >> (BITS == 8 ? 7 : BITS);
        (BITS == 8 ? fragment.last : fragment.u)[r][quad] += raised;
      }
    }
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
    multiply_async(c, a.u[0][0], a.u[1][0], a.u[0][1], a.u[1][1], b, turn);
    multiply_async(c, a.u[0][2], a.u[1][2], a.u[0][3], a.u[1][3], b + kHalf, 1);
  }
  if constexpr (BITS == 8) {
    multiply_async(c, a.last[0][0], a.last[1][0], a.last[0][1], a.last[1][1], b, 1);
    multiply_async(c, a.last[0][2], a.last[1][2], a.last[0][3], a.last[1][3], b + kHalf, 1);
  }
  commit_products();
}

// Ends them, and adds their terms to a lane.
__device__ __forceinline__ void add_terms(int (&c)[TOKENS], const Fragment& a, const Term* terms,
                                          float factor, float (&lane)[TOKENS / 2]) {
  const float steps[2] = {step_of(a.scale[0], factor), step_of(a.scale[1], factor)};
  await_products();
#pragma unroll
  for (int i = 0; i < 2 * kQuads; ++i) {
    hold(a.u[i / kQuads][i % kQuads]);
    if (BITS == 8) hold(a.last[i / kQuads][i % kQuads]);
  }
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) settle(c[i]);
#pragma unroll
  for (int m = 0; m < TOKENS / 8; ++m) {
    const int4 both = *reinterpret_cast<const int4*>(terms + 8 * m);  // of this thread's two tokens
    const int constants[2] = {both.x, both.z};
    const float scales[2] = {__int_as_float(both.y), __int_as_float(both.w)};
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
  int8_t* digits = ring + STAGES * kStage;                                      // [chunks, groups]
  Term* terms = reinterpret_cast<Term*>(digits + chunks * kGroups * kDigits);   // [.., .., TOKENS]
  float4* sums = reinterpret_cast<float4*>(terms + chunks * kGroups * TOKENS);  // [kSlots, kFragments]

  let_successor_start();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
      begin_barrier(full + s, kWarp * kCopiers), begin_barrier(empty + s, kConsumers);
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
  const auto unit_of = [&](int n) { return kLanes * (n / kEach) + kChunk * (rank + kCluster * (n % kEach)); };

  if (warp >= kConsumers) {
    leave_registers<64>();
    if (warp >= kConsumers + kAdders) {  // copies; weights are nobody's output, so they need not wait
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
#pragma unroll 4
      for (int i = thread; i < chunks * kGroups * TOKENS; i += kWarp * kAdders) {
        const int token = i % TOKENS, n = i / TOKENS, unit = unit_of(n / kGroups) + n % kGroups;
        const Term term = p.x.terms[static_cast<int64_t>(min(token, p.tokens - 1)) * p.units + unit];
        terms[i] = {(kInside ? kConstant / kMeaning.factor : kConstant) * term.sum, term.scale};
      }
      meet<kWarp*(kConsumers + kAdders)>();
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
    take_registers<104>();
    const int group = __shfl_sync(kAll, warp / kGroupWarps, 0);  // the same for all, for the compiler too
    const int row = kRows / kGroupWarps * (warp % kGroupWarps) + g;
    await_all_of_cluster();
    wait_for_predecessor();
    // A thread holds sixteen weights in a row, four to a word; the four threads of a row make up sixteen
    // bytes of the products' depth.
    constexpr int kAhead = 8, kThreads = kWarp * kConsumers;
    const int pieces = chunks * kGroups * kColumns * 4;
    for (int i = threadIdx.x; i < pieces; i += kAhead * kThreads) {
      int4 four[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int piece = i + kThreads * j, at = piece % 4, token = piece / 4 % TOKENS;
        const int digit = piece / 4 / TOKENS % 2, n = piece / 4 / kColumns;
        const int unit = unit_of(n / kGroups) + n % kGroups;
        if (piece < pieces && token < p.tokens)
          four[j] = *reinterpret_cast<const int4*>(
            p.x.digits + 2 * kUnit * (static_cast<int64_t>(token) * p.units + unit) + kUnit * digit +
            16 * at);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int piece = i + kThreads * j, column = piece / 4 % kColumns, n = piece / 4 / kColumns;
        int* to = reinterpret_cast<int*>(digits + n * kDigits + 16 * column) + piece % 4;
        if (piece < pieces && column % TOKENS < p.tokens)
          to[0] = four[j].x, to[4 * kColumns] = four[j].y, to[8 * kColumns] = four[j].z,
          to[12 * kColumns] = four[j].w;
      }
    }
    publish();
    meet<kWarp*(kConsumers + kAdders)>();

    Places places = places_of<Chunk>(row, t);
    places.base ^= 2 * kBaseBytes * group, places.planes ^= 2 * kPlaneBytes * group, places.scale += group;
    settle(places.base), settle(places.planes), settle(places.scale), settle(places.shift);
    const uint32_t digits_at =
      (static_cast<uint32_t>(__cvta_generic_to_shared(digits)) % (1 << 18) + group * kDigits) / 16;
    const Term* terms_at = terms + group * TOKENS + 2 * t;

    // Weights of the next unit are unpacked while those of the last are multiplied.
    int slot = 0, phase = 0, sum_phase = 1, left = (tiles - first + stride - 1) / stride * chunks / kEach;
    Fragment next = {};
    if (left > 0) {
      await(full, 0);
      next = load(ring, places);
    }

    for (int tile = first; tile < tiles; tile += stride, sum_phase ^= 1) {
      const float factor =
        (kInside ? kMeaning.factor : 1) * step_factor(p.matrix[matrix_of(tile)], kMeaning.shift + kSpare);
      float lanes[kEach][TOKENS / 2] = {};
      for (int n = 0; n < chunks; n += kEach) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const int at = (n + j) * kGroups;
          const Fragment a = next;
          // No branch between a product and the wait for it: there compilers forget what it still reads.
          if (j + 1 == kEach) {
            __syncwarp();
            if (lane == 0) arrive(empty + slot);
            if (++slot == STAGES) slot = 0, phase ^= 1;
            if (--left) await(full + slot, phase);
          }
          int c[TOKENS];
          multiply(a, digits_at + at * (kDigits / 16), c);
          next = load(ring + slot * kStage + (j + 1) % kEach * Chunk::kBytes, places);
          add_terms(c, a, terms_at + at * TOKENS, factor, lanes[j]);
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
