// Products of up to sixteen tokens with packed rows, straight from the planes, on the integer units of the tensor cores.
//
// A warp takes 16 rows, and of every 16 units the four that make up its lanes: the four warps of a block share the 16 lanes of a row
// and meet at its end, so that sums are taken in the order of ../reference.py, step 4. One `mma` multiplies 16 rows of 32 bytes
// with eight columns. What the bytes stand for is free as long as weights and activations agree, so that a thread unpacks what
// it loaded, with a handful of shifts and masks for four weights, and nothing is moved between threads:
//
//   up to two tokens   Thread t of four holds unit t of its row. Columns 2t and 2t + 1 are the high and the low digits of that unit
//                      and zero for the other threads' bytes: one accumulator holds four units, each in its own thread.
//   more tokens        Four threads share a unit, a quarter each. Columns 2t and 2t + 1 are the digits of token t.
//
// Set by the caller: BITS, TRUNCATE, UNIT_BLOCKS, UNITS_PER_GROUP, TOKENS (1, 2, 4, 8, 16), STREAM, WIDE (blocks of a row are even),
// GATED, DEPTH (steps loaded ahead).
#include "sefp.cuh"

constexpr int kWarps = 4, kRows = 16, kSpan = 4;  // warps of a block, rows of a tile, units of a warp's step
constexpr int kMatrices = 3;
constexpr int kPlanes = BITS - kCoarsest;
constexpr int kQuads = 8 * UNIT_BLOCKS;           // of a unit
constexpr int kUnit = kBlock * UNIT_BLOCKS;
constexpr bool kDiagonal = TOKENS <= 2;
constexpr int kTiles = GATED ? 2 : 1;             // whose products a warp holds at a time
constexpr int kAccumulators = kDiagonal ? TOKENS : TOKENS / 4;
constexpr int kParts = kDiagonal ? 1 : kSpan;     // units of a step that a thread has a share of

struct Linear {
  Packed matrix[kMatrices];
  float* out[kMatrices];         // [tokens, rows]
  const float* bias[kMatrices];  // [rows], or null
  int first_tile[kMatrices + 1]; // tiles are numbered through all matrices; GATED: matrix 0 is gated by silu, matrix 1 multiplies
  int64_t stride[kMatrices];     // of out, from token to token
  Activations x;
  int tokens, blocks, units, groups;
};

// What a thread holds of a step: for its two rows, 64 (32) weights and the exponents of four units.
struct Step {
  uint32_t base[2][kQuads / 2];
  uint32_t planes[2][kDiagonal ? UNIT_BLOCKS : kSpan][kPlanes ? kPlanes : 1];
  uint32_t exponents[2][STREAM ? 2 : kParts];
};

__device__ __forceinline__ void load16(const uint32_t* from, uint32_t* to) {
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
}
__device__ __forceinline__ void load8(const uint32_t* from, uint32_t& first, uint32_t& second) {
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "l"(from));
}
__device__ __forceinline__ uint32_t load4(const uint32_t* from) {
  uint32_t value;
  asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}

