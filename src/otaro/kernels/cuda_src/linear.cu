// Products of one or two tokens with packed rows, straight from the planes, on the integer units of the
// tensor cores. batch.cu takes more.
//
// A block of threads takes 16 rows at a time and shares out their 16 lanes: a warp takes four units of every
// 16, and all meet at the rows' end, so that sums are taken in the order of ../reference.py, step 4. One
// `mma` multiplies 16 rows of 32 bytes with eight columns. Which weights the bytes stand for is free as long
// as activations agree, so a thread unpacks what it has loaded, with a few shifts and masks for four weights,
// and nothing is moved between threads.
//
// Four threads hold the bytes of a row, and kSpread units are spread over them: thread t has the piece t %
// TOKENS of unit t / TOKENS. Columns 2c and 2c + 1 are the high and the low digits of token c % TOKENS, of
// unit c / TOKENS, and zero in the bytes of other units. So one accumulator serves four units of one token,
// or two of two, and thread t ends up with both digits of what columns 2t and 2t + 1 stand for.
//
// Set by the caller: BITS, TRUNCATE, UNIT_BLOCKS, UNITS_PER_GROUP, TOKENS (1 or 2), WIDE (rows have an even
// number of blocks), QUADRUPLE (rows have four scales or a multiple of that, at addresses that are multiples
// of four, one for each unit), RAGGED (rows are not a multiple of 16 units), SHARED (activations fit into
// shared memory), DEPTH (steps loaded ahead).
//
// EXPERTS, with one token: matrices are those of the first expert in a stack, and a launch takes pairs of a
// token and one of its experts, whose numbers are in the GPU's memory. Row y of the grid is pair y. Nobody
// else's weights are read.
#include "sefp.cuh"

#ifndef EXPERTS
#define EXPERTS 0
#endif
static_assert(TOKENS == 1 || (TOKENS == 2 && !EXPERTS), "a pair is one token");

constexpr int kSpan = 4, kSpread = kSpan / TOKENS;  // units of a warp in a step, and of an accumulator
constexpr int kWarps = kLanes / kSpan, kRows = 16, kMatrices = 3;
constexpr int kPlanesUsed = BITS - kCoarsest, kUnit = kBlock * UNIT_BLOCKS;
constexpr int kSpare = BITS == 8 ? 0 : 7 - BITS;  // zeros below u in its byte
constexpr Meaning kMeaning = meaning(BITS, TRUNCATE);
constexpr int kWords = UNIT_BLOCKS * kSpread;  // base words of a thread's piece: one for each `mma`
constexpr int kBlocks = kWords > 4 ? 2 : 1,
              kQuads = kWords > 4 ? 8 : 2 * kWords;  // blocks of a piece, quads of each
constexpr int kParts = TOKENS;                       // accumulators that a step fills, one after the other
constexpr bool kTogether = QUADRUPLE && kParts > 1;  // the scales of a warp's units are loaded as one word

struct Linear {
  Packed matrix[kMatrices];
  float* out[kMatrices];           // [tokens, rows]
  const float* bias[kMatrices];    // [rows], or null
  int64_t stride[kMatrices];       // of out, from token to token
  int first_block[kMatrices + 1];  // blocks of threads are shared out among the matrices
  Activations x;
  int tokens, blocks, units, groups;
  const int* experts;              // [pairs]; this and what follows: of EXPERTS
  int64_t expert_rows[kMatrices];  // from one expert's to the next one's
  int each;                        // pairs that share a row of x
};

// What a thread holds of a step, for its two rows.
struct Step {
  uint32_t base[2][kParts][kWords];
  uint32_t planes[2][kParts][kBlocks][kPlanesUsed ? kPlanesUsed : 1];
  int scales[2][kTogether ? 1 : kParts];
};

// Where a warp is, tile after tile and step after step; of each of the thread's rows the number of its first
// piece's block, and of its first group.
struct Cursor {
  int tile, step;
  uint32_t block[2], group[2];
};

// Activations of a part: digits of the thread's column, and the term of what its accumulator is for.
struct Fetched {
  uint32_t digits[2 * kWords];
  Term term;
};

template <int Words>
__device__ __forceinline__ void load_words(const uint32_t* from, uint32_t* to) {
  if constexpr (Words == 4)
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
        : "l"(from));
  else if constexpr (Words == 2)
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
  else
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}

