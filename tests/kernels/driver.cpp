// The kernels without Python, for CPUs that are emulated: `driver CASES` reads what the reference computed
// (cases.py writes it) and compares every instruction set that this CPU can run with it, bit for bit; the
// decoder's work on floats and a whole small decoder are compared with the portable ones. The last line has a
// digest of the latter, to be the same on every CPU. `driver --list` says what this CPU can run, the best
// first; `driver CASES NAME` has only these instructions compute, whether or not the CPU can.
//
// NaN counts as equal to NaN: its sign and payload are no result. Packed bytes end where a page ends that can
// be read, and the next one cannot.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "decoder.h"
#include "multiply.h"
#include "scratch.h"
#include "select.h"

using namespace otaro;

namespace {

const std::vector<const Kernels*> kAll = {
#ifdef OTARO_X86
  &kAvx512,  &kAvx2,
#endif
#ifdef OTARO_AVXVNNI
  &kAvxVnni,
#endif
#ifdef OTARO_ARM
  &kI8mm,    &kDotprod, &kNeon,
#endif
  &kPortable};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "error: %s\n", what.c_str());
  std::exit(1);
}

// Bytes before a page that cannot be read.
class Guarded {
 public:
  explicit Guarded(size_t size) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t whole = (size + page - 1) / page * page;
    mapped_ = whole + page;
    memory_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) fail("no memory");
    auto* start = static_cast<uint8_t*>(memory_);
    if (mprotect(start + whole, page, PROT_NONE)) fail("a page could not be protected");
    data = start + whole - size;
  }
  Guarded(const Guarded&) = delete;
  Guarded(Guarded&& other) noexcept : data(other.data), memory_(other.memory_), mapped_(other.mapped_) {
    other.memory_ = nullptr;
  }
  ~Guarded() {
    if (memory_) munmap(memory_, mapped_);
  }

  uint8_t* data;

 private:
  void* memory_;
  size_t mapped_;
};

class Reader {
 public:
  explicit Reader(const char* path) : file_(std::fopen(path, "rb")) {
    if (!file_) fail(std::string("cannot read ") + path);
  }
  Reader(const Reader&) = delete;
  ~Reader() { std::fclose(file_); }

  bool more() {
    const int next = std::fgetc(file_);
    if (next != EOF) std::ungetc(next, file_);
    return next != EOF;
  }

  void read(void* to, size_t size) {
    if (size && std::fread(to, 1, size, file_) != size) fail("the cases end too early");
  }

  template <class Number>
  std::vector<Number> numbers(int64_t count) {
    std::vector<Number> all(static_cast<size_t>(count));
    read(all.data(), all.size() * sizeof(Number));
    return all;
  }

  Guarded bytes(int64_t count) {
    Guarded all(static_cast<size_t>(count));
    read(all.data, static_cast<size_t>(count));
    return all;
  }

 private:
  std::FILE* file_;
};

bool same(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b)); }
bool same(int a, int b) { return a == b; }

template <class Number>
void expect(const Number* got, const Number* expected, int64_t count, const std::string& what) {
  for (int64_t i = 0; i < count; ++i)
    if (!same(got[i], expected[i]))
      fail(what + " differ at " + std::to_string(i) + ": " + std::to_string(got[i]) + ", expected " +
           std::to_string(expected[i]));
}

// One matrix at one precision with some tokens. cases.py has the order.
struct Case {
  int64_t number, rows, length, group_size, bits, truncate, scale_exponent, tokens;
  Packed weight;
  std::vector<Guarded> memory;
  std::vector<float> x, scales, products, values;
  std::vector<int16_t> codes;
  std::vector<int32_t> dots, mix;  // mix: every token's bits

