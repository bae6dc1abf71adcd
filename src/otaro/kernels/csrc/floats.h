// The decoder's work on floats: norms, rotary positions, softmax, attention over a cache. Every instruction
// set compiles this source (as backend.h says, in a namespace of its own) and all return the same bits: a sum
// runs over sixteen lanes in ascending order, then lane j gets lane j + 8 added, then j + 4, j + 2, j + 1;
// nothing is fused, and the exponential is written out here. Eight floats are one `Eight`, a vector type of
// the compiler's that becomes whatever registers there are.
#pragma once

#include <cstdint>

namespace otaro {

// Positions that lie together in a cache, and that are attended to before anything is merged.
constexpr int kSegment = 64;
constexpr int kTile = 16;    // floats that the inner loops of attention hold at a time
constexpr int kMaxRows = 8;  // queries that share the keys of a tile
constexpr int kMaxHead = 256;

constexpr int64_t padded(int64_t head) { return (head + kTile - 1) / kTile * kTile; }

// A softmax in progress: the largest score, the sum of exp(score - largest), then, from kTile on, the values
// weighed by these.
constexpr int64_t state_size(int64_t head) { return kTile + padded(head); }

struct Floats {
  // out = weight * x / sqrt(mean(x^2) + eps)
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t count, float* out);
  void (*add)(float* x, const float* y, int64_t count);
  // x *= factor
  void (*scale)(float* x, float factor, int64_t count);
  // Rotate the pairs (x[i], x[i + half]) by the angles whose cosines and sines are given.
  void (*rope)(float* x, const float* cosines, const float* sines, int64_t half);
  // gate = silu(gate) * up; or gelu, by its approximation with tanh
  void (*silu)(float* gate, const float* up, int64_t count);
  void (*gelu)(float* gate, const float* up, int64_t count);
  // x = most * tanh(x / most)
  void (*cap)(float* x, float most, int64_t count);
  float (*dot)(const float* x, const float* y, int64_t count);
  // x = exp(x) / sum(exp(x))
  void (*softmax)(float* x, int64_t count);
  void (*exponential)(const float* x, float* out, int64_t count);

  // Float16, rounded to nearest even: the key of one position of a segment [tiles of 16 positions][head][16],
  // and its value in a row of padded(head). False where a number is not finite then.
  bool (*store_key)(const float* key, int64_t head, uint16_t* segment, int64_t at);
  bool (*store_value)(const float* value, int64_t head, uint16_t* row);

  // One row as `midpoint` codes at `bits` mantissa bits, in the bytes of FORMAT.md; false where it cannot be
  // encoded.
  bool (*encode)(const float* row, int64_t length, int bits, uint8_t* base, uint8_t* const* planes,
                 int8_t* exponents);

  // scores[row * kSegment + i] of some queries, `head` floats each, with the keys of positions [0, end) of a
  // segment; a few more may be written.
  void (*score)(const float* queries, int rows, int64_t head, const uint16_t* keys, int64_t end,
                float* scores);
  // Scores of positions [begin, end) into weights, in place, those of others into zero; starts the states.
  void (*weigh)(float* scores, int rows, int64_t begin, int64_t end, float* states, int64_t head);
  // Adds weighed values, rows of padded(head), to the states.
  void (*gather_halves)(const float* weights, int rows, int64_t begin, int64_t end, const uint16_t* values,
                        float* states, int64_t head);
  void (*gather_floats)(const float* weights, int rows, int64_t begin, int64_t end, const float* values,
                        float* states, int64_t head);
  // The softmax over the positions of both states, into the first.
  void (*merge)(float* state, const float* next, int64_t head);
  void (*finish)(const float* state, float* out, int64_t head);
};

namespace portable {
extern const Floats kFloats;
}
#ifdef OTARO_X86
namespace avx2 {
extern const Floats kFloats;
}
namespace avx512 {
extern const Floats kFloats;
}
#endif
#ifdef OTARO_ARM
namespace neon {
extern const Floats kFloats;
}
namespace dotprod {
extern const Floats kFloats;
}
namespace i8mm {
extern const Floats kFloats;
}
#endif
#ifdef __wasm_simd128__
namespace wasm {
extern const Floats kFloats;
}
#endif

}  // namespace otaro

#ifdef OTARO_ISA

