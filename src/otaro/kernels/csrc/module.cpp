// The Python module `otaro.kernels._cpu`: checks what it is given, cuts work into rows for the pool, and
// knows no torch.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "arrays.h"
#include "decoder_module.h"
#include "multiply.h"
#include "pool.h"
#include "scratch.h"
#include "select.h"
#include "sefp.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace otaro {
namespace {

// Numbers are read and written where they lie, and C++ wants them at multiples of their size.
template <class AnyArray>
void check_aligned(const AnyArray& array, const char* what) {
  check(reinterpret_cast<uintptr_t>(array.data()) % alignof(decltype(*array.data())) == 0, what);
}

Activations quantized(const Kernels& kernels, const Array<const float, 2>& x, const Packed& weight,
                      Scratch& scratch) {
  check(static_cast<int64_t>(x.shape(1)) == weight.length, "x must be [tokens, length]");
  check(static_cast<int64_t>(x.shape(0)) <= kMostWeights, "x has too many tokens");
  check_aligned(x, "x must start at a multiple of 4 bytes");
  const Activations activations = scratch.activations(kernels, weight, static_cast<int>(x.shape(0)));
  for (int t = 0; t < activations.tokens; ++t)
    kernels.quantize(x.data() + t * weight.length, weight.length, activations, t);
  return activations;
}

void linear(const Array<const float, 2>& x, const Bytes& base, const Bytes& scales,
            const std::vector<Bytes>& planes, int64_t length, int group_size, bool truncate,
            int scale_exponent, const Array<float, 2>& out) {
  const Packed weight = packed_rows(base, scales, planes, length, group_size, truncate, scale_exponent);
  check(out.shape(0) == x.shape(0) && static_cast<int64_t>(out.shape(1)) == weight.rows,
        "out must be [tokens, rows]");
  check_aligned(out, "out must start at a multiple of 4 bytes");
  nb::gil_scoped_release released;
  const Kernels& chosen = kernels();  // once: another thread may choose others meanwhile
  Scratch scratch;
  multiply(chosen, Pool::shared(), weight, quantized(chosen, x, weight, scratch), out.data());
}

// Every token at its own mantissa bits, as the decoder multiplies; for tests.
void mixed(const Array<const float, 2>& x, const Bytes& base, const Bytes& scales,
           const std::vector<Bytes>& planes, int64_t length, int group_size, bool truncate,
           int scale_exponent, const std::vector<int>& bits, const Array<float, 2>& out) {
  Packed weight = packed_rows(base, scales, planes, length, group_size, truncate, scale_exponent);
  check(x.shape(0) == bits.size() && x.shape(0) <= kManyTokens && out.shape(0) == x.shape(0) &&
          static_cast<int64_t>(out.shape(1)) == weight.rows,
        "bits must be [tokens] and out [tokens, rows], of 64 tokens at most");
  for (const int one : bits)
    check(one >= kCoarsest && one <= weight.bits, "bits must be those of the planes");
  check_aligned(out, "out must start at a multiple of 4 bytes");
  if (bits.empty()) return;
  const Kernels& chosen = kernels();
  Scratch scratch;
  const Activations activations = quantized(chosen, x, weight, scratch);
  const std::vector<Span> spans =
    spans_of(activations.tokens, [&](int t) { return bits[static_cast<size_t>(t)]; });
  weight.bits = spans.back().bits;
  multiply_rows(chosen, weight, activations, spans.data(), static_cast<int>(spans.size()), 0, weight.rows,
                out.data());
}

void dots(const Array<const float, 2>& x, const Bytes& base, const Bytes& scales,
          const std::vector<Bytes>& planes, int64_t length, int group_size, bool truncate, int scale_exponent,
          const Array<int32_t, 3>& out) {
  const Packed weight = packed_rows(base, scales, planes, length, group_size, truncate, scale_exponent);
  check(x.shape(0) <= kMaxTokens, "at most eight tokens");
  check(out.shape(0) == x.shape(0) && static_cast<int64_t>(out.shape(1)) == weight.rows &&
          static_cast<int64_t>(out.shape(2)) == weight.units(),
        "out must be [tokens, rows, units]");
  check_aligned(out, "out must start at a multiple of 4 bytes");
  const Kernels& chosen = kernels();
  Scratch scratch;
  const Activations activations = quantized(chosen, x, weight, scratch);
  dots_of(chosen, weight)(weight, activations, 0, weight.rows, out.data());
}

void quantize(const Array<const float, 2>& x, int group_size, const Array<int16_t, 2>& codes,
              const Array<float, 2>& scales) {
  Packed weight;  // only its shape matters
  weight.length = static_cast<int64_t>(x.shape(1));
  weight.group_size = group_size;
  check_sizes(weight.length, group_size);
  check(codes.shape(0) == x.shape(0) && codes.shape(1) == x.shape(1), "codes must have the shape of x");
  check(scales.shape(0) == x.shape(0) && static_cast<int64_t>(scales.shape(1)) == weight.units(),
        "scales must be [tokens, units]");
  check_aligned(codes, "codes must start at a multiple of 2 bytes");
  check_aligned(scales, "scales must start at a multiple of 4 bytes");
  const Kernels& chosen = kernels();
  Scratch scratch;
  const Activations quantized = otaro::quantized(chosen, x, weight, scratch);
  // From the bytes, so that a test of these codes is one of the order that kernels read.
  const int64_t size = int64_t{kBlock} * quantized.run_blocks;
  for (int64_t t = 0; t < quantized.tokens; ++t)
    for (int64_t run = 0; run < quantized.runs(); ++run) {
      const int8_t* digits = quantized.digits + (run * quantized.stride + t) * 2 * size;
      for (int i = 0; i < size; ++i) {
        const int64_t k = run * size + chosen.digit_weight(i, quantized.run_blocks);
        if (k < weight.length)
          codes.data()[t * weight.length + k] = static_cast<int16_t>(digits[i] * 256 + digits[size + i]);
      }
    }
  std::copy_n(quantized.scales, quantized.tokens * quantized.units, scales.data());
}

// The values of the rows with the given numbers, or of all rows.
void decode(const Bytes& base, const Bytes& scales, const std::vector<Bytes>& planes, int64_t length,
            int group_size, bool truncate, int scale_exponent,
            const std::optional<Array<const int64_t, 1>>& rows, const Array<float, 2>& out) {
  const Packed weight = packed_rows(base, scales, planes, length, group_size, truncate, scale_exponent);
  const int64_t count = rows ? static_cast<int64_t>(rows->shape(0)) : weight.rows;
  check(static_cast<int64_t>(out.shape(0)) == count && static_cast<int64_t>(out.shape(1)) == length,
        "out must be [rows, length]");
  check_aligned(out, "out must start at a multiple of 4 bytes");
  // A copy: what was checked stays what is used, whoever writes to the array meanwhile.
  std::vector<int64_t> wanted;
  if (rows) {
    check_aligned(*rows, "rows must start at a multiple of 8 bytes");
    wanted.assign(rows->data(), rows->data() + count);
    for (int64_t row : wanted) check(row >= 0 && row < weight.rows, "a row number is out of range");
  }
  nb::gil_scoped_release released;
  Pool& pool = Pool::shared();
  const auto decode_row = kernels().decode[weight.bits - kCoarsest][weight.truncate];
  pool.run(count, pool.grain(count), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) decode_row(weight, rows ? wanted[i] : i, out.data() + i * length);
  });
}

}  // namespace
}  // namespace otaro

