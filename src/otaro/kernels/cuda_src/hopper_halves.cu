// Products of many tokens on Hopper's matrix units: weights become halves in registers, from where `wgmma`
// takes them, and activations in float16 come from shared memory.
//
// A weight is its code times its scale, rounded to a half: exact to E5M5, and what `decode` gives in float16.
// Sums are float32, and the matrix units run by themselves while the next unit is unpacked. Which weight an
// index of the depth stands for is free as long as both sides agree: a thread takes the sixteen weights in a
// row that its eight base bytes have, and a pair of each of four threads makes up eight indices in a row.
// Whoever made the activations may have left them so (ARRANGED), a stage of them in one piece; else they are
// copied pair by pair.
//
// A block takes COLUMNS tokens and GROUPS tiles of 64 rows, each of a group of four warps. Two more warps
// copy weights to a ring of STAGES stages, another two activations; nobody waits for anybody but through
// barriers in shared memory. Where there are few rows, SLICES blocks have a slice of the units each; their
// sums meet in scratch memory, where the block that comes last adds them, in the order of the slices.
//
// Set by the caller: BITS, TRUNCATE, COLUMNS (32, 64 or 128), GROUPS (2 to 4), STAGES, SLICES, ARRANGED, OUT
// (0 float32, 1 float16, 2 bfloat16). Units have a scale each; rows are whole stages.
#include "halves.cuh"
#include "hopper.cuh"

constexpr int kMatrices = 3, kRows = kTileRows * GROUPS, kConsumers = GROUPS * kGroupWarps;
constexpr int kCopiers = 2;  // warps for weights, and as many for activations
constexpr int kThreads = kWarp * kConsumers, kCount = kThreads + 2 * kWarp * kCopiers;
// Registers of a thread: what the launch has for each, dealt out anew.
constexpr int kTaken[] = {0, 0, 208, 144, 104}, kLeft[] = {0, 0, 88, 80, 64};
constexpr int kPlanesUsed = BITS - kCoarsest;
using AsHalves = Codes<BITS, TRUNCATE>;
using Weights = Stage<kRows, kPlanesUsed>;

// Activations of a stage: unit by unit, eights of the depth, and in these tokens. An eight has a pair of
// every quarter of a unit. Where pairs are copied, eights lie a token further apart: pairs of one then go to
// different banks.
constexpr int kEight = 16 * (COLUMNS + !ARRANGED), kUnitBytes = 8 * kEight;
constexpr int kHalves = kStageUnits * kUnitBytes, kActivationCopies = ARRANGED ? 1 : kWarp * kCopiers;
constexpr int kHalvesAt = (Weights::kBytes + 127) / 128 * 128, kStage = kHalvesAt + kHalves;
constexpr int kSums = COLUMNS / 2, kFours = kSums / 4;  // sums of a thread, and by fours
constexpr int kFragments = kFours * kThreads, kRingAt = 1024;
static_assert(16 * STAGES <= kRingAt);

using Out = Choice<OUT == 0, Float32, Choice<OUT == 1, Float16, BFloat16>::Type>::Type;
using Stored = Out::Stored;

struct WideHalves {
  Packed matrix[kMatrices];
  Stored* out[kMatrices];         // [tokens, rows]
  const float* bias[kMatrices];   // [rows], or null
  int64_t stride[kMatrices];      // of out, from token to token
  int first_tile[kMatrices + 1];  // tiles of kRows rows, numbered through the matrices
  const uint16_t* x;              // [tokens, units, 64], or [passes, units, 8, COLUMNS, 4, 2]
  const float* sizes;             // [tokens] to multiply results with, or null
  float4* scratch;                // [items, kFragments]; this and what follows: where there are slices
  int* tickets;                   // [tiles, passes], zero
  int tokens, units;
  int early;  // weights are nobody's output: their copies need not wait
};