#ifdef __F16C__
#include <immintrin.h>
#endif
#ifdef __wasm_simd128__
#include <wasm_simd128.h>
#endif

#include "backend.h"

// Vectors are passed only between functions of this file that are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace otaro::OTARO_ISA {

typedef float Eight __attribute__((vector_size(32)));
typedef int32_t Integers __attribute__((vector_size(32)));  // what comparisons give
typedef uint32_t Words __attribute__((vector_size(32)));

OTARO_INLINE Eight load8(const float* from) {
  Eight value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

OTARO_INLINE void store8(float* to, Eight value) { std::memcpy(to, &value, sizeof value); }

OTARO_INLINE Eight all8(float value) { return Eight{value, value, value, value, value, value, value, value}; }

// The first `count` of eight floats, zero beyond.
OTARO_INLINE Eight load_some(const float* from, int64_t count) {
  Eight value = {};
  std::memcpy(&value, from, static_cast<size_t>(count) * sizeof(float));
  return value;
}

OTARO_INLINE Eight choose8(Integers mask, Eight yes, Eight no) {
  return reinterpret_cast<Eight>((mask & reinterpret_cast<Integers>(yes)) |
                                 (~mask & reinterpret_cast<Integers>(no)));
}

// The sum of sixteen lanes in the order that the head of this file fixes.
OTARO_INLINE float sum16(Eight low, Eight high) {
  const Eight v = low + high;
  const float a = v[0] + v[4], b = v[1] + v[5], c = v[2] + v[6], d = v[3] + v[7];
  return (a + c) + (b + d);
}

// e^x to about one unit in the last place: x = n ln 2 + r, a polynomial for e^r, and n added to the exponent.
// Zero below -87, where results would cease to be normal numbers; NaN stays NaN.
OTARO_INLINE Eight exp8(Eight x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves a whole number in the low bits
  const Eight top = all8(88.0f), bottom = all8(-87.0f);
  Eight v = choose8(x > top, top, x);
  const Eight shifted = v * 1.44269504f + kRound;
  const Eight n = shifted - kRound;
  const Eight r =
    (v - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts; the first product is exact
  Eight p = all8(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  const Words power = (reinterpret_cast<Words>(shifted) + 127) << 23;  // the rest of `shifted` is shifted out
  const Eight result = p * reinterpret_cast<Eight>(power);
  return choose8(x < bottom, Eight{}, result);
}

static float dot(const float* x, const float* y, int64_t count) {
  Eight low = {}, high = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)
    low += load8(x + i) * load8(y + i), high += load8(x + i + 8) * load8(y + i + 8);
  if (i < count) {
    const int64_t left = count - i, first = left < 8 ? left : 8, rest = left - first,
                  next = i + (rest ? 8 : 0);
    low += load_some(x + i, first) * load_some(y + i, first);
    high += load_some(x + next, rest) * load_some(y + next, rest);
  }
  return sum16(low, high);
}

static void rms_norm(const float* x, const float* weight, float eps, int64_t count, float* out) {
  const float factor = 1.0f / __builtin_sqrtf(dot(x, x, count) / static_cast<float>(count) + eps);
  for (int64_t k = 0; k < count; ++k) out[k] = weight[k] * (x[k] * factor);
}

static void add(float* x, const float* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] += y[i];
}

static void scale(float* x, float factor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

static void rope(float* x, const float* cosines, const float* sines, int64_t half) {
  float* y = x + half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = y[i];
    x[i] = a * cosines[i] - b * sines[i];
    y[i] = b * cosines[i] + a * sines[i];
  }
}

// Eight at a time, the last ones filled up with zeros: x[i] = function(x[i], y[i]).
template <class Function>
OTARO_INLINE void each8(float* x, const float* y, int64_t count, Function function) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) store8(x + i, function(load8(x + i), load8(y + i)));
  if (i < count) {
    const Eight last = function(load_some(x + i, count - i), load_some(y + i, count - i));
    std::memcpy(x + i, &last, static_cast<size_t>(count - i) * sizeof(float));
  }
}

static void silu(float* gate, const float* up, int64_t count) {
  each8(gate, up, count,
        [](Eight g, Eight u) __attribute__((always_inline)) { return g / (1.0f + exp8(-g)) * u; });
}