  explicit Case(Reader& from) {
    const std::vector<int64_t> head = from.numbers<int64_t>(8);
    number = head[0], rows = head[1], length = head[2], group_size = head[3];
    bits = head[4], truncate = head[5], scale_exponent = head[6], tokens = head[7];
    weight.rows = rows, weight.length = length, weight.group_size = static_cast<int>(group_size);
    weight.bits = static_cast<int>(bits), weight.truncate = truncate != 0;
    weight.scale_exponent = static_cast<int>(scale_exponent);
    const auto bytes = [&](int64_t count) {
      memory.push_back(from.bytes(count));
      return memory.back().data;
    };
    weight.base = bytes(rows * weight.blocks() * kBaseBytes);
    for (int p = 0; p < bits - kCoarsest; ++p) weight.planes[p] = bytes(rows * weight.blocks() * kPlaneBytes);
    weight.scales = bytes(rows * weight.groups());
    x = from.numbers<float>(tokens * length);
    mix = from.numbers<int32_t>(tokens);
    codes = from.numbers<int16_t>(tokens * length);
    scales = from.numbers<float>(tokens * weight.units());
    dots = from.numbers<int32_t>(tokens * rows * weight.units());
    products = from.numbers<float>(tokens * rows);
    values = from.numbers<float>(rows * length);
  }

  bool mixed() const {
    for (const int32_t one : mix)
      if (one != bits) return true;
    return false;
  }

  void check(const Kernels& kernels, Pool& pool) const {
    const std::string name = std::string(kernels.name) + ", case " + std::to_string(number) + " (" +
                             std::to_string(rows) + "x" + std::to_string(length) + " in groups of " +
                             std::to_string(group_size) + ", E5M" + std::to_string(bits) +
                             (truncate ? ", truncate): " : "): ");
    Scratch scratch;
    const Activations all = scratch.activations(kernels, weight, static_cast<int>(tokens));
    for (int t = 0; t < tokens; ++t) kernels.quantize(x.data() + t * length, length, all, t);
    check_quantized(kernels, all, name);
    if (mixed()) return check_mixed(kernels, all, name);
    const int64_t units = weight.units();
    for (int64_t first = 0; first < tokens; first += kMaxTokens) {
      const int some = static_cast<int>(std::min<int64_t>(kMaxTokens, tokens - first));
      std::vector<int32_t> got(static_cast<size_t>(some * rows * units), 1);
      dots_of(kernels, weight)(weight, all.some(static_cast<int>(first), some), 0, rows, got.data());
      expect(got.data(), dots.data() + first * rows * units, some * rows * units, name + "integers");
    }
    for (const int64_t some : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{5}, int64_t{8}, tokens}) {
      if (some > tokens) continue;
      // As many as there are by themselves, so that they lie as close as they can.
      Scratch own;
      const Activations few = own.activations(kernels, weight, static_cast<int>(some));
      for (int t = 0; t < some; ++t) kernels.quantize(x.data() + t * length, length, few, t);
      std::vector<float> got(static_cast<size_t>(some * rows), 1.0f);
      multiply(kernels, pool, weight, few, got.data());
      expect(got.data(), products.data(), some * rows, name + std::to_string(some) + " tokens' products");
    }
    std::vector<float> got(static_cast<size_t>(length));
    for (int64_t row = 0; row < rows; ++row) {
      kernels.decode[bits - kCoarsest][truncate](weight, row, got.data());
      expect(got.data(), values.data() + row * length, length, name + "values");
    }
  }

  void check_quantized(const Kernels& kernels, const Activations& got, const std::string& name) const {
    const int64_t size = int64_t{kBlock} * got.run_blocks;
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t run = 0; run < got.runs(); ++run) {
        const int8_t* digits = got.digits + (run * got.stride + t) * 2 * size;
        for (int i = 0; i < size; ++i) {
          const int64_t k = run * size + kernels.digit_weight(i, got.run_blocks);
          if (k < length && digits[i] * 256 + digits[size + i] != codes[static_cast<size_t>(t * length + k)])
            fail(name + "activations differ");
        }
      }
    expect(got.scales, scales.data(), tokens * got.units, name + "activations' scales");
  }

  void check_mixed(const Kernels& kernels, const Activations& all, const std::string& name) const {
    const std::vector<Span> spans =
      spans_of(static_cast<int>(tokens), [&](int t) { return mix[static_cast<size_t>(t)]; });
    Packed finest = weight;
    finest.bits = spans.back().bits;
    std::vector<float> got(products.size(), 1.0f);
    multiply_rows(kernels, finest, all, spans.data(), static_cast<int>(spans.size()), 0, rows, got.data());
    expect(got.data(), products.data(), tokens * rows, name + "products of mixed precisions");
  }
};

