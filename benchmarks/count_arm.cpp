// Tokens times a matrix, as often as asked for: what `count_arm.sh` counts the instructions of.
//
//   count_arm NAME BITS TOKENS TIMES     by our kernels of that name, at E5M<BITS>, in `midpoint`
//   count_arm ggml TYPE TOKENS TIMES     by ggml's vec_dot for q4_0 or q8_0, a row and a token at a time
//   (with
//                                        GGML defined)
//
// Quantizing tokens is no part of it, in either.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "multiply.h"
#include "scratch.h"
#include "sefp.h"

#ifdef GGML
extern "C" {
void ggml_vec_dot_q4_0_q8_0(int n, float* s, size_t bs, const void* vx, size_t bx, const void* vy, size_t by,
                            int nrc);
void ggml_vec_dot_q8_0_q8_0(int n, float* s, size_t bs, const void* vx, size_t bx, const void* vy, size_t by,
                            int nrc);
}
#endif

using namespace otaro;

constexpr int64_t kRows = 16, kLength = 4096;

int main(int count, char** arguments) {
  if (count != 5) return 2;
  const std::string name = arguments[1], what = arguments[2];
  const int tokens = std::atoi(arguments[3]), times = std::atoi(arguments[4]);
  std::vector<uint8_t> bytes(kRows * kLength * 2, 0x5a);
  std::vector<float> x(kLength, 1.0f), out(static_cast<size_t>(tokens) * kRows);
#ifdef GGML
  if (name == "ggml") {
    const bool four = what == "q4_0";
    const size_t row = kLength / 32 * (four ? 18 : 34);
    const std::vector<uint8_t> of_x(kLength / 32 * 34, 0x21);
    for (int i = 0; i < times * tokens; ++i)
      for (int64_t r = 0; r < kRows; ++r)
        (four ? ggml_vec_dot_q4_0_q8_0 : ggml_vec_dot_q8_0_q8_0)(kLength, &out[r], 0, bytes.data() + r * row,
                                                                 0, of_x.data(), 0, 1);
    return 0;
  }
#endif
  for (const Kernels* kernels : {&kNeon, &kDotprod, &kI8mm}) {
    if (name != kernels->name) continue;
    Packed weight;
    weight.rows = kRows, weight.length = kLength, weight.bits = std::atoi(what.c_str());
    weight.base = bytes.data(), weight.scales = bytes.data();
    for (const uint8_t*& plane : weight.planes) plane = bytes.data();
    Scratch scratch;
    const Activations all = scratch.activations(*kernels, weight, tokens);
    for (int t = 0; t < tokens; ++t) kernels->quantize(x.data(), kLength, all, t);
    const Span span{0, tokens, weight.bits};
    for (int i = 0; i < times; ++i) multiply_rows(*kernels, weight, all, &span, 1, 0, kRows, out.data());
    return 0;
  }
  return 1;
}