__device__ __forceinline__ void multiply(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Loads a step of two rows; `unit` is the first of the warp's four.
__device__ __forceinline__ void load(const Linear& p, const Packed& matrix, const uint32_t (&rows)[2], int unit, Step& step) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t row = static_cast<int64_t>(rows[r]) * p.blocks;  // its first block
    if constexpr (kDiagonal) {
      const int first = (unit + t) * UNIT_BLOCKS;
#pragma unroll
      for (int b = 0; b < UNIT_BLOCKS; ++b) {
        const bool there = first + b < p.blocks;
        const int64_t block = row + first + b;
#pragma unroll
        for (int w = 0; w < 4; ++w) step.base[r][4 * b + w] = 0;
        if (there) load16(matrix.base + 4 * block, step.base[r] + 4 * b);
        if constexpr (!(WIDE && UNIT_BLOCKS == 2)) {
#pragma unroll
          for (int k = 0; k < kPlanes; ++k) step.planes[r][b][k] = there ? load4(matrix.planes[k] + block) : 0;
        }
      }
      if constexpr (WIDE && UNIT_BLOCKS == 2) {
#pragma unroll
        for (int k = 0; k < kPlanes; ++k) {
          step.planes[r][0][k] = step.planes[r][UNIT_BLOCKS - 1][k] = 0;
          if (first < p.blocks) load8(matrix.planes[k] + row + first, step.planes[r][0][k], step.planes[r][UNIT_BLOCKS - 1][k]);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kSpan; ++j) {
        const int in_row = (unit + j) * UNIT_BLOCKS + t * UNIT_BLOCKS / 4;
        const bool there = in_row < p.blocks;
        const int64_t block = row + in_row;
        uint32_t* words = step.base[r] + j * UNIT_BLOCKS;
        if constexpr (UNIT_BLOCKS == 2) {
          words[0] = words[1] = 0;
          if (there) load8(matrix.base + 4 * block + 2 * (t % 2), words[0], words[1]);
        } else {
          words[0] = there ? load4(matrix.base + 4 * block + t) : 0;
        }
#pragma unroll
        for (int k = 0; k < kPlanes; ++k) step.planes[r][j][k] = there ? load4(matrix.planes[k] + block) : 0;
      }
    }
    if constexpr (STREAM) {
      const uint64_t bit = 5 * (static_cast<uint64_t>(rows[r]) * p.groups + unit / UNITS_PER_GROUP);
      const uint32_t* words = static_cast<const uint32_t*>(matrix.exponents) + (bit >> 5);
      step.exponents[r][0] = __ldg(words);
      step.exponents[r][1] = __ldg(words + 1);
    } else {
      const int8_t* bytes = static_cast<const int8_t*>(matrix.exponents) + static_cast<int64_t>(rows[r]) * p.groups;
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        const int one = unit + (kDiagonal ? t : j);
        step.exponents[r][j] = one < p.units ? __ldg(bytes + one / UNITS_PER_GROUP) : 0;
      }
    }
  }
}

// The exponent of the j-th of four units.
__device__ __forceinline__ int exponent_of(const Linear& p, const Step& step, int r, uint32_t row, int unit, int j) {
  if constexpr (STREAM) {
    const uint32_t bit = 5u * (row * p.groups + unit / UNITS_PER_GROUP) % 32;
    const uint64_t window = (static_cast<uint64_t>(step.exponents[r][1]) << 32 | step.exponents[r][0]) >> bit;
    return static_cast<int>(static_cast<uint32_t>(window) >> 5 * ((unit + j) / UNITS_PER_GROUP - unit / UNITS_PER_GROUP) & 31) - 15;
  } else {
    return static_cast<int>(step.exponents[r][kDiagonal ? 0 : j]);
  }
}

__device__ __forceinline__ void raise_negative(uint32_t* u, uint32_t* last) {
  if constexpr (TRUNCATE) {
    const uint32_t raised = (~*u & 0x80808080u) >> (BITS == 8 ? 7 : BITS);
    *(BITS == 8 ? last : u) += raised;
  }
}