NB_MODULE(_cpu, m) {
  using namespace otaro;
  // A copy would swallow what is written to it.
  const auto plain = [](const char* name) { return nb::arg(name).noconvert(); };
  m.def("linear", linear, plain("x"), plain("base"), plain("scales"), plain("planes"), "length"_a,
        "group_size"_a, "truncate"_a, "scale_exponent"_a, plain("out"));
  m.def("mixed", mixed, plain("x"), plain("base"), plain("scales"), plain("planes"), "length"_a,
        "group_size"_a, "truncate"_a, "scale_exponent"_a, "bits"_a, plain("out"));
  m.def("dots", dots, plain("x"), plain("base"), plain("scales"), plain("planes"), "length"_a, "group_size"_a,
        "truncate"_a, "scale_exponent"_a, plain("out"));
  m.def("quantize", quantize, plain("x"), "group_size"_a, plain("codes"), plain("scales"));
  m.def("decode", decode, plain("base"), plain("scales"), plain("planes"), "length"_a, "group_size"_a,
        "truncate"_a, "scale_exponent"_a, plain("rows").none(), plain("out"));
  m.def(
    "unit_size",
    [](int group_size) {
      Packed weight;
      weight.group_size = group_size;
      return weight.unit_blocks() * kBlock;
    },
    "group_size"_a);
  m.def("set_threads", [](int count) { Pool::shared().set_threads(count); }, "count"_a);
  m.def("available", available, "Names of the instruction sets that this CPU can run, the best first.");
  m.def("chosen", [] { return std::string(kernels().name); });
  m.def(
    "choose", [](const std::string& name) { check(choose(name), "this CPU cannot run '" + name + "'"); },
    "name"_a);
  define_decoder(m);
}
