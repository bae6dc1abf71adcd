// Products of several tokens with packed rows, straight from the planes, on the integer units of the tensor
// cores.
//
// One `mma` multiplies 16 rows of 32 bytes with eight columns: eight tokens, first the high digits of a unit,
// then, upon 256 times their sum, the low ones. Every weight is read and unpacked once, and meets COLUMNS
// tokens.
//
// A block keeps activations in shared memory for good: all of them, or, where that is too much, those of a
// slice of the sixteen lanes. Chunks of CHUNK neighbouring lanes are dealt out to SLICES slices in turns. A
// warp has one lane of its slice, of TILES times 16 rows. Weights pass through a ring of STAGES stages, each
// the slice's lanes of STEPS times sixteen units: copies run along the rows, whoever needs them, as loads
// that touch many rows at once keep the memory waiting.
//
// At the rows' end lanes meet in shared memory as far as one slice has them, the rest in scratch memory,
// where the block that comes last takes the sum. The order of a sum is that of ../reference.py, step 4,
// whoever takes it.
//
// Set by the caller: BITS, TRUNCATE, UNIT_BLOCKS, UNITS_PER_GROUP, COLUMNS (a multiple of 8), CHUNK, SLICES,
// GROUPS (of warps with all lanes of the slice), TILES, STAGES (at least 2), STEPS, RAGGED (rows are not a
// multiple of 16 STEPS units), PLANE_COPY (bytes that planes are copied by: 16, 8 or 4), BLOCKS (that are to
// fit a multiprocessor).
#include "sefp.cuh"

constexpr int kMatrices = 3, kGroupRows = 16 * TILES, kRows = kGroupRows * GROUPS;
constexpr int kPitch = kRows + 4;  // so that lanes meet without conflicts
constexpr int kEach = kLanes / SLICES, kCount = kWarp * kEach * GROUPS;  // lanes of a slice, threads
constexpr int kPlanesUsed = BITS - kCoarsest, kUnit = kBlock * UNIT_BLOCKS;
constexpr int kSpare = BITS == 8 ? 0 : 7 - BITS;               // zeros below u in its byte
constexpr int kWords = UNIT_BLOCKS, kQuads = 2 * UNIT_BLOCKS;  // of a thread's quarter of a unit
constexpr int kTiles = COLUMNS / 8;
constexpr Meaning kMeaning = meaning(BITS, TRUNCATE);
constexpr int kConstant = kMeaning.constant * (1 << kSpare);
// Where the constant is a multiple of the factor, the factor is left to the scale.
constexpr bool kInside = kConstant % kMeaning.factor == 0;

// A stage: base bytes, planes and scales of kRows rows. Rows are as far apart as banks like it.
constexpr int kUnits = STEPS * kEach, kBlocks = kUnits * UNIT_BLOCKS;  // of a row
constexpr int kBasePitch = kBaseBytes * kBlocks + (kBaseBytes * kBlocks % 64 == 0 ? 32 : 0);
constexpr int kPlanePitch = kPlaneBytes * kBlocks + 16;
constexpr int kPlanesAt = kRows * kBasePitch, kScalesAt = kPlanesAt + kPlanesUsed * kRows * kPlanePitch;
constexpr int kFilled = (kScalesAt + kRows * kUnits + 15) / 16 * 16, kSums = 4 * kEach * COLUMNS * kPitch;
// Sums take the place of a stage that was read, if need be of one that is larger for it.
constexpr bool kApart = STAGES * (kSums - kFilled) > kSums;
constexpr int kStage = kApart || kSums < kFilled ? kFilled : kSums;
constexpr int kPlanePieces = kPlaneBytes * kBlocks / PLANE_COPY;  // of a row
constexpr int kBaseTurns = (kRows * kBlocks + kCount - 1) / kCount;
constexpr int kPlaneTurns = (kRows * kPlanePieces + kCount - 1) / kCount;
constexpr int kScaleTurns = (kRows * kUnits + kCount - 1) / kCount;