// Bytes in a row, by the unit that copies tensors, which tells the barrier of them.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
      static_cast<uint32_t>(__cvta_generic_to_shared(to))),
    "l"(from), "r"(bytes), "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
    : "memory");
}
__device__ __forceinline__ void settle(float& value) { asm volatile("" : "+f"(value)::"memory"); }
__device__ __forceinline__ void await_all_but_one() {
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

#define A_OPERANDS "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)
#define C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define C16(i) C4(i), C4(i + 4), C4(i + 8), C4(i + 12)
// Adds 64 rows of sixteen halves times columns of sixteen to c.
__device__ __forceinline__ void multiply_async(float (&c)[16], uint32_t a0, uint32_t a1, uint32_t a2,
                                               uint32_t a3, uint64_t b) {
  asm volatile(
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
    "%10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
    : C16(0)
    : A_OPERANDS);
}
__device__ __forceinline__ void multiply_async(float (&c)[32], uint32_t a0, uint32_t a1, uint32_t a2,
                                               uint32_t a3, uint64_t b) {
  asm volatile(
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
    "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, "
    "%29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
    : C16(0), C16(16)
    : A_OPERANDS);
}
__device__ __forceinline__ void multiply_async(float (&c)[64], uint32_t a0, uint32_t a1, uint32_t a2,
                                               uint32_t a3, uint64_t b) {
  asm volatile(
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
    "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, "
    "%29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, "
    "%66, %67}, %68, 1, 1, 1, 0;"
    : C16(0), C16(16), C16(32), C16(48)
    : A_OPERANDS);
}

// What a thread has of a unit: of the rows g and g + 8 of its warp's sixteen, as halves.
struct Fragment {
  uint32_t a[2][kQuads][2];
};

__device__ __forceinline__ Fragment load(const int8_t* stage, const Places& at, int unit) {
  Fragment fragment;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 8 * r;
    const int2 two =
      *reinterpret_cast<const int2*>(stage + (at.base ^ 2 * kBaseBytes * unit) + kBasePitch * row);
    const uint32_t base[2] = {static_cast<uint32_t>(two.x), static_cast<uint32_t>(two.y)};
    uint32_t planes[kPlanesUsed ? kPlanesUsed : 1];
#pragma unroll
    for (int k = 0; k < kPlanesUsed; ++k)
      planes[k] = *reinterpret_cast<const uint32_t*>(stage + (at.planes ^ 2 * kPlaneBytes * unit) +
                                                     kPlanePitch * (kRows * k + row)) >>
                  at.shift;
    const uint32_t scale = scale_halves(stage[at.scale + kStageUnits * row + unit]);
    AsHalves::weights(base, planes, scale, fragment.a[r]);
  }
  return fragment;
}

// Begins the products of a unit.
__device__ __forceinline__ void multiply(const Fragment& f, uint32_t halves, float (&c)[kSums]) {
  const uint64_t b = columns_at<kEight / 16>(halves);
  begin_products();
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad)
    multiply_async(c, f.a[0][quad][0], f.a[1][quad][0], f.a[0][quad][1], f.a[1][quad][1],
                   b + 2 * kEight / 16 * quad);
  commit_products();
}

// What a block does between two ends of a sum: some stages of a tile's rows, with a pass of the tokens.
struct Item {
  int matrix, pass, stage, end;
  int64_t first_row;
};

__device__ __forceinline__ Item item_of(const WideHalves& p, int number, int passes) {
  const int slice = number % SLICES, pass = number / SLICES % passes, tile = number / SLICES / passes;
  const int stages = p.units / kStageUnits;
  int matrix = 0;
#pragma unroll
  for (int i = 1; i < kMatrices; ++i) matrix += tile >= p.first_tile[i];
  return {matrix, pass, stages * slice / SLICES, stages * (slice + 1) / SLICES,
          static_cast<int64_t>(kRows) * (tile - p.first_tile[matrix])};
}