// The same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint32_t word() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 32);
  }
  float number(float size = 1) {  // of about this size
    return (static_cast<float>(word() >> 8) * 0x1p-23f - 1.0f) * size;
  }
  std::vector<float> numbers(int64_t count, float size = 1) {
    std::vector<float> all(static_cast<size_t>(count));
    for (float& one : all) one = number(size);
    return all;
  }

 private:
  uint64_t state_;
};

// What the decoder does with floats, all of it one after the other, on numbers that are the same every time.
std::vector<float> floats_by(const Floats& floats) {
  constexpr float kInf = INFINITY;
  std::vector<float> results;
  const auto keep = [&](const std::vector<float>& some) {
    results.insert(results.end(), some.begin(), some.end());
  };
  for (const int64_t count : {1, 5, 7, 8, 9, 15, 16, 17, 31, 64, 100, 576}) {
    Random random(static_cast<uint64_t>(count));
    std::vector<float> x = random.numbers(count, 4), y = random.numbers(count, 30), out(x.size());
    const auto in_place = [&](auto function) {
      std::vector<float> changed = x;
      function(changed.data());
      keep(changed);
    };
    floats.rms_norm(x.data(), y.data(), 1e-5f, count, out.data()), keep(out);
    in_place([&](float* at) { floats.add(at, y.data(), count); });
    in_place([&](float* at) { floats.scale(at, 1.7f, count); });
    in_place([&](float* at) { floats.silu(at, y.data(), count); });
    in_place([&](float* at) { floats.gelu(at, y.data(), count); });
    in_place([&](float* at) { floats.cap(at, 3.0f, count); });
    in_place([&](float* at) { floats.softmax(at, count); });
    keep({floats.dot(x.data(), y.data(), count)});
    if (count % 2 == 0)
      in_place([&](float* at) { floats.rope(at, y.data(), y.data() + count / 2, count / 2); });
    for (float& one : x) one *= 40;
    x[0] = -kInf, x[static_cast<size_t>(count / 2)] = kInf, x[static_cast<size_t>(count - 1)] = NAN;
    floats.exponential(x.data(), out.data(), count), keep(out);
  }
  // Float16, where rounding is hard: every exponent, and numbers next to and on ties.
  std::vector<float> hard;
  for (int e = -27; e <= 17; ++e)
    for (const float f : {1.0f, 1.00048828125f, 1.0009765625f, 1.5f, 1.99951171875f, 1.9999f})
      for (const float sign : {1.0f, -1.0f}) hard.push_back(sign * std::ldexp(f, e));
  hard.insert(hard.end(), {0.0f, -0.0f, kInf, -kInf, 65504.0f, 65519.996f, 65520.0f, 1e-40f});
  for (const float one : hard) {
    uint16_t row[kTile] = {};
    keep({static_cast<float>(floats.store_value(&one, 1, row)), static_cast<float>(row[0])});
    float state[2 * kTile] = {};
    const float weight[kSegment] = {1.0f};
    floats.gather_halves(weight, 1, 0, 1, row, state, 1);
    keep({state[kTile]});
  }
  // Attention over a segment, for heads that fill tiles and that do not.
  for (const int64_t head : {16, 40, 64}) {
    constexpr int kRows = 7;
    Random random(static_cast<uint64_t>(head));
    const auto size = static_cast<size_t>(kSegment * padded(head));
    std::vector<uint16_t> keys(size), values(size);
    for (int64_t at = 0; at < kSegment; ++at) {
      const std::vector<float> key = random.numbers(head), value = random.numbers(head);
      floats.store_key(key.data(), head, keys.data(), at);
      floats.store_value(value.data(), head, values.data() + at * padded(head));
    }
    const std::vector<float> queries = random.numbers(kRows * head, 3),
                             in_floats = random.numbers(static_cast<int64_t>(size));
    for (const int64_t end : {1, 16, 37, 64}) {
      std::vector<float> scores(kRows * kSegment), states(static_cast<size_t>(2 * kRows * state_size(head)));
      float* second = states.data() + kRows * state_size(head);
      floats.score(queries.data(), kRows, head, keys.data(), end, scores.data());
      floats.weigh(scores.data(), kRows, end / 3, end, states.data(), head);
      keep(scores);
      floats.gather_halves(scores.data(), kRows, end / 3, end, values.data(), states.data(), head);
      floats.weigh(scores.data(), kRows, 0, end, second, head);
      floats.gather_floats(scores.data(), kRows, 0, end, in_floats.data(), second, head);
      std::vector<float> out(static_cast<size_t>(head));
      floats.merge(states.data(), second, head);
      floats.finish(states.data(), out.data(), head);
      keep(out);
    }
    for (const int bits : {3, 5, 8}) {
      const int64_t blocks = (head + kBlock - 1) / kBlock;
      std::vector<uint8_t> base(static_cast<size_t>(blocks * kBaseBytes)),
        bytes(static_cast<size_t>(kPlanes * blocks * kPlaneBytes));
      std::vector<int8_t> exponents(static_cast<size_t>(blocks));
      uint8_t* planes[kPlanes];
      for (int p = 0; p < kPlanes; ++p) planes[p] = bytes.data() + p * blocks * kPlaneBytes;
      const bool held = floats.encode(queries.data(), head, bits, base.data(), planes, exponents.data());
      keep({static_cast<float>(held)});
      keep({base.begin(), base.end()}), keep({bytes.begin(), bytes.end()});
      keep({exponents.begin(), exponents.end()});
    }
  }
  return results;
}

