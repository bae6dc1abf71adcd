// Products of many tokens with packed rows: codes become halves in registers, and the tensor cores multiply
// them with activations in float16.
//
// A code is a small integer, which a half holds exactly. A unit's four `mma` sum up in float32 from zero, and
// one product with the row's step adds that to the row's sum: rounded are the activations, before, and sums
// in float32. Which weight an index of the depth stands for is free as long as both sides agree: a thread
// takes the sixteen weights in a row that its eight base bytes have, and the sixteen activations there are 32
// bytes of a token.
//
// A block takes COLUMNS tokens and 32 GROUPS rows; PARTS warps have the same 32 rows, and every PARTS-th unit
// of them. Weights and activations pass through a ring of STAGES stages of UNITS units each. Where there are
// few rows, SLICES blocks have a slice of the units each; their sums meet in scratch memory, where the block
// that comes last adds them, in the order of the slices.
//
// Set by the caller: BITS, TRUNCATE, UNITS_PER_GROUP, COLUMNS (a multiple of 16), GROUPS, PARTS, UNITS (2 or
// 4), STAGES (at least 2), SLICES, RAGGED (rows are not whole stages), PLANE_COPY (bytes that planes are
// copied by: 16, 8 or 4), SCALE_WORDS (scales of a stage are a word), OUT (0 float32, 1 float16, 2 bfloat16).
#include "halves.cuh"

constexpr int kMatrices = 3, kUnit = 64, kGroupRows = 32, kRows = kGroupRows * GROUPS;
constexpr int kCount = kWarp * GROUPS * PARTS, kTiles = COLUMNS / 8, kQuads = 4;
constexpr int kPlanesUsed = BITS - kCoarsest;
using AsHalves = Codes<BITS, TRUNCATE>;

// A stage: base bytes, planes and scales of kRows rows, and activations, unit by unit.
constexpr int kBasePieces = 2 * UNITS, kBasePitch = 16 * kBasePieces, kPlanePitch = 8 * UNITS;
constexpr int kPlanesAt = kRows * kBasePitch, kScalesAt = kPlanesAt + kPlanesUsed * kRows * kPlanePitch;
constexpr int kHalvesAt = kScalesAt + kRows * UNITS, kTokenBytes = 2 * kUnit;
constexpr int kStage = kHalvesAt + UNITS * COLUMNS * kTokenBytes;
constexpr int kBaseTogether = kCount / kBasePieces;  // rows that threads copy of at a time
constexpr int kPlanePieces = kPlanePitch / PLANE_COPY, kPlaneTogether = kCount / kPlanePieces;
constexpr int kHalfPieces = 8 * UNITS, kHalfTogether = kCount / kHalfPieces;  // of tokens
// Sums of a thread, by fours: of eight tokens and two rows. Those of a block lie warp by warp.
constexpr int kFours = 2 * kTiles, kFragments = kFours * GROUPS * kWarp;
static_assert(!SCALE_WORDS || (UNITS == 4 && UNITS_PER_GROUP == 1));

// Where bytes of a row lie in a stage depends on the row, so that threads of a warp read from different
// banks.
__device__ __forceinline__ int base_at(int row, int unit) {
  return kBasePitch * row + 32 * (unit ^ (UNITS == 4 ? row : row / 2) % UNITS);
}
__device__ __forceinline__ int plane_at(int row, int byte) {
  return kPlanePitch * row + (byte ^ (UNITS == 4 ? 16 * (row / 4 % 2) : 0));
}
// The sixteens of odd tokens are swapped in pairs.
__device__ __forceinline__ int halves_at(int unit, int token, int piece) {
  return kTokenBytes * (COLUMNS * unit + token) + 16 * (piece ^ token % 2);
}

using Out = Choice<OUT == 0, Float32, Choice<OUT == 1, Float16, BFloat16>::Type>::Type;
using Stored = Out::Stored;

struct Halves {
  Packed matrix[kMatrices];
  Stored* out[kMatrices];         // [tokens, rows]
  const float* bias[kMatrices];   // [rows], or null
  int64_t stride[kMatrices];      // of out, from token to token
  int first_tile[kMatrices + 1];  // tiles of kRows rows, numbered through the matrices
  const uint16_t* x;              // [tokens, 8 pieces]
  const float* sizes;             // [tokens] to multiply results with, or null
  float4* scratch;                // [items, kFragments]; this and what follows: where there are slices
  int* tickets;                   // [tiles, passes], zero
  int tokens, blocks, units, groups, pieces;
  int early;  // weights are nobody's output: their copies need not wait
};

