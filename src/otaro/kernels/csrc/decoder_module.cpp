// The decoder's part of the Python module: checks everything it is given, and keeps alive what the decoder
// points into.
#include "decoder_module.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "arrays.h"
#include "decoder.h"
#include "select.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace otaro {
namespace {

using Vector = Array<const float, 1>;

// A packed matrix of the mapped file at its coarsest. It never changes: further planes are a decoder's, under
// its mutex.
struct Matrix {
  Bytes base, scales;
  Packed packed;

  Matrix(Bytes base, Bytes scales, int64_t length, int group_size, bool truncate, int scale_exponent)
    : base(std::move(base)),
      scales(std::move(scales)),
      packed(packed_rows(this->base, this->scales, {}, length, group_size, truncate, scale_exponent)) {}
};

// What Python says of a model, a layer or a matrix: every field by its name, and none but those that are
// taken.
class Fields {
 public:
  explicit Fields(nb::handle given) : given_(nb::cast<nb::dict>(given)) {}

  nb::object operator[](const char* name) {
    check(given_.contains(name), "the description lacks " + std::string(name));
    taken_.insert(name);
    return given_[name];
  }
  template <class T>
  T get(const char* name) {
    return nb::cast<T>((*this)[name]);
  }
  void check_all_taken() const {
    for (const auto& [name, value] : given_)
      check(taken_.count(nb::cast<std::string>(name)), "the decoder knows no " + nb::cast<std::string>(name));
  }

 private:
  const nb::dict given_;
  std::set<std::string> taken_;
};

// A decoder and what it points into. Python's threads may call anything at any time: whatever changes is
// behind the decoder's mutex, for which nobody waits with the GIL.
class Owner {
 public:
  // What these dictionaries hold: runtime/decode.py.
  Owner(const nb::dict& given, const nb::list& layers) {
    Fields model(given);
    Shape shape;
    shape.heads = model.get<int64_t>("heads"), shape.kv_heads = model.get<int64_t>("kv_heads");
    shape.head = model.get<int64_t>("head_dim");
    shape.eps = model.get<float>("eps"), shape.scale = model.get<float>("scale");
    shape.attention_cap = model.get<float>("attention_cap"), shape.logit_cap = model.get<float>("logit_cap");
    shape.embedding_scale = model.get<float>("embedding_scale");
    shape.residual_scale = model.get<float>("residual_scale");
    shape.logit_scale = model.get<float>("logit_scale");
    shape.gelu = model.get<bool>("gelu");
    check(shape.kv_heads > 0 && shape.heads > 0 && shape.heads % shape.kv_heads == 0,
          "heads must be a multiple of kv_heads");
    check(shape.head > 0 && shape.head % 2 == 0 && shape.head <= kMaxHead,
          "head must be even and at most " + std::to_string(kMaxHead));
    check(layers.size() > 0, "there must be a layer");
    std::vector<Rope> ropes;
    for (const auto& [frequencies, scale] :
         model.get<std::vector<std::pair<std::vector<float>, float>>>("ropes")) {
      check(!frequencies.empty() && 2 * static_cast<int64_t>(frequencies.size()) <= shape.head,
            "a rope rotates at most a whole head");
      ropes.push_back({frequencies, scale});
    }
    Linear embedding, head;
    const Packed& rows = nb::cast<const Matrix&>(Fields(model["embedding"])["matrix"]).packed;
    shape.vocabulary = rows.rows, shape.hidden = rows.length;
    take(model["embedding"], 1, shape.vocabulary, shape.hidden, embedding);
    std::vector<Layer> all(layers.size());
    for (size_t i = 0; i < all.size(); ++i) take(Fields(layers[i]), shape, ropes.size(), all[i]);
    take(model["lm_head"], 1, shape.vocabulary, shape.hidden, head);
    decoder_ = std::make_unique<Decoder>(shape, std::move(all), embedding, head,
                                         vector(model["norm"], shape.hidden), std::move(ropes));
    model.check_all_taken();
    slots_[0].linear = &decoder_->embedding;
    size_t slot = 1;
    for (Layer& layer : decoder_->layers)
      for (Linear* linear :
           {&layer.query, &layer.key, &layer.value, &layer.output, &layer.gate, &layer.up, &layer.down})
        slots_[slot++].linear = linear;
    slots_[slot].linear = &decoder_->head;
  }