struct Batch {
  Packed matrix[kMatrices];
  float* out[kMatrices];          // [tokens, rows]
  const float* bias[kMatrices];   // [rows], or null
  int64_t stride[kMatrices];      // of out, from token to token
  int first_tile[kMatrices + 1];  // tiles of kRows rows, numbered through the matrices
  Activations x;
  float* scratch;  // [tiles, SLICES * CHUNK, COLUMNS, kRows]; this and what follows: where there are slices
  int* tickets;    // [tiles], zero
  int tokens, blocks, units, groups;
};

// Where copying is: of each of the thread's pieces the number of its row's first block, or group.
struct Cursor {
  int tile, step, matrix;
  uint32_t base[kBaseTurns], plane[kPlaneTurns], scale[kScaleTurns];
};

template <int Bytes>
__device__ __forceinline__ void copy_piece(void* to, const void* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(Bytes)
                 : "memory");
}
__device__ __forceinline__ void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Stages>
__device__ __forceinline__ void wait_for_stage() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Stages) : "memory");
}

__device__ __forceinline__ void multiply(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
  asm(
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
    "%2, %3};"
    : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The unit of a row that a slice has as its n-th.
__device__ __forceinline__ int unit_of(int slice, int n) {
  const int lane = n % kEach;
  return kLanes * (n / kEach) + CHUNK * (slice + SLICES * (lane / CHUNK)) + lane % CHUNK;
}

// Adds the terms of the n-th unit of a stage, of TILES times 16 rows, to a lane; `first` is this thread's
// row.
__device__ __forceinline__ void compute(const int8_t* stage, int first, int n, const int8_t* digits,
                                        const Term* terms, float factor, float (&lane)[TILES][kTiles][4]) {
  const int t = threadIdx.x % 4, g = threadIdx.x % kWarp / 4, shift = 2 * (t * kWords % kBaseWords);
  const int block = n * UNIT_BLOCKS + t * kWords / kBaseWords;  // of this thread
  uint32_t u[TILES][2][kQuads], last[TILES][2][kQuads];
  float steps[TILES][2];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + 16 * i + 8 * r;
      uint32_t base[kWords], planes[kPlanesUsed ? kPlanesUsed : 1];
      const int8_t* from = stage + kBasePitch * row + kBaseBytes * kWords / 4 * (4 * n + t);
      if constexpr (kWords == 2) {
        const int2 two = *reinterpret_cast<const int2*>(from);
        base[0] = two.x, base[1] = two.y;
      } else {
        base[0] = *reinterpret_cast<const uint32_t*>(from);
      }
#pragma unroll
      for (int k = 0; k < kPlanesUsed; ++k)
        planes[k] = *reinterpret_cast<const uint32_t*>(stage + kPlanesAt + kPlanePitch * (kRows * k + row) +
                                                       kPlaneBytes * block) >>
                    shift;
      steps[i][r] = step_of(stage[kScalesAt + kUnits * row + n], factor);
      unpack<BITS, kQuads>(base, planes, u[i][r]);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        last[i][r][quad] = BITS == 8 ? last_bits(planes[kPlanesUsed ? kPlanesUsed - 1 : 0], quad) : 0;
        if constexpr (TRUNCATE) {
          const uint32_t raised = (~u[i][r][quad] & 0x80808080u) >> (BITS == 8 ? 7 : BITS);
          (BITS == 8 ? last : u)[i][r][quad] += raised;
        }
      }
    }
  }
  digits += 2 * kUnit * g + 8 * kWords * t;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    uint32_t b[2][kQuads];
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      const int8_t* from = digits + 2 * kUnit * 8 * m + kUnit * (g % 2 ^ d);
      if constexpr (kWords == 2) {
        const int4 four = *reinterpret_cast<const int4*>(from);
        b[d][0] = four.x, b[d][1] = four.y, b[d][2] = four.z, b[d][3] = four.w;
      } else {
        const int2 two = *reinterpret_cast<const int2*>(from);
        b[d][0] = two.x, b[d][1] = two.y;
      }
    }
    const int4 both = *reinterpret_cast<const int4*>(terms + 8 * m + 2 * t);  // of this thread's two tokens
    const int constants[2] = {both.x, both.z};
    const float scales[2] = {__int_as_float(both.y), __int_as_float(both.w)};
    int c[TILES][4] = {};
