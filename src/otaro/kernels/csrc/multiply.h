// A product of a packed matrix with quantised activations of any number of tokens, on all threads.
#pragma once

#include <algorithm>

#include "pool.h"
#include "sefp.h"

namespace otaro {

// out [tokens, rows]. Rows are shared out; a chunk's rows stay in the cache while its tokens pass, eight at a time.
inline void multiply(const Kernels& kernels, Pool& pool, const Packed& weight, const Activations& x, float* out) {
  const auto linear = kernels.linear[weight.bits - kCoarsest][weight.truncate];
  pool.run(weight.rows, pool.grain(weight.rows, 4), [&](int64_t begin, int64_t end) {
    for (int first = 0; first < x.tokens; first += kMaxTokens)
      linear(weight, x.some(first, std::min(kMaxTokens, x.tokens - first)), begin, end, out + first * weight.rows, weight.rows);
  });
}

}  // namespace otaro