__device__ __forceinline__ void multiply(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
  asm(
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
    "%2, %3};"
    : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The first unit of a step of this warp.
__device__ __forceinline__ int first_unit(const Cursor& at) {
  return kLanes * at.step + kSpan * (threadIdx.x / kWarp);
}

// Loads a step of two rows.
__device__ __forceinline__ void load(const Linear& p, const Packed& matrix, const Cursor& at, Step& step) {
  const int t = threadIdx.x % 4, word = t % TOKENS * kWords % kBaseWords, unit = first_unit(at);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const int ahead = (kLanes * at.step + kSpread * j) * UNIT_BLOCKS;  // of the row's first piece
      const uint32_t first = at.block[r] + ahead;
      const int past =
        RAGGED ? p.blocks - (unit + kSpread * j + t / TOKENS) * UNIT_BLOCKS - t % TOKENS * kWords / kBaseWords
               : 2;
      uint32_t* base = step.base[r][j];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if constexpr (RAGGED) {
#pragma unroll
          for (int w = 0; w < kWords / kBlocks; ++w) base[kBaseWords * b + w] = 0;
        }
        if (b < past)
          load_words<kWords / kBlocks>(matrix.base + kBaseWords * static_cast<uint64_t>(first + b) + word,
                                       base + kBaseWords * b);
      }
#pragma unroll
      for (int k = 0; k < kPlanesUsed; ++k) {
        uint32_t words[2] = {};
        if constexpr (WIDE && kBlocks == 2) {
          if (past > 0) load_words<2>(matrix.planes[k] + first, words);
        } else {
#pragma unroll
          for (int b = 0; b < kBlocks; ++b)
            if (b < past) load_words<1>(matrix.planes[k] + first + b, words + b);
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) step.planes[r][j][b][k] = words[b];
      }
      if constexpr (!kTogether) {
        // A unit may have its scale and no block of this thread's: another token's sum needs it all the same.
        const int one = unit + kSpread * j + t / TOKENS;
        step.scales[r][j] = 0;
        if (!RAGGED || one < p.units)
          step.scales[r][j] = __ldg(matrix.scales + at.group[r] + one / UNITS_PER_GROUP);
      }
    }
    if constexpr (kTogether) {
      step.scales[r][0] = 0;
      if (!RAGGED || unit < p.units)
        step.scales[r][0] = __ldg(reinterpret_cast<const int*>(matrix.scales + at.group[r] + unit));
    }
  }
}

// The scale byte of part j of a thread's row.
__device__ __forceinline__ int scale_of(const Step& step, int r, int j) {
  if constexpr (!kTogether) return step.scales[r][j];
  const int one = kSpread * j + threadIdx.x % 4 / TOKENS;
  return static_cast<int8_t>(step.scales[r][0] >> 8 * one);
}

// Activations where a warp finds them fast. Few tokens' are copied to shared memory at the start, by each
// warp those of its own units.
__device__ __forceinline__ Activations nearby(const Linear& p, const Activations& x) {
  if constexpr (!SHARED) return x;
  extern __shared__ int4 buffer[];
  int8_t* digits = reinterpret_cast<int8_t*>(buffer);
  Term* terms = reinterpret_cast<Term*>(digits + static_cast<int64_t>(TOKENS) * p.units * 2 * kUnit);
  const int lane = threadIdx.x % kWarp;
  for (int token = 0; token < p.tokens; ++token) {
    for (int unit = kSpan * (threadIdx.x / kWarp); unit < p.units; unit += kLanes) {
      const uint32_t slot = token * p.units + unit;
      constexpr int kChunks = 2 * kUnit / 16;
#pragma unroll
      for (int i = lane; i < kSpan * kChunks; i += kWarp)
        if (!RAGGED || unit + i / kChunks < p.units)
          copy_to_shared<16>(digits + slot * 2 * kUnit + 16 * i, x.digits + slot * 2 * kUnit + 16 * i);
      if (lane < kSpan && (!RAGGED || unit + lane < p.units))
        copy_to_shared<8>(terms + slot + lane, x.terms + slot + lane);
    }
  }
  wait_for_copies();
  __syncwarp();
  return {digits, terms};
}