// To an address in shared memory.
template <int Bytes>
__device__ __forceinline__ void copy_to(uint32_t to, const void* from) {
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(Bytes)
                 : "memory");
}
// Sixteen bytes, or zeros where there are none.
__device__ __forceinline__ void copy_or_clear(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Stages>
__device__ __forceinline__ void wait_for_stage() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Stages) : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
  asm(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
    "%1, %2, %3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A thread's sixteen weights of a unit, of four rows: of two tiles of 16, rows g and g + 8.
struct Fragment {
  uint32_t a[2][2][kQuads][2];
  int scale[2][2];
};

__device__ __forceinline__ Fragment load(const int8_t* stage, int first, int unit) {
  const int t = threadIdx.x % 4;
  Fragment made;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + 16 * i + 8 * r;
      const int2 two = *reinterpret_cast<const int2*>(stage + base_at(row, unit) + 8 * t);
      const uint32_t base[2] = {static_cast<uint32_t>(two.x), static_cast<uint32_t>(two.y)};
      uint32_t planes[kPlanesUsed ? kPlanesUsed : 1];
#pragma unroll
      for (int k = 0; k < kPlanesUsed; ++k)
        planes[k] = *reinterpret_cast<const uint32_t*>(stage + kPlanesAt + kPlanePitch * kRows * k +
                                                       plane_at(row, 8 * unit + 4 * (t / 2))) >>
                    (t % 2 * 4);
      made.scale[i][r] = stage[kScalesAt + UNITS * row + unit];
      AsHalves::codes(base, planes, made.a[i][r]);
    }
  return made;
}

// Adds the products of a unit; `halves` are this thread's of the first eight tokens.
__device__ __forceinline__ void compute(const Fragment& weights, const int8_t* halves, float factor,
                                        float (&sums)[kFours][4]) {
  const int odd = threadIdx.x / 4 % 2;
  float steps[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) steps[i / 2][i % 2] = step_of(weights.scale[i / 2][i % 2], factor);
#pragma unroll
  for (int m = 0; m < kTiles; m += 2) {
    uint32_t b[2][2 * kQuads];
    float c[2][2][4] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int4 four = *reinterpret_cast<const int4*>(halves + 8 * kTokenBytes * (m + j) + 16 * (h ^ odd));
        b[j][4 * h] = four.x, b[j][4 * h + 1] = four.y, b[j][4 * h + 2] = four.z, b[j][4 * h + 3] = four.w;
      }
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          multiply(c[j][i], weights.a[i][0][quad][0], weights.a[i][1][quad][0], weights.a[i][0][quad][1],
                   weights.a[i][1][quad][1], b[j][2 * quad], b[j][2 * quad + 1]);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) sums[kTiles * i + m + j][k] += steps[i][k / 2] * c[j][i][k];
  }
}

// What a block does between two ends of a sum: some stages of a tile's rows, with a pass of the tokens.
struct Item {
  int matrix, rows, pass, stage, end;
  int64_t first_row;
};

__device__ __forceinline__ Item item_of(const Halves& p, int number, int passes) {
  const int slice = number % SLICES, pass = number / SLICES % passes, tile = number / SLICES / passes;
  const int64_t stages = (p.units + UNITS - 1) / UNITS;
  int matrix = 0;
#pragma unroll
  for (int i = 1; i < kMatrices; ++i) matrix += tile >= p.first_tile[i];
  const int64_t first_row = static_cast<int64_t>(kRows) * (tile - p.first_tile[matrix]);
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), p.matrix[matrix].rows - first_row));
  return {matrix,
          rows,
          pass,
          static_cast<int>(stages * slice / SLICES),
          static_cast<int>(stages * (slice + 1) / SLICES),
          first_row};
}

// Fills the ring, stage after stage, item after item: where a thread's first piece of each kind comes from.
struct Copier {
  const Halves& p;
  const int passes, items;
  int number;  // of the item
  Item item;
  const int8_t *base, *x;
  int64_t plane, scale;

  __device__ __forceinline__ Copier(const Halves& p, int passes, int items)
    : p(p), passes(passes), items(items), number(blockIdx.x) {
    enter();
  }
  __device__ __forceinline__ bool more() const { return number < items; }