// Adds the terms of a step to the lanes.
__device__ __forceinline__ void compute(const Linear& p, const Step (&steps)[kTiles], const uint32_t (&rows)[kTiles][2], int unit,
                                        float (&lanes)[kTiles][kAccumulators][kParts][2]) {
  constexpr Meaning means = meaning(BITS, TRUNCATE);
  constexpr int kSpare = BITS == 8 ? 0 : 7 - BITS;  // zeros below u in its byte
  const int t = threadIdx.x % 4, g = threadIdx.x % kWarp / 4;
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    int c[kTiles][kAccumulators][4] = {}, d[kTiles][kAccumulators][4] = {};
    const int part = kDiagonal ? unit + t : unit + j;
    // One `mma` takes two quads of each row. Activations come first: they serve all tiles.
    constexpr int kSteps = kDiagonal ? kQuads / 2 : UNIT_BLOCKS;
    uint32_t b[kAccumulators][2 * kSteps] = {};
#pragma unroll
    for (int n = 0; n < kAccumulators; ++n) {
      const int token = kDiagonal ? n : 4 * n + g / 2;
      const int8_t* digits = p.x.digits + ((static_cast<int64_t>(token) * p.units + part) * 2 + g % 2) * kUnit + (kDiagonal ? 0 : t * 8 * UNIT_BLOCKS);
      if ((kDiagonal ? g / 2 == t : true) && token < p.tokens && part < p.units) {
        if constexpr (kDiagonal || UNIT_BLOCKS == 2) {
#pragma unroll
          for (int w = 0; w < 2 * kSteps; w += 4) {
            const int4 four = *reinterpret_cast<const int4*>(digits + 4 * w);
            b[n][w] = four.x, b[n][w + 1] = four.y, b[n][w + 2] = four.z, b[n][w + 3] = four.w;
          }
        } else {
          const int2 two = *reinterpret_cast<const int2*>(digits);
          b[n][0] = two.x, b[n][1] = two.y;
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const Step& step = steps[tile];
      constexpr int kPieces = kDiagonal ? UNIT_BLOCKS : 1, kHere = kDiagonal ? 8 : 2 * UNIT_BLOCKS;  // quads of a piece
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        uint32_t u[2][kHere], last[2][kHere];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint32_t planes[kPlanes ? kPlanes : 1];
#pragma unroll
          for (int k = 0; k < kPlanes; ++k)
            planes[k] = kDiagonal ? step.planes[r][piece][k] : step.planes[r][j][k] >> (2 * UNIT_BLOCKS * t % 8);
          unpack<BITS, kHere>(step.base[r] + (kDiagonal ? 4 * piece : j * UNIT_BLOCKS), planes, u[r]);
#pragma unroll
          for (int quad = 0; quad < kHere; ++quad) {
            if constexpr (BITS == 8) last[r][quad] = last_bits(planes[kPlanes - 1], quad);
            raise_negative(&u[r][quad], &last[r][quad]);
          }
        }
#pragma unroll
        for (int quad = 0; quad < kHere; quad += 2) {
#pragma unroll
          for (int n = 0; n < kAccumulators; ++n) {
            const uint32_t b0 = b[n][kHere * piece + quad], b1 = b[n][kHere * piece + quad + 1];
            multiply(c[tile][n], u[0][quad], u[1][quad], u[0][quad + 1], u[1][quad + 1], b0, b1);
            if constexpr (BITS == 8) multiply(d[tile][n], last[0][quad], last[1][quad], last[0][quad + 1], last[1][quad + 1], b0, b1);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kAccumulators; ++n) {
      const int token = kDiagonal ? n : 4 * n + t;
      if (token >= p.tokens || part >= p.units) continue;
      const Term term = p.x.terms[static_cast<int64_t>(token) * p.units + part];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          int dot = 256 * c[tile][n][2 * r] + c[tile][n][2 * r + 1];
          if constexpr (BITS == 8) dot = 2 * dot + 256 * d[tile][n][2 * r] + d[tile][n][2 * r + 1];
          dot = means.factor * dot + means.constant * (1 << kSpare) * term.sum;
          const int exponent = exponent_of(p, steps[tile], r, rows[tile][r], unit, kDiagonal ? t : j);
          const float step = __fmul_rn(power_of_two(exponent - means.shift - kSpare), term.scale);
          lanes[tile][n][j][r] = __fadd_rn(lanes[tile][n][j][r], __fmul_rn(__int2float_rn(dot), step));
        }
      }
    }
  }
}

// Where a warp is: tile after tile of the block's, step after step of a tile.
struct Place {
  int tile, step;
  const Packed* matrix[kTiles];
  uint32_t row[kTiles][2];
};

__device__ __forceinline__ int matrix_of(const Linear& p, int tile) {
  int number = 0;
#pragma unroll
  for (int i = 1; i < kMatrices; ++i) number += !GATED && tile >= p.first_tile[i];
  return number;
}

__device__ __forceinline__ void enter_tile(const Linear& p, Place& at) {
  const int g = threadIdx.x % kWarp / 4, number = matrix_of(p, at.tile);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    at.matrix[i] = &p.matrix[number + i];
    const int64_t first = static_cast<int64_t>(at.tile - p.first_tile[number]) * kRows;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      at.row[i][r] = static_cast<uint32_t>(min(first + g + 8 * r, at.matrix[i]->rows - 1));
  }
}

