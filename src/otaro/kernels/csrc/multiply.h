// A product of a packed matrix with quantized activations of any number of tokens, on all threads.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "sefp.h"

namespace otaro {

// Some tokens by precision, ascending: bits_of(0), bits_of(1), ... are theirs.
template <class BitsOf>
std::vector<Span> spans_of(int tokens, BitsOf&& bits_of) {
  std::vector<Span> spans;
  for (int t = 0; t < tokens; ++t) {
    if (spans.empty() || spans.back().bits != bits_of(t))
      spans.push_back({t, 1, bits_of(t)});
    else
      ++spans.back().count;
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return a.bits != b.bits ? a.bits < b.bits : a.first < b.first;
  });
  return spans;
}

// Rows [begin, end) of the product, out [tokens, rows], on the calling thread. Spans ascend in bits, each of
// which `weight` has the planes for, and have all tokens of x.
inline void multiply_rows(const Kernels& kernels, const Packed& weight, const Activations& x,
                          const Span* spans, int count, int64_t begin, int64_t end, float* out) {
  if (const auto many = kernels.many; many && x.unit_blocks == 2)
    return many(weight, x, spans, count, begin, end, out, weight.rows);
  for (const Span* span = spans; span < spans + count; ++span) {
    Packed at = weight;
    at.bits = span->bits;
    const auto linear = kernels.linear[at.bits - kCoarsest][at.truncate];
    for (int first = span->first, last = first + span->count; first < last; first += kMaxTokens)
      linear(at, x.some(first, std::min(kMaxTokens, last - first)), begin, end, out + first * at.rows,
             at.rows);
  }
}

// All rows of tokens of one precision, shared out. A chunk's rows stay in the cache while its tokens pass.
inline void multiply(const Kernels& kernels, Pool& pool, const Packed& weight, const Activations& x,
                     float* out) {
  pool.run(weight.rows, pool.grain(weight.rows, 16), [&](int64_t begin, int64_t end) {
    for (int first = 0; first < x.tokens; first += kManyTokens) {
      const Span all{0, std::min(kManyTokens, x.tokens - first), weight.bits};
      multiply_rows(kernels, weight, x.some(first, all.count), &all, 1, begin, end,
                    out + first * weight.rows);
    }
  });
}

}  // namespace otaro