// A decoder of two layers with random bytes, which reads a prompt and then tokens of two sequences, one of
// which has a packed cache, at changing precisions.
class SmallDecoder {
 public:
  SmallDecoder() {
    shape_.hidden = 192, shape_.heads = 6, shape_.kv_heads = 2, shape_.head = 40, shape_.vocabulary = 77;
    shape_.eps = 1e-5f, shape_.scale = 0.158f, shape_.logit_cap = 30;
    const int64_t queries = shape_.heads * shape_.head, keys = shape_.kv_heads * shape_.head;
    for (Layer& layer : layers_) {
      layer.attention_norm = norm(), layer.mlp_norm = norm();
      layer.query = linear(queries, shape_.hidden), layer.key = linear(keys, shape_.hidden);
      layer.value = linear(keys, shape_.hidden), layer.output = linear(shape_.hidden, queries);
      layer.gate = linear(kWidth, shape_.hidden), layer.up = linear(kWidth, shape_.hidden);
      layer.down = linear(shape_.hidden, kWidth);
    }
    layers_[1].window = 9;
    embedding_ = linear(shape_.vocabulary, shape_.hidden);
  }

  std::vector<float> logits() {
    const float* last = norm();
    Rope rope;
    for (int64_t i = 0; i < shape_.head / 2; ++i)
      rope.frequencies.push_back(1.0f / static_cast<float>(1 + 3 * i));
    Decoder decoder(shape_, layers_, embedding_, embedding_, last, {rope});
    decoder.extend_positions(100);
    Cache plain(2, shape_, 0), packed(2, shape_, 6);
    std::vector<float> results;
    std::vector<uint8_t> bits(static_cast<size_t>(number_)), others(bits.size());
    for (int step = 0; step < 8; ++step) {
      for (size_t i = 0; i < bits.size(); ++i)
        bits[i] = static_cast<uint8_t>(3 + (static_cast<size_t>(step) + i) % 6),
        others[i] = static_cast<uint8_t>(8 - step % 6);
      const int64_t first = step ? 1 : 33, second = step ? 1 : 18;
      std::vector<int64_t> ids, wanted = {first - 1, first + second - 1};
      for (int64_t i = 0; i < first + second; ++i) ids.push_back((i * 31 + step * 7) % shape_.vocabulary);
      std::vector<float> logits(static_cast<size_t>(2 * shape_.vocabulary));
      const auto refused = decoder.step(
        ids.data(), {{&plain, first, bits.data()}, {&packed, second, others.data()}}, wanted, logits.data());
      if (!refused.empty()) fail("the small decoder's cache refused a key or value");
      results.insert(results.end(), logits.begin(), logits.end());
    }
    return results;
  }

 private:
  static constexpr int64_t kWidth = 320;