__device__ __forceinline__ void advance(const Linear& p, Place& at, int steps) {
  if (++at.step < steps) return;
  at.step = 0;
  at.tile += gridDim.x;
  if (at.tile < p.first_tile[GATED ? 1 : kMatrices]) enter_tile(p, at);
}

__device__ __forceinline__ void load_step(const Linear& p, const Place& at, Step (&into)[kTiles]) {
  const int unit = kLanes * at.step + kSpan * (threadIdx.x / kWarp);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) load(p, *at.matrix[i], at.row[i], unit, into[i]);
}

extern "C" __global__ void __launch_bounds__(kWarps * kWarp) linear(const __grid_constant__ Linear p) {
  __shared__ float shared[2][kTiles][TOKENS][kRows][kLanes + 1];
  const int warp = threadIdx.x / kWarp, t = threadIdx.x % 4, g = threadIdx.x % kWarp / 4;
  const int steps = (p.units + kLanes - 1) / kLanes, tiles = p.first_tile[GATED ? 1 : kMatrices];
  let_successor_start();

  // Weights are nobody's output: their loads need not wait.
  Step steps_ahead[DEPTH][kTiles];
  Place ahead = {static_cast<int>(blockIdx.x), 0, {}, {}};
  if (ahead.tile < tiles) enter_tile(p, ahead);
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    if (ahead.tile >= tiles) continue;
    load_step(p, ahead, steps_ahead[d]);
    advance(p, ahead, steps);
  }
  wait_for_predecessor();

  Place now = {static_cast<int>(blockIdx.x), 0, {}, {}};
  if (now.tile < tiles) enter_tile(p, now);
  float lanes[kTiles][kAccumulators][kParts][2] = {};
  int parity = 0;
  while (now.tile < tiles) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (now.tile >= tiles) break;
      compute(p, steps_ahead[d], now.row, kLanes * now.step + kSpan * warp, lanes);
      if (ahead.tile < tiles) {
        load_step(p, ahead, steps_ahead[d]);
        advance(p, ahead, steps);
      }
      if (now.step + 1 == steps) {
        // The lanes of a row meet: lane j gets lane j + 8 added, then j + 4, j + 2, j + 1.
        float (&part)[kTiles][TOKENS][kRows][kLanes + 1] = shared[parity];
        parity ^= 1;
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
          for (int n = 0; n < kAccumulators; ++n)
#pragma unroll
            for (int j = 0; j < kParts; ++j)
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                part[i][kDiagonal ? n : 4 * n + t][g + 8 * r][kSpan * warp + (kDiagonal ? t : j)] = lanes[i][n][j][r];
                lanes[i][n][j][r] = 0.0f;
              }
        __syncthreads();
        const int number = matrix_of(p, now.tile);
        for (int i = threadIdx.x; i < p.tokens * kRows; i += blockDim.x) {
          const int token = i / kRows, in_tile = i % kRows;
          const int64_t row = static_cast<int64_t>(now.tile - p.first_tile[number]) * kRows + in_tile;
          if (row >= p.matrix[number].rows) continue;
          float sums[kTiles];
#pragma unroll
          for (int k = 0; k < kTiles; ++k) {
            float lane[kLanes];
#pragma unroll
            for (int l = 0; l < kLanes; ++l) lane[l] = part[k][token][in_tile][l];
#pragma unroll
            for (int half = kLanes / 2; half; half /= 2)
#pragma unroll
              for (int l = 0; l < half; ++l) lane[l] = __fadd_rn(lane[l], lane[l + half]);
            sums[k] = lane[0];
            if (p.bias[number + k]) sums[k] = __fadd_rn(sums[k], p.bias[number + k][row]);
          }
          float& out = p.out[number][token * p.stride[number] + row];
          if constexpr (GATED)
            out = sums[0] / (1.0f + __expf(-sums[0])) * sums[kTiles - 1];
          else
            out = sums[0];
        }
      }
      advance(p, now, steps);
    }
  }
}