  // The plane that brings a matrix to `bits` mantissa bits; nothing where it has that many.
  void attach(size_t matrix, int bits, Bytes plane) {
    check(matrix < slots_.size(), "there is no such matrix");
    check(bits > kCoarsest && bits <= kFinest, "there are at most five planes");
    Slot& slot = slots_[matrix];
    nb::gil_scoped_release released;
    std::lock_guard lock(decoder_->mutex);
    Packed& weight = slot.linear->weight;
    check(static_cast<int64_t>(plane.shape(0)) == slot.rows &&
            static_cast<int64_t>(plane.shape(1)) == weight.blocks() * kPlaneBytes,
          "a plane must be [rows, 4 * blocks]");
    if (bits <= weight.bits) return;
    check(bits == weight.bits + 1, "planes are attached in ascending order");
    weight.planes[slot.planes.size()] = plane.data() + slot.first * weight.blocks() * kPlaneBytes;
    slot.planes.push_back(std::move(plane));
    weight.bits = bits;
  }

  // Reads counts[i] tokens into caches[i], at the precisions bits[i]. Logits [wanted, vocabulary] of the
  // tokens whose numbers are wanted. Returns the numbers of caches that cannot hold a key or value.
  std::vector<int64_t> step(const Array<const int64_t, 1>& ids, const std::vector<Cache*>& caches,
                            const std::vector<int64_t>& counts, const std::vector<nb::bytes>& bits,
                            const std::vector<int64_t>& wanted,
                            const std::optional<Array<float, 2>>& logits) {
    const Shape& shape = decoder_->shape;
    const auto count = static_cast<int64_t>(ids.shape(0));
    check(count > 0 && count <= kMaxStep, "a step takes 1 to " + std::to_string(kMaxStep) + " tokens");
    check(caches.size() == counts.size() && caches.size() == bits.size(),
          "there must be a count and precisions for each cache");
    for (int64_t i = 0; i < count; ++i)
      check(ids.data()[i] >= 0 && ids.data()[i] < shape.vocabulary, "token " + std::to_string(ids.data()[i]) +
                                                                      " is not in the vocabulary of " +
                                                                      std::to_string(shape.vocabulary));
    check(wanted.empty() || (logits && logits->shape(0) == wanted.size() &&
                             static_cast<int64_t>(logits->shape(1)) == shape.vocabulary),
          "logits must be [wanted, vocabulary]");
    for (size_t i = 0; i < wanted.size(); ++i)
      check(wanted[i] >= 0 && wanted[i] < count && (i == 0 || wanted[i] > wanted[i - 1]),
            "wanted tokens are numbered in ascending order");
    int64_t total = 0;
    std::vector<std::string> precisions;
    std::vector<std::unique_lock<std::mutex>> locks;
    std::vector<Cache*> sorted(caches);
    std::sort(sorted.begin(), sorted.end());
    check(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(), "a cache is there twice");
    for (size_t i = 0; i < caches.size(); ++i) {
      check(caches[i] && caches[i]->fits(static_cast<int64_t>(decoder_->layers.size()), shape),
            "the cache is of another model");
      check(counts[i] > 0 && counts[i] <= count, "each cache takes one token or more");
      total += counts[i];
      precisions.emplace_back(static_cast<const char*>(bits[i].data()), bits[i].size());
    }
    check(total == count, "counts must add up to the tokens");

    nb::gil_scoped_release released;
    std::lock_guard lock(decoder_->mutex);
    for (Cache* cache : sorted) locks.emplace_back(cache->mutex);
    std::vector<Sequence> sequences;
    for (size_t i = 0; i < caches.size(); ++i) {
      const int64_t end = caches[i]->length() + counts[i];
      check(end <= decoder_->positions(), "position " + std::to_string(end - 1) + " is beyond those known, " +
                                            std::to_string(decoder_->positions()));
      // Equal ones have one address, so that the decoder sees that they are.
      const bool like_before = i && precisions[i] == precisions[i - 1];
      if (!like_before) check_precisions(precisions[i]);
      sequences.push_back(
        {caches[i], counts[i],
         like_before ? sequences.back().bits : reinterpret_cast<const uint8_t*>(precisions[i].data())});
    }
    return decoder_->step(ids.data(), sequences, wanted, logits ? logits->data() : nullptr);
  }

