// A product of a packed matrix with quantized activations of any number of tokens, on all threads.
#pragma once

#include <algorithm>

#include "pool.h"
#include "sefp.h"

namespace otaro {

// Rows [begin, end) of the product, out [tokens, rows], on the calling thread.
inline void multiply_rows(const Kernels& kernels, const Packed& weight, const Activations& x, int64_t begin,
                          int64_t end, float* out) {
  const auto many = kernels.many[weight.bits - kCoarsest][weight.truncate];
  if (many && x.tokens >= kernels.many_from[weight.bits - kCoarsest] && x.unit_blocks == 2)
    return many(weight, x, begin, end, out, weight.rows);
  const auto linear = kernels.linear[weight.bits - kCoarsest][weight.truncate];
  for (int first = 0; first < x.tokens; first += kMaxTokens)
    linear(weight, x.some(first, std::min(kMaxTokens, x.tokens - first)), begin, end,
           out + first * weight.rows, weight.rows);
}

// All rows, shared out. A chunk's rows stay in the cache while its tokens pass.
inline void multiply(const Kernels& kernels, Pool& pool, const Packed& weight, const Activations& x,
                     float* out) {
  pool.run(weight.rows, pool.grain(weight.rows, 16),
           [&](int64_t begin, int64_t end) { multiply_rows(kernels, weight, x, begin, end, out); });
}

}  // namespace otaro