  __device__ __forceinline__ void enter() {
    const int thread = static_cast<int>(threadIdx.x);
    item = item_of(p, number, passes);
    const int64_t block = kBasePieces * item.stage;
    base = reinterpret_cast<const int8_t*>(p.matrix[item.matrix].base) +
           kBaseBytes * ((item.first_row + thread / kBasePieces) * p.blocks + block + thread % kBasePieces);
    plane = (item.first_row + thread / kPlanePieces) * p.blocks + block +
            thread % kPlanePieces * (PLANE_COPY / kPlaneBytes);
    scale = (item.first_row + thread) * p.groups;
    x = reinterpret_cast<const int8_t*>(p.x) +
        16 * (static_cast<int64_t>(COLUMNS * item.pass + thread / kHalfPieces) * p.pieces +
              kHalfPieces * item.stage + thread % kHalfPieces);
  }

  __device__ __forceinline__ void advance() {
    base += kBaseBytes * kBasePieces, plane += kBasePieces, x += 16 * kHalfPieces;
    if (++item.stage == item.end && (number += gridDim.x) < items) enter();
  }

  __device__ __forceinline__ void copy_weights(int8_t* stage) const {
    const Packed& weights = p.matrix[item.matrix];
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(stage));
    const int thread = static_cast<int>(threadIdx.x);
    {
      const int first = thread / kBasePieces, piece = thread % kBasePieces;
      const bool there = !RAGGED || kBasePieces * item.stage + piece < p.blocks;
#pragma unroll
      for (int i = 0; i < kRows; i += kBaseTogether)
        if (there && first + i < item.rows)
          copy_to<16>(to + base_at(first + i, piece / 2) + 16 * (piece % 2),
                      base + static_cast<int64_t>(i) * kBaseBytes * p.blocks);
    }
    if constexpr (kPlanesUsed > 0) {
      const int first = thread / kPlanePieces, piece = thread % kPlanePieces * PLANE_COPY;
      const bool there = !RAGGED || kBasePieces * item.stage + piece / kPlaneBytes < p.blocks;
#pragma unroll
      for (int i = 0; i < kRows; i += kPlaneTogether)
        if (there && first + i < item.rows) {
#pragma unroll
          for (int k = 0; k < kPlanesUsed; ++k)
            copy_to<PLANE_COPY>(to + kPlanesAt + kPlanePitch * kRows * k + plane_at(first + i, piece),
                                weights.planes[k] + plane + static_cast<int64_t>(i) * p.blocks);
        }
    }
    if (thread >= item.rows) return;
    const int at = kScalesAt + UNITS * thread;
    if constexpr (SCALE_WORDS) {
      copy_to<4>(to + at, weights.scales + scale + UNITS * item.stage);
    } else {
#pragma unroll
      for (int i = 0; i < UNITS; ++i) {
        const int unit = UNITS * item.stage + i;
        if (!RAGGED || unit < p.units) stage[at + i] = __ldg(weights.scales + scale + unit / UNITS_PER_GROUP);
      }
    }
  }

  __device__ __forceinline__ void copy_activations(const int8_t* stage) const {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(stage)) + kHalvesAt;
    const int at = static_cast<int>(threadIdx.x) % kHalfPieces, left = p.tokens - COLUMNS * item.pass;
    const bool there = !RAGGED || kHalfPieces * item.stage + at < p.pieces;
#pragma unroll
    for (int i = 0; i < COLUMNS; i += kHalfTogether) {
      const int token = static_cast<int>(threadIdx.x) / kHalfPieces + i;
      if ((COLUMNS % kHalfTogether && token >= COLUMNS) || token >= left) continue;
      const int8_t* from = x + static_cast<int64_t>(i) * 16 * p.pieces;
      if constexpr (RAGGED)
        copy_or_clear(to + halves_at(at / 8, token, at % 8), there ? from : x, there);
      else
        copy_to<16>(to + halves_at(at / 8, token, at % 8), from);
    }
  }
};

__device__ __forceinline__ void store_fours(const float (&sums)[kFours][4], float4* to) {
#pragma unroll
  for (int i = 0; i < kFours; ++i)
    to[GROUPS * kWarp * i] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
}
template <bool Shared>
__device__ __forceinline__ void add_fours(float (&sums)[kFours][4], const float4* from) {
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const float4* at = from + GROUPS * kWarp * i;
    const float4 four = Shared ? *at : __ldcg(at);
    sums[i][0] += four.x, sums[i][1] += four.y, sums[i][2] += four.z, sums[i][3] += four.w;
  }
}