// Fetches the activations of part j of a step. `mine` says whether the thread's column has digits in its
// bytes; what it has not stays zero.
__device__ __forceinline__ void fetch(const Linear& p, const Activations& x, int unit, int j, bool mine,
                                      Fetched& out) {
  const int t = threadIdx.x % 4, column = threadIdx.x % kWarp / 4, one = unit + kSpread * j + t / TOKENS;
  if (RAGGED && one >= p.units) return;  // weights are zero there
  const int token = column / 2 % TOKENS, result = t % TOKENS;
  const int8_t* digits = x.digits + (2 * static_cast<uint32_t>(token * p.units + one) + column % 2) * kUnit +
                         t % TOKENS * kWords * 8;
  if (mine) {
#pragma unroll
    for (int w = 0; w < 2 * kWords; w += 4) {
      const int4 four = *reinterpret_cast<const int4*>(digits + 4 * w);
      out.digits[w] = four.x, out.digits[w + 1] = four.y, out.digits[w + 2] = four.z,
      out.digits[w + 3] = four.w;
    }
  }
  // With one token the other tokens' accumulators are never looked at.
  if (TOKENS == 1 || result < p.tokens)
    out.term = x.terms[static_cast<uint32_t>((TOKENS > 1 ? result : 0) * p.units + one)];
}

// Adds the terms of part j of a step to the lanes.
__device__ __forceinline__ void compute(const Linear& p, const Step& step, const Cursor& at, int j,
                                        const Fetched& x, float factor, float (&lanes)[2]) {
  const int t = threadIdx.x % 4;
  int c[kBlocks][4] = {}, d[kBlocks][4] = {};  // one for each block: chains are slow
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    uint32_t u[2][kQuads], last[2][kQuads];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t planes[kPlanesUsed ? kPlanesUsed : 1];
#pragma unroll
      for (int k = 0; k < kPlanesUsed; ++k)
        planes[k] = step.planes[r][j][block][k] >> (kWords < 4 ? 2 * (t % TOKENS * kWords % kBaseWords) : 0);
      unpack<BITS, kQuads>(step.base[r][j] + kBaseWords * block, planes, u[r]);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        last[r][quad] = BITS == 8 ? last_bits(planes[kPlanesUsed ? kPlanesUsed - 1 : 0], quad) : 0;
        if constexpr (TRUNCATE) {
          const uint32_t raised = (~u[r][quad] & 0x80808080u) >> (BITS == 8 ? 7 : BITS);
          (BITS == 8 ? last : u)[r][quad] += raised;
        }
      }
    }
#pragma unroll
    for (int quad = 0; quad < kQuads; quad += 2) {
      const uint32_t b0 = x.digits[kQuads * block + quad], b1 = x.digits[kQuads * block + quad + 1];
      multiply(c[block], u[0][quad], u[1][quad], u[0][quad + 1], u[1][quad + 1], b0, b1);
      if constexpr (BITS == 8)
        multiply(d[block], last[0][quad], last[1][quad], last[0][quad + 1], last[1][quad + 1], b0, b1);
    }
  }
  const int one = first_unit(at) + kSpread * j + t / TOKENS;
  const float steps[2] = {step_of(scale_of(step, 0, j), factor), step_of(scale_of(step, 1, j), factor)};
  if ((TOKENS > 1 && t % TOKENS >= p.tokens) || (RAGGED && one >= p.units)) return;
  const int constant = kMeaning.constant * (1 << kSpare) * x.term.sum;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int high = c[0][2 * r], low = c[0][2 * r + 1], last_high = d[0][2 * r], last_low = d[0][2 * r + 1];
    if constexpr (kBlocks == 2) {
      high += c[kBlocks - 1][2 * r], low += c[kBlocks - 1][2 * r + 1];
      last_high += d[kBlocks - 1][2 * r], last_low += d[kBlocks - 1][2 * r + 1];
    }
    int dot = 256 * high + low;
    if constexpr (BITS == 8) dot = 2 * dot + 256 * last_high + last_low;
    dot = kMeaning.factor * dot + constant;
    lanes[r] = __fadd_rn(lanes[r], __fmul_rn(__int2float_rn(dot), __fmul_rn(steps[r], x.term.scale)));
  }
}

// Lane 0 after lane j got lane j + 8 added, then j + 4, j + 2, j + 1: the same sums, taken depth first.
template <int Count>
__device__ __forceinline__ float sum_lanes(const float* lanes) {
  if constexpr (Count == 1)
    return lanes[0];
  else
    return __fadd_rn(sum_lanes<Count / 2>(lanes), sum_lanes<Count / 2>(lanes + kLanes / Count));
}