// g/2 (1 + tanh(y)) is g / (1 + exp(-2y)).
static void gelu(float* gate, const float* up, int64_t count) {
  constexpr float kTwice = 1.59576912f;  // 2 sqrt(2 / pi)
  each8(gate, up, count, [](Eight g, Eight u) __attribute__((always_inline)) {
    return g / (1.0f + exp8(-((g * g * g * 0.044715f + g) * kTwice))) * u;
  });
}

// tanh to about one unit in the last place: an odd polynomial for small x, where 1 - 2 / (exp(2x) + 1) would
// lose digits.
OTARO_INLINE Eight tanh8(Eight x) {
  const Eight magnitude = choose8(x < 0.0f, -x, x), z = x * x;
  const Eight large = 1.0f - 2.0f / (exp8(magnitude + magnitude) + 1.0f);
  Eight p = all8(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  return choose8(magnitude < 0.625f, p * z * x + x, choose8(x < 0.0f, -large, large));
}

static void cap(float* x, float most, int64_t count) {
  each8(x, x, count,
        [most](Eight value, Eight) __attribute__((always_inline)) { return tanh8(value / most) * most; });
}

static void softmax(float* x, int64_t count) {
  float largest = x[0], sum = 0;
  for (int64_t i = 1; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  each8(x, x, count,
        [largest](Eight value, Eight) __attribute__((always_inline)) { return exp8(value - largest); });
  for (int64_t i = 0; i < count; ++i) sum += x[i];
  for (int64_t i = 0; i < count; ++i) x[i] /= sum;
}

static void exponential(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += 8) {
    const int64_t some = count - i < 8 ? count - i : 8;
    const Eight value = exp8(load_some(x + i, some));
    std::memcpy(out + i, &value, static_cast<size_t>(some) * sizeof(float));
  }
}

// Float16 both ways. Without the instructions: scaling by a power of two moves the exponent, and makes
// subnormal numbers normal or lets the addition of a large number round them.
#ifdef __F16C__
OTARO_INLINE uint16_t to_half(float value) {
  return static_cast<uint16_t>(
    _mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT), 0));
}

OTARO_INLINE Eight from_halves(const uint16_t* from) {
  return reinterpret_cast<Eight>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
#elif defined(OTARO_HALVES_BY_NEON)
OTARO_INLINE uint16_t to_half(float value) {
  return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(value))), 0);
}

OTARO_INLINE Eight from_halves(const uint16_t* from) {
  const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(from));
  const float32x4_t both[2] = {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  Eight value;
  std::memcpy(&value, both, sizeof value);
  return value;
}
#else
OTARO_INLINE uint16_t to_half(float value) {
  const uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and more
  if (magnitude < 0x38800000)  // below 2^-14: multiples of 2^-24, which the addition leaves in the low bits
    return static_cast<uint16_t>(sign | (to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f)));
  return static_cast<uint16_t>(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13));
}

#ifdef __wasm_simd128__
// Those of a cache: they are finite, for others were refused.
OTARO_INLINE Eight from_halves(const uint16_t* from) {
  const auto four = [](const uint16_t* at) __attribute__((always_inline)) {
    const v128_t shifted = wasm_i32x4_shl(wasm_i32x4_load16x4(at), 13);  // bits 28 to 31 are the sign
    return wasm_f32x4_mul(wasm_v128_and(shifted, wasm_u32x4_const_splat(0x8fffffff)),
                          wasm_f32x4_const_splat(0x1p112f));
  };
  const v128_t both[2] = {four(from), four(from + 4)};
  Eight value;
  std::memcpy(&value, both, sizeof value);
  return value;
}
#else
OTARO_INLINE Eight from_halves(const uint16_t* from) {
  Words bits;
  for (int i = 0; i < 8; ++i) bits[i] = from[i];
  const Words magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
  const Words special = reinterpret_cast<Words>((bits & 0x7fff) >= 0x7c00),
              nan = reinterpret_cast<Words>((bits & 0x7fff) > 0x7c00);
  const Words scaled = reinterpret_cast<Words>(reinterpret_cast<Eight>(magnitude) * 0x1p112f);
  return reinterpret_cast<Eight>((scaled & ~special) | ((magnitude | 0x7f800000) & special) |
                                 (nan & 0x400000) | sign);
}
#endif
#endif