  const float* norm() {
    std::vector<float> weight = random_.numbers(shape_.hidden, 0.2f);
    for (float& one : weight) one += 1;
    norms_.push_back(std::move(weight));
    return norms_.back().data();
  }

  Linear linear(int64_t rows, int64_t length) {
    Linear made;
    Packed& weight = made.weight;
    weight.rows = rows, weight.length = length, weight.bits = kFinest, weight.scale_exponent = -4;
    const auto bytes = [&](int64_t count, auto&& byte) {
      memory_.emplace_back(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) memory_.back().data[i] = static_cast<uint8_t>(byte());
      return memory_.back().data;
    };
    const auto any = [&] { return random_.word() >> 24; };
    weight.base = bytes(rows * weight.blocks() * kBaseBytes, any);
    for (const uint8_t*& plane : weight.planes) plane = bytes(rows * weight.blocks() * kPlaneBytes, any);
    weight.scales = bytes(rows * weight.groups(), [&] { return (random_.word() & 0x87) | 0x28; });
    made.stride = rows, made.number = number_++;
    return made;
  }

  Random random_{1};
  Shape shape_;
  std::vector<Layer> layers_ = std::vector<Layer>(2);
  Linear embedding_;
  int number_ = 0;
  std::vector<Guarded> memory_;
  std::vector<std::vector<float>> norms_;
};

uint64_t digest(const std::vector<float>& numbers) {
  uint64_t hash = 14695981039346656037u;
  for (const float one : numbers) {
    uint32_t bits = 0x7fc00000;
    if (!std::isnan(one)) std::memcpy(&bits, &one, sizeof bits);
    hash = (hash ^ bits) * 1099511628211u;
  }
  return hash;
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> runnable = available();
  if (count == 2 && std::string(arguments[1]) == "--list") {
    for (const std::string& name : runnable) std::printf("%s\n", name.c_str());
    if (runnable.front() != kernels().name) fail("the best is not the one that serves");
    return 0;
  }
  if (count < 2 || count > 3) fail("usage: driver CASES [NAME], or driver --list");
  std::vector<const Kernels*> tested;
  for (const Kernels* one : kAll) {
    const bool can = std::find(runnable.begin(), runnable.end(), one->name) != runnable.end();
    if (!can && choose(one->name)) fail(std::string("what this CPU cannot run was chosen: ") + one->name);
    if (count == 3 ? std::string(arguments[2]) == one->name : can) tested.push_back(one);
  }
  if (tested.empty()) fail("no such instructions in this build");
  int64_t cases = 0;
  for (Reader from(arguments[1]); from.more(); ++cases) {
    const Case one(from);
    Pool::shared().set_threads(cases % 2 ? 1 : 2);
    for (const Kernels* kernels : tested) one.check(*kernels, Pool::shared());
  }
  if (!cases) fail("no cases");
  const std::vector<float> floats = floats_by(portable::kFloats);
  choose("portable");
  SmallDecoder decoder;
  const std::vector<float> logits = decoder.logits();
  for (const float one : logits)
    if (!std::isfinite(one)) fail("the small decoder's logits are not finite");
  std::string names;
  for (const Kernels* kernels : tested) {
    const std::string name = kernels->name;
    names += name + " ";
    const std::vector<float> got = floats_by(floats_of(*kernels));
    if (got.size() != floats.size()) fail(name + ": another number of floats");
    expect(got.data(), floats.data(), static_cast<int64_t>(got.size()), name + ": the decoder's floats");
    if (!choose(name)) fail(name + " cannot be chosen");
    for (const int threads : {1, 2}) {
      Pool::shared().set_threads(threads);
      const std::vector<float> again = SmallDecoder().logits();
      expect(again.data(), logits.data(), static_cast<int64_t>(logits.size()), name + ": logits");
    }
  }
  std::printf("%lld cases, %zu floats, %zu logits: the same bits by %s\n", static_cast<long long>(cases),
              floats.size(), logits.size(), names.c_str());
  std::printf("digest %016llx %016llx\n", static_cast<unsigned long long>(digest(floats)),
              static_cast<unsigned long long>(digest(logits)));
  return 0;
}