#pragma unroll
    for (int d = 0; d < 2; ++d) {
#pragma unroll
      for (int quad = 0; quad < kQuads; quad += 2)
#pragma unroll
        for (int i = 0; i < TILES; ++i)
          multiply(c[i], u[i][0][quad], u[i][1][quad], u[i][0][quad + 1], u[i][1][quad + 1], b[d][quad],
                   b[d][quad + 1]);
      if constexpr (BITS == 8) {
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int k = 0; k < 4; ++k) c[i][k] = 2 * c[i][k] + (kInside && d == 1 ? constants[k % 2] : 0);
#pragma unroll
        for (int quad = 0; quad < kQuads; quad += 2)
#pragma unroll
          for (int i = 0; i < TILES; ++i)
            multiply(c[i], last[i][0][quad], last[i][1][quad], last[i][0][quad + 1], last[i][1][quad + 1],
                     b[d][quad], b[d][quad + 1]);
      }
      if (d == 0) {
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int k = 0; k < 4; ++k)
            c[i][k] = (BITS == 8 ? 128 : 256) * c[i][k] + (kInside && BITS < 8 ? constants[k % 2] : 0);
      }
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int dot = kInside ? c[i][k] : kMeaning.factor * c[i][k] + constants[k % 2];
        lane[i][m][k] =
          __fadd_rn(lane[i][m][k], __fmul_rn(__int2float_rn(dot), __fmul_rn(steps[i][k / 2], scales[k % 2])));
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