extern "C" __global__ void __launch_bounds__(kCount, 1) wide_halves(const __grid_constant__ WideHalves p) {
  extern __shared__ int4 buffer[];
  __shared__ bool comes_last;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, t = lane % 4, g = lane / 4;
  const int passes = (p.tokens + COLUMNS - 1) / COLUMNS, items = p.first_tile[kMatrices] * passes * SLICES;
  uint64_t* full = reinterpret_cast<uint64_t*>(buffer);
  uint64_t* empty = full + STAGES;
  int8_t* ring = reinterpret_cast<int8_t*>(buffer) + kRingAt;

  let_successor_start();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
      begin_barrier(full + s, kWarp * kCopiers + kActivationCopies), begin_barrier(empty + s, kConsumers);
    publish_barriers();
  }
  __syncthreads();

  if (warp >= kConsumers) {
    leave_registers<kLeft[GROUPS]>();
    int slot = 0, phase = 1;
    if (warp < kConsumers + kCopiers) {  // copies weights
      if (!p.early) wait_for_predecessor();
      Copier<kRows, kPlanesUsed, kCopiers> copier(threadIdx.x - kThreads);
      for (int number = blockIdx.x; number < items; number += gridDim.x) {
        const Item item = item_of(p, number, passes);
        copier.enter(p.matrix[item.matrix], item.first_row, p.units);
        for (int s = item.stage; s < item.end; ++s) {
          await(empty + slot, phase);
          copier.copy(ring + slot * kStage, kStageUnits * s);
          arrive_with_copies(full + slot);
          if (++slot == STAGES) slot = 0, phase ^= 1;
        }
      }
    } else if (!ARRANGED || (warp == kConsumers + kCopiers && lane == 0)) {  // copies activations
      wait_for_predecessor();
      const int first = warp - kConsumers - kCopiers;  // token
      const int64_t token_bytes = static_cast<int64_t>(2 * kUnit) * p.units;
      for (int number = blockIdx.x; number < items; number += gridDim.x) {
        const Item item = item_of(p, number, passes);
        const int tokens = min(COLUMNS, p.tokens - COLUMNS * item.pass);
        const int8_t* x = reinterpret_cast<const int8_t*>(p.x) + COLUMNS * item.pass * token_bytes;
        for (int s = item.stage; s < item.end; ++s) {
          int8_t* to = ring + slot * kStage + kHalvesAt;
          await(empty + slot, phase);
          if constexpr (ARRANGED) {
            arrive_expecting(full + slot, kHalves);
            copy_bulk(to, x + static_cast<int64_t>(kHalves) * s, kHalves, full + slot);
          } else {
            const int8_t* from = x + first * token_bytes + 2 * kUnit * kStageUnits * s + 4 * lane;
            to += 16 * first + kEight * (lane % 8) + 4 * (lane / 8);
#pragma unroll 8
            for (int token = first; token < tokens; token += kCopiers) {
#pragma unroll
              for (int unit = 0; unit < kStageUnits; ++unit)
                copy_piece<4>(to + kUnitBytes * unit, from + 2 * kUnit * unit);
              to += 16 * kCopiers, from += kCopiers * token_bytes;
            }
            arrive_with_copies(full + slot);
          }
          if (++slot == STAGES) slot = 0, phase ^= 1;
        }
      }
    }
    return;
  }

  take_registers<kTaken[GROUPS]>();
  const int row = kTileRows * (warp / kGroupWarps) + kTileRows / kGroupWarps * (warp % kGroupWarps) + g;
  Places places = places_of<Weights>(row, t);
  settle(places.base), settle(places.planes), settle(places.scale), settle(places.shift);
  const uint32_t halves_at =
    (static_cast<uint32_t>(__cvta_generic_to_shared(ring)) % (1 << 18) + kHalvesAt) / 16;
  int left = 0;  // stages
  for (int number = blockIdx.x; number < items; number += gridDim.x) {
    const Item item = item_of(p, number, passes);
    left += item.end - item.stage;
  }

  // Weights of the next unit are unpacked while those of the last are multiplied.
  int slot = 0, phase = 0;
  Fragment next = {};
  if (left) {
    await(full, 0);
    next = load(ring, places, 0);
  }
  for (int number = blockIdx.x; number < items; number += gridDim.x) {
    const Item item = item_of(p, number, passes);
    float sums[kSums] = {};
    for (int s = item.stage; s < item.end; ++s) {
      const int now = slot;
      if (!ARRANGED) publish();  // activations were not copied by the unit that reads them
#pragma unroll
      for (int unit = 0; unit < kStageUnits; ++unit) {
        const Fragment f = next;
        // No branch while products run: there compilers forget what these still read.
        if (unit + 1 == kStageUnits) {
          await_products();
          if (++slot == STAGES) slot = 0, phase ^= 1;
          if (--left) await(full + slot, phase);
        }
        multiply(f, halves_at + (now * kStage + unit * kUnitBytes) / 16, sums);
        await_all_but_one();
        next = load(ring + slot * kStage, places, (unit + 1) % kStageUnits);
      }
      await_products();
#pragma unroll
      for (int i = 0; i < kSums; ++i) settle(sums[i]);
      __syncwarp();
      if (lane == 0) arrive(empty + now);
    }

    wait_for_predecessor();
    if constexpr (SLICES > 1) {
      float4* scratch = p.scratch + static_cast<int64_t>(number) * kFragments + threadIdx.x;
#pragma unroll
      for (int i = 0; i < kFours; ++i)
        scratch[kThreads * i] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
      meet<kThreads>();
      if (threadIdx.x == 0) {  // its fences are for all that met it
        int* ticket = p.tickets + number / SLICES;
        __threadfence();
        comes_last = atomicAdd(ticket, 1) == SLICES - 1;
        if (comes_last) *ticket = 0;
        __threadfence();
      }
      meet<kThreads>();
      if (!comes_last) continue;
      scratch -= static_cast<int64_t>(number % SLICES) * kFragments;
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
#pragma unroll
      for (int slice = 0; slice < SLICES; ++slice)
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
          const float4 four = __ldcg(scratch + kFragments * slice + kThreads * i);
          sums[4 * i] += four.x, sums[4 * i + 1] += four.y, sums[4 * i + 2] += four.z,
            sums[4 * i + 3] += four.w;
        }
    }
    const Packed& matrix = p.matrix[item.matrix];
    const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), matrix.rows - item.first_row));
    const float factor = power_of_two(matrix.scale_exponent - AsHalves::kShift - kScaleShift);
    float bias[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (p.bias[item.matrix] && row + 8 * r < rows)
        bias[r] = p.bias[item.matrix][item.first_row + row + 8 * r];
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int token = COLUMNS * item.pass + i / 4 * 8 + 2 * t + i % 2, r = i % 4 / 2;
      if (token >= p.tokens || row + 8 * r >= rows) continue;
      p.out[item.matrix][token * p.stride[item.matrix] + item.first_row + row + 8 * r] =
        Out::store(sums[i] * (p.sizes ? p.sizes[token] * factor : factor) + bias[r]);
    }
  }
}