  void extend_positions(int64_t end) {
    check(end <= kMostPositions, "there are at most " + std::to_string(kMostPositions) + " positions");
    nb::gil_scoped_release released;
    std::lock_guard lock(decoder_->mutex);
    decoder_->extend_positions(end);
  }

  int64_t positions() const { return decoder_->positions(); }

  Cache* new_cache(int bits) const {
    check(bits == 0 || (bits >= kCoarsest && bits <= kFinest),
          "a cache is float16 (0) or has 3 to 8 mantissa bits");
    return new Cache(static_cast<int64_t>(decoder_->layers.size()), decoder_->shape, bits);
  }

 private:
  // A matrix, in the order in which `step` gets precisions.
  struct Slot {
    Linear* linear = nullptr;
    int64_t first = 0, rows = 0;  // its first row in the tensor, and the tensor's rows
    std::vector<Bytes> planes;
  };

  // Of a tensor the rows of one expert from the first on, and how many lie between two experts.
  void take(nb::handle object, int64_t experts, int64_t rows, int64_t length, Linear& into) {
    Fields given(object);
    kept_.append(object);
    const Packed& whole = nb::cast<const Matrix&>(given["matrix"]).packed;
    const auto first = given.get<int64_t>("first"), stride = given.get<int64_t>("stride");
    check(given.get<int64_t>("rows") == rows && whole.length == length && first >= 0 && stride >= 0 &&
            stride <= whole.rows && (experts == 1 || stride >= rows) &&
            first + (experts - 1) * stride + rows <= whole.rows,
          "a matrix has the wrong shape");
    into.stride = stride, into.number = static_cast<int>(slots_.size());
    into.weight = whole;
    into.weight.base += first * whole.blocks() * kBaseBytes;
    into.weight.scales += first * whole.groups();
    into.weight.rows = rows;
    into.bias = optional(given["bias"], rows);
    given.check_all_taken();
    slots_.push_back({nullptr, first, whole.rows, {}});
  }

  void take(Fields parts, const Shape& shape, size_t ropes, Layer& layer) {
    const int64_t of_queries = shape.heads * shape.head, of_keys = shape.kv_heads * shape.head;
    Experts& experts = layer.experts;
    if (!parts["router"].is_none()) {
      experts.count = parts.get<int64_t>("experts"), experts.chosen = parts.get<int64_t>("chosen");
      experts.normalize = parts.get<bool>("normalize");
      check(experts.count > 0 && experts.count <= kMostExperts && experts.chosen > 0 &&
              experts.chosen <= experts.count,
            "of some experts one or more are chosen");
      experts.router = vector(parts["router"], experts.count * shape.hidden);
    }
    const int64_t stacked = std::max<int64_t>(1, experts.count);
    const auto width = Fields(parts["gate"]).get<int64_t>("rows");
    take(parts["query"], 1, of_queries, shape.hidden, layer.query);
    take(parts["key"], 1, of_keys, shape.hidden, layer.key);
    take(parts["value"], 1, of_keys, shape.hidden, layer.value);
    take(parts["output"], 1, shape.hidden, of_queries, layer.output);
    take(parts["gate"], stacked, width, shape.hidden, layer.gate);
    take(parts["up"], stacked, width, shape.hidden, layer.up);
    take(parts["down"], stacked, shape.hidden, width, layer.down);
    layer.attention_norm = optional(parts["attention_norm"], shape.hidden);
    layer.attention_output_norm = optional(parts["attention_output_norm"], shape.hidden);
    layer.mlp_norm = optional(parts["mlp_norm"], shape.hidden);
    layer.mlp_output_norm = optional(parts["mlp_output_norm"], shape.hidden);
    layer.norms_all_heads = parts.get<bool>("norms_all_heads");
    layer.query_norm = optional(parts["query_norm"], layer.norms_all_heads ? of_queries : shape.head);
    layer.key_norm = optional(parts["key_norm"], layer.norms_all_heads ? of_keys : shape.head);
    layer.key_offset = optional(parts["key_offset"], of_keys);
    layer.window = parts.get<int64_t>("window");
    check(layer.window >= 0, "window must not be negative");
    layer.rope = parts["rope"].is_none() ? -1 : parts.get<int>("rope");
    check(layer.rope >= -1 && layer.rope < static_cast<int>(ropes), "there is no such rope");
    parts.check_all_taken();
  }