extern "C" __global__ void __launch_bounds__(kCount, BLOCKS) batch(const __grid_constant__ Batch p) {
  extern __shared__ int4 buffer[];
  __shared__ bool comes_last;
  const int warp = threadIdx.x / kWarp, t = threadIdx.x % 4, g = threadIdx.x % kWarp / 4;
  const int mine = warp % kEach, group = warp / kEach;
  const int slice = blockIdx.x % SLICES, stride = gridDim.x / SLICES, first = blockIdx.x / SLICES;
  const int steps = (p.units + STEPS * kLanes - 1) / (STEPS * kLanes), tiles = p.first_tile[kMatrices];
  const int all = (tiles - first + stride - 1) / stride * steps;
  let_successor_start();

  int8_t* ring = reinterpret_cast<int8_t*>(buffer);
  int8_t* digits = ring + STAGES * kStage;
  Term* terms = reinterpret_cast<Term*>(digits + steps * kUnits * COLUMNS * 2 * kUnit);
  float* apart = reinterpret_cast<float*>(terms + steps * kUnits * COLUMNS);  // [kEach, COLUMNS, kPitch]

  const auto matrix_of = [&](int tile) {
    int matrix = 0;
#pragma unroll
    for (int i = 1; i < kMatrices; ++i) matrix += tile >= p.first_tile[i];
    return matrix;
  };
  Cursor ahead = {first};
  const auto enter = [&] {
    ahead.matrix = matrix_of(ahead.tile);
    const int64_t first_row = static_cast<int64_t>(kRows) * (ahead.tile - p.first_tile[ahead.matrix]),
                  last_row = p.matrix[ahead.matrix].rows - 1;
    const auto row = [&](int piece, int pieces) {
      return static_cast<uint32_t>(min(first_row + piece / pieces, last_row));
    };
#pragma unroll
    for (int i = 0; i < kBaseTurns; ++i) ahead.base[i] = row(threadIdx.x + kCount * i, kBlocks) * p.blocks;
#pragma unroll
    for (int i = 0; i < kPlaneTurns; ++i)
      ahead.plane[i] = row(threadIdx.x + kCount * i, kPlanePieces) * p.blocks;
#pragma unroll
    for (int i = 0; i < kScaleTurns; ++i) ahead.scale[i] = row(threadIdx.x + kCount * i, kUnits) * p.groups;
  };
  enter();

  // Copies one stage; scales are not aligned, and held until the next one.
  int unread = all;
  int8_t scales[kScaleTurns];
  const auto fill = [&](int8_t* stage) {
    if (unread-- > 0) {
      const Packed& matrix = p.matrix[ahead.matrix];
      const int unit = STEPS * kLanes * ahead.step;
#pragma unroll
      for (int i = 0; i < kBaseTurns; ++i) {
        const int piece = threadIdx.x + kCount * i, row = piece / kBlocks, at = piece % kBlocks;
        const int block = UNIT_BLOCKS * (unit + unit_of(slice, at / UNIT_BLOCKS)) + at % UNIT_BLOCKS;
        if ((kRows * kBlocks % kCount == 0 || row < kRows) && (!RAGGED || block < p.blocks))
          copy_piece<16>(stage + kBasePitch * row + kBaseBytes * at,
                         matrix.base + kBaseWords * static_cast<uint64_t>(ahead.base[i] + block));
      }
#pragma unroll
      for (int i = 0; i < kPlaneTurns; ++i) {
        constexpr int kBlocksCopied = PLANE_COPY / kPlaneBytes;
        const int piece = threadIdx.x + kCount * i, row = piece / kPlanePieces;
        const int at = piece % kPlanePieces * kBlocksCopied;
        const int block = UNIT_BLOCKS * (unit + unit_of(slice, at / UNIT_BLOCKS)) + at % UNIT_BLOCKS;
        if ((kRows * kPlanePieces % kCount == 0 || row < kRows) && (!RAGGED || block < p.blocks)) {
#pragma unroll
          for (int k = 0; k < kPlanesUsed; ++k)
            copy_piece<PLANE_COPY>(stage + kPlanesAt + kPlanePitch * (kRows * k + row) + kPlaneBytes * at,
                                   matrix.planes[k] + static_cast<uint64_t>(ahead.plane[i] + block));
        }
      }
#pragma unroll
      for (int i = 0; i < kScaleTurns; ++i) {
        const int piece = threadIdx.x + kCount * i, one = unit + unit_of(slice, piece % kUnits);
        scales[i] = 0;
        if ((kRows * kUnits % kCount == 0 || piece < kRows * kUnits) && (!RAGGED || one < p.units))
          scales[i] = __ldg(matrix.scales + ahead.scale[i] + one / UNITS_PER_GROUP);
      }
      if (++ahead.step == steps) {
        ahead.step = 0;
        ahead.tile += stride;
        if (unread > 0) enter();
      }
    }
    end_stage();
  };
  const auto keep_scales = [&](int8_t* stage) {
#pragma unroll
    for (int i = 0; i < kScaleTurns; ++i) {
      const int piece = threadIdx.x + kCount * i;
      if (kRows * kUnits % kCount == 0 || piece < kRows * kUnits) stage[kScalesAt + piece] = scales[i];
    }
  };

  // Weights are nobody's output: their copies need not wait.
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    fill(ring + s * kStage);
    if (s < STAGES - 2) keep_scales(ring + s * kStage);
  }
  wait_for_predecessor();

  // Of odd tokens the low digits come first, so that threads read from different banks.
  constexpr int kPieces = 2 * kUnit / 16;
  for (int i = threadIdx.x; i < steps * kUnits * COLUMNS * kPieces; i += kCount) {
    const int piece = i % kPieces, token = i / kPieces % COLUMNS, n = i / kPieces / COLUMNS;
    const int unit = unit_of(slice, n);
    if (token < p.tokens && (!RAGGED || unit < p.units))
      copy_piece<16>(digits + 2 * kUnit * (COLUMNS * n + token) + (16 * piece ^ kUnit * (token % 2)),
                     p.x.digits + 2 * kUnit * static_cast<int64_t>(token * p.units + unit) + 16 * piece);
  }
  for (int i = threadIdx.x; i < steps * kUnits * COLUMNS; i += kCount) {
    const int token = i % COLUMNS, n = i / COLUMNS, unit = unit_of(slice, n);
    Term term = {0, 0.0f};
    if (token < p.tokens && (!RAGGED || unit < p.units)) term = p.x.terms[token * p.units + unit];
    terms[i] = {(kInside ? kConstant / kMeaning.factor : kConstant) * term.sum, term.scale};
  }
  wait_for_copies();

  float factor = 0.0f, lane[TILES][kTiles][4] = {};
  int slot = 0, step = 0, tile = first, matrix = 0;
  for (int i = 0; i < all; ++i) {
    wait_for_stage<STAGES - 2>();
    int8_t* stage = ring + slot * kStage;
    int8_t* next = ring + (slot + STAGES - 1) % STAGES * kStage;  // which was read last
    keep_scales(ring + (slot + STAGES - 2) % STAGES * kStage);    // of what was filled last
    __syncthreads();
    if (step == 0) {
      matrix = matrix_of(tile);
      factor = (kInside ? kMeaning.factor : 1) * step_factor(p.matrix[matrix], kMeaning.shift + kSpare);
    }
    fill(next);
#pragma unroll
    for (int h = 0; h < STEPS; ++h) {
      const int n = kEach * (STEPS * step + h) + mine;
      compute(stage, kGroupRows * group + g, kEach * h + mine, digits + 2 * kUnit * COLUMNS * n,
              terms + COLUMNS * n, factor, lane);
    }
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    if (++step < steps) continue;
    step = 0;
    float* sums = kApart ? apart : reinterpret_cast<float*>(stage);
    if constexpr (!kApart) __syncthreads();  // nobody reads the stage any more
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int token = 8 * m + 2 * t + k % 2, row = kGroupRows * group + 16 * i + g + 8 * (k / 2);
          sums[(mine * COLUMNS + token) * kPitch + row] = lane[i][m][k];
          lane[i][m][k] = 0.0f;
        }
    __syncthreads();
    const int64_t rows = p.matrix[matrix].rows;
    const int64_t first_row = static_cast<int64_t>(tile - p.first_tile[matrix]) * kRows;
    const auto write = [&](int token, int row, float sum) {
      if (first_row + row >= rows) return;
      if (p.bias[matrix]) sum = __fadd_rn(sum, p.bias[matrix][first_row + row]);
      p.out[matrix][token * p.stride[matrix] + first_row + row] = sum;
    };
    constexpr int kPart = COLUMNS * kRows;
    float* scratch = p.scratch + static_cast<int64_t>(tile) * SLICES * CHUNK * kPart;
    for (int i = threadIdx.x; i < p.tokens * kRows; i += kCount) {
      const float* from = sums + i / kRows * kPitch + i % kRows;
      if constexpr (SLICES == 1) {
        write(i / kRows, i % kRows, sum_lanes<kLanes>(from, COLUMNS * kPitch));
      } else {
#pragma unroll
        for (int j = 0; j < CHUNK; ++j)
          scratch[(CHUNK * slice + j) * kPart + i] =
            sum_lanes<kEach / CHUNK>(from + j * COLUMNS * kPitch, CHUNK * COLUMNS * kPitch);
      }
    }
    if constexpr (SLICES > 1) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        comes_last = atomicAdd(p.tickets + tile, 1) == SLICES - 1;
        if (comes_last) p.tickets[tile] = 0;
      }
      __syncthreads();
      if (comes_last) {
        __threadfence();
        for (int i = threadIdx.x; i < p.tokens * kRows; i += kCount) {
          float parts[SLICES * CHUNK];
#pragma unroll
          for (int j = 0; j < SLICES * CHUNK; ++j) parts[j] = __ldcg(scratch + j * kPart + i);
          write(i / kRows, i % kRows, sum_lanes<SLICES * CHUNK>(parts, 1));
        }
      }
    }
    tile += stride;
  }
}