// Numbers as float16, `step` apart; false where one is not finite then.
OTARO_INLINE bool store_halves(const float* from, int64_t count, uint16_t* to, int64_t step) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t half = to_half(from[i]), magnitude = half & 0x7fff;
    largest = magnitude > largest ? magnitude : largest;
    to[i * step] = half;
  }
  return largest < 0x7c00;
}

static bool store_key(const float* key, int64_t head, uint16_t* segment, int64_t at) {
  return store_halves(key, head, segment + at / kTile * kTile * head + at % kTile, kTile);
}

static bool store_value(const float* value, int64_t head, uint16_t* row) {
  return store_halves(value, head, row, 1);
}

static bool encode(const float* row, int64_t length, int bits, uint8_t* base, uint8_t* const* planes,
                   int8_t* exponents) {
  for (int64_t block = 0; block * kBlock < length; ++block) {
    float values[kBlock] = {};
    const int64_t count = length - block * kBlock < kBlock ? length - block * kBlock : kBlock;
    std::memcpy(values, row + block * kBlock, static_cast<size_t>(count) * sizeof(float));
    uint32_t largest = 0;
    for (float value : values) {
      const uint32_t magnitude = to_bits(value) & kMagnitude;
      largest = magnitude > largest ? magnitude : largest;
    }
    int exponent = exponent_of(largest);
    if (exponent > kMaxCacheExponent) return false;
    if (exponent < kMinCacheExponent) exponent = kMinCacheExponent;
    exponents[block] = static_cast<int8_t>(exponent);
    const float scale = power_of_two(kFinest - exponent);
    int32_t u[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      const float scaled = values[i] * scale;
      const int32_t whole = static_cast<int32_t>(scaled);
      u[i] = cache_code(values[i], scaled, whole - (scaled < static_cast<float>(whole)));
    }
    for (int i = static_cast<int>(count); i < kBlock; ++i) u[i] = 0;  // FORMAT.md: padding is zero
    for (int i = 0; i < kBaseBytes; ++i)
      base[block * kBaseBytes + i] = static_cast<uint8_t>(u[digit_weight(i)] >> kPlanes |
                                                          (u[digit_weight(i + kBaseBytes)] >> kPlanes) << 4);
    for (int p = 0; p < bits - kCoarsest; ++p)
      for (int byte = 0; byte < kPlaneBytes; ++byte) {
        int bits_of = 0;
        for (int i = 0; i < 8; ++i) bits_of |= (u[plane_weight(8 * byte + i)] >> (kPlanes - 1 - p) & 1) << i;
        planes[p][block * kPlaneBytes + byte] = static_cast<uint8_t>(bits_of);
      }
  }
  return true;
}

// Sixteen floats side by side: one register of AVX-512, else two vectors.
#ifdef __AVX512F__
typedef float Sixteen __attribute__((vector_size(64)));