  const float* vector(nb::handle object, int64_t count) {
    const auto array = nb::cast<Vector>(object, false);
    check(static_cast<int64_t>(array.shape(0)) == count, "a norm or bias has the wrong length");
    kept_.append(object);
    return array.data();
  }

  const float* optional(nb::handle object, int64_t count) {
    return object.is_none() ? nullptr : vector(object, count);
  }

  void check_precisions(const std::string& wanted) {
    if (wanted == checked_) return;
    check(wanted.size() == slots_.size(), "there must be one precision for each matrix");
    for (size_t i = 0; i < slots_.size(); ++i)
      check(wanted[i] >= kCoarsest && wanted[i] <= slots_[i].linear->weight.bits,
            "a matrix lacks the planes of its precision");
    checked_ = wanted;
  }

  nb::list kept_;
  std::unique_ptr<Decoder> decoder_;
  std::vector<Slot> slots_;
  std::string checked_;  // planes are never detached
};

void crop(Cache& cache, int64_t length) {
  check(length >= 0, "a cache cannot be cut to less than nothing");
  nb::gil_scoped_release released;
  std::lock_guard lock(cache.mutex);
  cache.crop(length);
}

void copy(Cache& cache, Cache& other, int64_t length) {
  check(&cache != &other && cache.same_form(other), "a cache is copied from another one of the same form");
  nb::gil_scoped_release released;
  std::scoped_lock lock(cache.mutex, other.mutex);
  check(length >= 0 && length <= other.length(), "the other cache has fewer tokens");
  cache.copy(other, length);
}

int64_t length(Cache& cache) {
  nb::gil_scoped_release released;
  std::lock_guard lock(cache.mutex);
  return cache.length();
}

size_t bytes_of(Cache& cache) {
  nb::gil_scoped_release released;
  std::lock_guard lock(cache.mutex);
  return cache.bytes();
}

void exponential(const Vector& x, const Array<float, 1>& out) {
  check(x.shape(0) == out.shape(0), "out must be as long as x");
  floats_of(kernels()).exponential(x.data(), out.data(), static_cast<int64_t>(x.shape(0)));
}

void angles(const Vector& x, const Array<float, 1>& cosines, const Array<float, 1>& sines) {
  check(x.shape(0) == cosines.shape(0) && x.shape(0) == sines.shape(0),
        "cosines and sines must be as long as x");
  for (size_t i = 0; i < x.shape(0); ++i) {
    double cosine, sine;
    cosine_and_sine(x.data()[i], cosine, sine);
    cosines.data()[i] = static_cast<float>(cosine), sines.data()[i] = static_cast<float>(sine);
  }
}

// Through float16 and back, as keys and values go; whether a cache holds them all.
bool through_halves(const Vector& x, const Array<float, 1>& out) {
  check(x.shape(0) == out.shape(0), "out must be as long as x");
  const float one[kSegment] = {1.0f};
  bool held = true;
  for (size_t i = 0; i < x.shape(0); ++i) {
    uint16_t row[kTile] = {};
    float state[2 * kTile] = {};
    held &= floats_of(kernels()).store_value(x.data() + i, 1, row);
    floats_of(kernels()).gather_halves(one, 1, 0, 1, row, state, 1);
    out.data()[i] = state[kTile];
  }
  return held;
}

// Rows encoded as a cache encodes them.
void encode(const Array<const float, 2>& x, const Array<uint8_t, 2>& base,
            const std::vector<Array<uint8_t, 2>>& planes, const Array<int8_t, 2>& exponents) {
  const auto length = static_cast<int64_t>(x.shape(1));
  const size_t blocks = static_cast<size_t>((length + kBlock - 1) / kBlock), rows = x.shape(0);
  check(planes.size() <= kPlanes, "there are at most five planes");
  check(base.shape(0) == rows && base.shape(1) == blocks * kBaseBytes, "base must be [rows, 16 * blocks]");
  check(exponents.shape(0) == rows && exponents.shape(1) == blocks, "exponents must be [rows, groups]");
  for (const auto& plane : planes)
    check(plane.shape(0) == rows && plane.shape(1) == blocks * kPlaneBytes,
          "a plane must be [rows, 4 * blocks]");
  for (size_t row = 0; row < rows; ++row) {
    uint8_t* of_row[kPlanes];
    for (size_t p = 0; p < planes.size(); ++p) of_row[p] = planes[p].data() + row * blocks * kPlaneBytes;
    check(floats_of(kernels()).encode(
            x.data() + row * x.shape(1), length, kCoarsest + static_cast<int>(planes.size()),
            base.data() + row * blocks * kBaseBytes, of_row, exponents.data() + row * exponents.shape(1)),
          "a number is 65536 or more, or not finite");
  }
}

// Lets go of the pages that hold some bytes of a mapped file; they are read again when they are next used.
// The caller must be sure that they are mapped from a file and unchanged: other memory would lose its
// content.
void release_pages(const Bytes& bytes) {
#if defined(__unix__) || defined(__APPLE__)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)),
             start = reinterpret_cast<uintptr_t>(bytes.data());
  const uintptr_t begin = start / page * page, end = (start + bytes.size() + page - 1) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
#else
  static_cast<void>(bytes);
#endif
}

}  // namespace