extern "C" __global__ void __launch_bounds__(kWarps* kWarp) linear(const __grid_constant__ Linear p) {
  __shared__ float shared[2][TOKENS][kRows][kLanes + 1];
  const int warp = threadIdx.x / kWarp, t = threadIdx.x % 4, g = threadIdx.x % kWarp / 4;
  let_successor_start();

  int number = 0;
#pragma unroll
  for (int i = 1; i < kMatrices; ++i) number += static_cast<int>(blockIdx.x) >= p.first_block[i];
#if EXPERTS
  // Which expert it is, the predecessor may have to say first.
  wait_for_predecessor();
  const int64_t pair = blockIdx.y, skipped = p.experts[pair] * p.expert_rows[number],
                row_of_x = pair / p.each;
  Packed matrix = p.matrix[number];
  matrix.base += kBaseWords * skipped * p.blocks;
#pragma unroll
  for (int k = 0; k < kPlanesUsed; ++k) matrix.planes[k] += skipped * p.blocks;
  matrix.scales += skipped * p.groups;
  const Activations given = {p.x.digits + row_of_x * p.units * 2 * kUnit, p.x.terms + row_of_x * p.units};
#else
  constexpr int64_t pair = 0;
  const Packed& matrix = p.matrix[number];
  const Activations& given = p.x;
#endif
  const int first = blockIdx.x - p.first_block[number],
            stride = p.first_block[number + 1] - p.first_block[number];
  const int steps = (p.units + kLanes - 1) / kLanes,
            tiles = static_cast<int>((matrix.rows + kRows - 1) / kRows);
  int left = (tiles - first + stride - 1) / stride * steps, unread = left;

  const auto enter = [&](Cursor& at) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t row =
        static_cast<uint32_t>(min(static_cast<int64_t>(at.tile) * kRows + g + 8 * r, matrix.rows - 1));
      at.block[r] =
        row * p.blocks + (kSpan * warp + t / TOKENS) * UNIT_BLOCKS + t % TOKENS * kWords / kBaseWords;
      at.group[r] = row * p.groups;
    }
  };
  const auto advance = [&](Cursor& at) {
    if (++at.step < steps) return;
    at.step = 0;
    at.tile += stride;
    enter(at);
  };

  // Weights are nobody's output: their loads need not wait.
  Step loaded[DEPTH];
  Cursor ahead = {first}, now;
  enter(ahead);
  now = ahead;
  const auto load_next = [&](Step& into) {
    if (unread == 0) return;
    load(p, matrix, ahead, into);
    advance(ahead);
    --unread;
  };
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) load_next(loaded[d]);
  if constexpr (!EXPERTS) wait_for_predecessor();

  const bool mine = g / 2 / TOKENS == t / TOKENS && g / 2 % TOKENS < p.tokens;
  const Activations x = nearby(p, given);
  const float factor = step_factor(matrix, kMeaning.shift + kSpare);
  Fetched fetched = {};
  float lanes[kParts][2] = {};
  int parity = 0;
  while (left) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (left == 0) break;
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        fetch(p, x, first_unit(now), j, mine, fetched);
        compute(p, loaded[d], now, j, fetched, factor, lanes[j]);
      }
      load_next(loaded[d]);
      if (now.step + 1 == steps) {
        // The lanes of a row meet. Two buffers in turns: nobody can be two tiles ahead of a barrier.
        float (&buffer)[TOKENS][kRows][kLanes + 1] = shared[parity];
        parity ^= 1;
#pragma unroll
        for (int j = 0; j < kParts; ++j)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            buffer[t % TOKENS][g + 8 * r][kSpan * warp + kSpread * j + t / TOKENS] = lanes[j][r];
            lanes[j][r] = 0.0f;
          }
        __syncthreads();
        for (int i = threadIdx.x; i < p.tokens * kRows; i += blockDim.x) {
          const int token = i / kRows, in_tile = i % kRows;
          const int64_t row = static_cast<int64_t>(now.tile) * kRows + in_tile;
          if (row >= matrix.rows) continue;
          float sum = sum_lanes<kLanes>(buffer[token][in_tile]);
          if (p.bias[number]) sum = __fadd_rn(sum, p.bias[number][row]);
          p.out[number][(pair + token) * p.stride[number] + row] = sum;
        }
      }
      advance(now);
      --left;
    }
  }
}