OTARO_INLINE Sixteen load16(const float* from) {
  Sixteen value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

OTARO_INLINE Sixteen load16(const uint16_t* from) {
  return reinterpret_cast<Sixteen>(
    _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}

OTARO_INLINE void store16(float* to, Sixteen value) { std::memcpy(to, &value, sizeof value); }
OTARO_INLINE Sixteen add_scaled(Sixteen sum, float weight, Sixteen value) { return sum + weight * value; }
#else
struct Sixteen {
  Eight low, high;
};

OTARO_INLINE Sixteen load16(const float* from) { return {load8(from), load8(from + 8)}; }
OTARO_INLINE Sixteen load16(const uint16_t* from) { return {from_halves(from), from_halves(from + 8)}; }
OTARO_INLINE void store16(float* to, const Sixteen& value) {
  store8(to, value.low), store8(to + 8, value.high);
}
OTARO_INLINE Sixteen add_scaled(const Sixteen& sum, float weight, const Sixteen& value) {
  return {sum.low + weight * value.low, sum.high + weight * value.high};
}
#endif

// sums[row * stride + j] = start + sum over i in [begin, end) of weights[row * weight_stride + i] *
// elements[i * step + j], j < 16.
template <int Rows, bool Add, class Element>
OTARO_INLINE void mix(const float* weights, int64_t weight_stride, const Element* elements, int64_t step,
                      int64_t begin, int64_t end, float* sums, int64_t stride) {
  Sixteen of_row[Rows];
  for (int r = 0; r < Rows; ++r) of_row[r] = Add ? load16(sums + r * stride) : Sixteen{};
  for (int64_t i = begin; i < end; ++i) {
    const Sixteen element = load16(elements + i * step);
    for (int r = 0; r < Rows; ++r) of_row[r] = add_scaled(of_row[r], weights[r * weight_stride + i], element);
  }
  for (int r = 0; r < Rows; ++r) store16(sums + r * stride, of_row[r]);
}

// As many rows at a time as registers hold.
template <bool Add, class Element>
OTARO_INLINE void mix_rows(int rows, const float* weights, int64_t weight_stride, const Element* elements,
                           int64_t step, int64_t begin, int64_t end, float* sums, int64_t stride) {
  for (; rows >= 4; rows -= 4, weights += 4 * weight_stride, sums += 4 * stride)
    mix<4, Add>(weights, weight_stride, elements, step, begin, end, sums, stride);
  if (rows == 3) mix<3, Add>(weights, weight_stride, elements, step, begin, end, sums, stride);
  if (rows == 2) mix<2, Add>(weights, weight_stride, elements, step, begin, end, sums, stride);
  if (rows == 1) mix<1, Add>(weights, weight_stride, elements, step, begin, end, sums, stride);
}

static void score(const float* queries, int rows, int64_t head, const uint16_t* keys, int64_t end,
                  float* scores) {
  for (int64_t tile = 0; tile < end; tile += kTile)
    mix_rows<false>(rows, queries, head, keys + tile * head, kTile, 0, head, scores + tile, kSegment);
}

static void weigh(float* scores, int rows, int64_t begin, int64_t end, float* states, int64_t head) {
  constexpr float kNever = -__builtin_inff();
  for (int r = 0; r < rows; ++r) {
    float* row = scores + r * kSegment;
    float* state = states + r * state_size(head);
    for (int64_t i = 0; i < begin; ++i) row[i] = kNever;
    for (int64_t i = end; i < kSegment; ++i) row[i] = kNever;
    Eight most = load8(row);
    for (int i = 8; i < kSegment; i += 8) {
      const Eight next = load8(row + i);
      most = choose8(next > most, next, most);
    }
    float largest = most[0];
    for (int i = 1; i < 8; ++i) largest = most[i] > largest ? most[i] : largest;
    Eight low = {}, high = {};
    for (int i = 0; i < kSegment; i += 16) {
      const Eight a = exp8(load8(row + i) - largest), b = exp8(load8(row + i + 8) - largest);
      store8(row + i, a), store8(row + i + 8, b);
      low += a, high += b;
    }
    state[0] = largest, state[1] = sum16(low, high);
    std::memset(state + kTile, 0, static_cast<size_t>(padded(head)) * sizeof(float));
  }
}

template <class Element>
OTARO_INLINE void gather(const float* weights, int rows, int64_t begin, int64_t end, const Element* values,
                         float* states, int64_t head) {
  const int64_t width = padded(head);
  for (int64_t j = 0; j < width; j += kTile)
    mix_rows<true>(rows, weights, kSegment, values + j, width, begin, end, states + kTile + j,
                   state_size(head));
}

static void gather_halves(const float* weights, int rows, int64_t begin, int64_t end, const uint16_t* values,
                          float* states, int64_t head) {
  gather(weights, rows, begin, end, values, states, head);
}

static void gather_floats(const float* weights, int rows, int64_t begin, int64_t end, const float* values,
                          float* states, int64_t head) {
  gather(weights, rows, begin, end, values, states, head);
}

static void merge(float* state, const float* next, int64_t head) {
  const float largest = next[0] > state[0] ? next[0] : state[0];
  const Eight factors = exp8(Eight{state[0] - largest, next[0] - largest});
  const float ours = factors[0], theirs = factors[1];
  state[0] = largest;
  state[1] = state[1] * ours + next[1] * theirs;
  for (int64_t i = kTile; i < state_size(head); ++i) state[i] = state[i] * ours + next[i] * theirs;
}

static void finish(const float* state, float* out, int64_t head) {
  for (int64_t i = 0; i < head; ++i) out[i] = state[kTile + i] / state[1];
}

const Floats kFloats = {rms_norm, add,           scale,         rope,      silu,        gelu,   cap,
                        dot,      softmax,       exponential,   store_key, store_value, encode, score,
                        weigh,    gather_halves, gather_floats, merge,     finish};

}  // namespace otaro::OTARO_ISA
#endif