void define_decoder(nb::module_& m) {
  const auto plain = [](const char* name) { return nb::arg(name).noconvert(); };
  nb::class_<Matrix>(m, "Matrix")
    .def(nb::init<Bytes, Bytes, int64_t, int, bool, int>(), plain("base"), plain("scales"), "length"_a,
         "group_size"_a, "truncate"_a, "scale_exponent"_a);
  nb::class_<Cache>(m, "Cache")
    .def_prop_ro("length", length)
    .def_prop_ro("nbytes", bytes_of)
    .def("crop", crop, "length"_a)
    .def("copy", copy, "other"_a, "length"_a);
  nb::class_<Owner>(m, "Decoder")
    .def(nb::init<nb::dict, nb::list>(), "model"_a, "layers"_a)
    .def("step", &Owner::step, plain("ids"), "caches"_a, "counts"_a, "bits"_a, "wanted"_a,
         plain("logits").none())
    .def("attach", &Owner::attach, "matrix"_a, "bits"_a, plain("plane"))
    .def("extend_positions", &Owner::extend_positions, "end"_a)
    .def_prop_ro("positions", &Owner::positions)
    .def("new_cache", &Owner::new_cache, "bits"_a, nb::rv_policy::take_ownership);
  m.attr("max_step") = kMaxStep;
  m.def("exponential", exponential, plain("x"), plain("out"));
  m.def("angles", angles, plain("x"), plain("cosines"), plain("sines"));
  m.def("through_halves", through_halves, plain("x"), plain("out"));
  m.def("encode", encode, plain("x"), plain("base"), plain("planes"), plain("exponents"));
  m.def("release_pages", release_pages, plain("bytes"));
}

}  // namespace otaro