extern "C" __global__ void __launch_bounds__(kCount, 1) halves(const __grid_constant__ Halves p) {
  extern __shared__ int4 buffer[];
  __shared__ bool comes_last;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, t = lane % 4, g = lane / 4;
  const int group = warp % GROUPS, part = warp / GROUPS, first = kGroupRows * group + g;
  const int passes = (p.tokens + COLUMNS - 1) / COLUMNS, items = p.first_tile[kMatrices] * passes * SLICES;
  int8_t* ring = reinterpret_cast<int8_t*>(buffer);
  float4* apart = reinterpret_cast<float4*>(ring + STAGES * kStage);  // [PARTS - 1, kFragments]
  let_successor_start();

  Copier copier(p, passes, items);
  if (p.early) copier.copy_weights(ring);
  wait_for_predecessor();
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; ++s) {
    if (copier.more()) {
      if (s || !p.early) copier.copy_weights(ring + s * kStage);
      copier.copy_activations(ring + s * kStage);
      copier.advance();
    }
    end_stage();
  }

  int slot = 0;
  for (int number = blockIdx.x; number < items; number += gridDim.x) {
    const Item item = item_of(p, number, passes);
    const float factor = step_factor(p.matrix[item.matrix], AsHalves::kShift);
    float sums[kFours][4] = {};
    for (int s = item.stage; s < item.end; ++s) {
      wait_for_stage<STAGES - 2>();
      __syncthreads();
      if (copier.more()) {  // into what was read last
        int8_t* next = ring + (slot ? slot - 1 : STAGES - 1) * kStage;
        copier.copy_weights(next);
        copier.copy_activations(next);
        copier.advance();
      }
      end_stage();
      const int8_t* stage = ring + slot * kStage;
      const int8_t* tokens = stage + kHalvesAt + kTokenBytes * g + 32 * t;
#pragma unroll(COLUMNS > 32 ? 1 : 2)  // more take registers that 64 tokens do not leave
      for (int i = 0; i < UNITS; i += PARTS) {
        const int unit = i + part;
        if (RAGGED && UNITS * s + unit >= p.units) break;
        compute(load(stage, first, unit), tokens + kTokenBytes * COLUMNS * unit, factor, sums);
      }
      slot = slot + 1 == STAGES ? 0 : slot + 1;
    }

    const int at = kWarp * group + lane;  // of this thread's first four
    if constexpr (PARTS > 1) {
      if (part) store_fours(sums, apart + kFragments * (part - 1) + at);
      __syncthreads();
      if (!part)
#pragma unroll
        for (int i = 0; i < PARTS - 1; ++i) add_fours<true>(sums, apart + kFragments * i + at);
    }
    if constexpr (SLICES > 1) {
      float4* scratch = p.scratch + static_cast<int64_t>(number) * kFragments + at;
      if (!part) store_fours(sums, scratch);
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        int* ticket = p.tickets + number / SLICES;
        comes_last = atomicAdd(ticket, 1) == SLICES - 1;
        if (comes_last) *ticket = 0;
      }
      __syncthreads();
      if (!comes_last) continue;
      __threadfence();
      scratch -= static_cast<int64_t>(number % SLICES) * kFragments;
#pragma unroll
      for (int i = 0; i < 4 * kFours; ++i) sums[i / 4][i % 4] = 0.0f;
      if (!part)
#pragma unroll
        for (int i = 0; i < SLICES; ++i) add_fours<false>(sums, scratch + kFragments * i);
    }
    if (part) continue;
    float bias[4] = {};  // of this thread's rows
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (p.bias[item.matrix] && first + 8 * i < item.rows)
        bias[i] = p.bias[item.matrix][item.first_row + first + 8 * i];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int token = COLUMNS * item.pass + 8 * m + 2 * t + j;
        if (token >= p.tokens) continue;
        const float size = p.sizes ? p.sizes[token] : 1.0f;
        Stored* out = p.out[item.matrix] + token * p.stride[item.matrix] + item.first_row + first;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (first + 8 * i < item.rows)
            out[8 * i] = Out::store(sums[kTiles * (i / 2) + m][i % 2 * 2 + j] * size + bias[i]);
      }
  }
}
