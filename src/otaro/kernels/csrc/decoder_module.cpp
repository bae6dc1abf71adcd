// The decoder's part of the Python module: checks everything it is given, and keeps alive what the decoder points into.
#include "decoder_module.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
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

// A packed matrix of the mapped file at its coarsest. It never changes: further planes are a decoder's, under its mutex.
struct Matrix {
  Packed packed;
  Bytes base, scales;

  Matrix(Bytes base_, Bytes scales_, int64_t length, int group_size, bool truncate, int scale_exponent)
    : base(std::move(base_)), scales(std::move(scales_)) {
    check_sizes(length, group_size);
    check_scale_exponent(scale_exponent);
    packed.rows = static_cast<int64_t>(base.shape(0));
    packed.length = length;
    packed.group_size = group_size;
    packed.truncate = truncate;
    packed.scale_exponent = scale_exponent;
    check(has_columns(base, packed, packed.blocks() * kBaseBytes), "base must be [rows, 16 * blocks]");
    check(has_columns(scales, packed, packed.groups()), "scales must be [rows, groups]");
    packed.base = base.data();
    packed.scales = scales.data();
  }

  static bool has_columns(const Bytes& array, const Packed& packed, int64_t columns) {
    return static_cast<int64_t>(array.shape(0)) == packed.rows && static_cast<int64_t>(array.shape(1)) == columns;
  }
};

// A decoder and what it points into. Python's threads may call anything at any time: whatever changes is behind the decoder's mutex,
// for which nobody waits with the GIL.
class Owner {
 public:
  Owner(int64_t heads, int64_t kv_heads, int64_t head, float eps, float scale, const nb::object& embedding, const nb::object& head_matrix,
        const nb::object& norm, const nb::list& layers) {
    Shape shape;
    shape.heads = heads, shape.kv_heads = kv_heads, shape.head = head;
    shape.eps = eps, shape.scale = scale;
    check(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
    check(head > 0 && head % 2 == 0 && head <= kMaxHead, "head must be even and at most " + std::to_string(kMaxHead));
    check(layers.size() > 0, "there must be a layer");
    const Packed& rows = matrix(embedding).packed;
    shape.vocabulary = rows.rows, shape.hidden = rows.length;
    std::vector<Layer> all(layers.size());
    nb::dict first = nb::cast<nb::dict>(layers[0]);
    shape.intermediate = matrix(first["gate"]).packed.rows;
    const int64_t of_queries = heads * head, of_keys = kv_heads * head;
    Linear output;
    take(head_matrix, shape.vocabulary, shape.hidden, output);
    for (size_t i = 0; i < all.size(); ++i) {
      const auto parts = nb::cast<nb::dict>(layers[i]);
      Layer& layer = all[i];
      const auto linear = [&](const char* name, int64_t rows_of, int64_t length, Linear& into) {
        take(parts[name], rows_of, length, into);
        into.bias = optional(parts[(std::string(name) + "_bias").c_str()], rows_of);
      };
      linear("query", of_queries, shape.hidden, layer.query);
      linear("key", of_keys, shape.hidden, layer.key);
      linear("value", of_keys, shape.hidden, layer.value);
      linear("output", shape.hidden, of_queries, layer.output);
      linear("gate", shape.intermediate, shape.hidden, layer.gate);
      linear("up", shape.intermediate, shape.hidden, layer.up);
      linear("down", shape.hidden, shape.intermediate, layer.down);
      layer.input_norm = vector(parts["input_norm"], shape.hidden);
      layer.mlp_norm = vector(parts["mlp_norm"], shape.hidden);
      layer.query_norm = optional(parts["query_norm"], head);
      layer.key_norm = optional(parts["key_norm"], head);
      layer.key_offset = optional(parts["key_offset"], of_keys);
      layer.window = nb::cast<int64_t>(parts["window"]);
      check(layer.window >= 0, "window must not be negative");
    }
    decoder_ = std::make_unique<Decoder>(shape, std::move(all), rows, output, vector(norm, shape.hidden));
    // In the order in which `step` gets their precisions.
    slots_.emplace_back(decoder_->embedding);
    for (size_t i = 0; i < decoder_->layers.size(); ++i) {
      Layer& layer = decoder_->layers[i];
      for (Linear* linear : {&layer.query, &layer.key, &layer.value, &layer.output, &layer.gate, &layer.up, &layer.down})
        slots_.emplace_back(linear->weight);
    }
    slots_.emplace_back(decoder_->head.weight);
  }

  // The plane that brings a matrix to `bits` mantissa bits; nothing where it has that many.
  void attach(size_t matrix, int bits, Bytes plane) {
    check(matrix < slots_.size(), "there is no such matrix");
    check(bits > kCoarsest && bits <= kFinest, "there are at most five planes");
    Slot& slot = slots_[matrix];
    check(Matrix::has_columns(plane, slot.known, slot.known.blocks() * kPlaneBytes), "a plane must be [rows, 4 * blocks]");
    nb::gil_scoped_release released;
    std::lock_guard lock(decoder_->mutex);
    if (bits <= slot.known.bits) return;
    check(bits == slot.known.bits + 1, "planes are attached in ascending order");
    slot.known.planes[slot.planes.size()] = plane.data();
    slot.planes.push_back(std::move(plane));
    slot.known.bits = bits;
  }

  // False where the cache cannot hold a key or value.
  bool step(const Array<const int64_t, 1>& ids, Cache& cache, const nb::bytes& bits, const std::optional<Array<float, 2>>& logits) {
    const std::string wanted(static_cast<const char*>(bits.data()), bits.size());
    const auto count = static_cast<int64_t>(ids.shape(0));
    const auto rows = logits ? static_cast<int64_t>(logits->shape(0)) : 0;
    const Shape& shape = decoder_->shape;
    check(count > 0 && count <= kMaxStep, "a step takes 1 to " + std::to_string(kMaxStep) + " tokens");
    check(!logits || ((rows == 1 || rows == count) && static_cast<int64_t>(logits->shape(1)) == shape.vocabulary),
          "logits must be [1 or tokens, vocabulary]");
    for (int64_t i = 0; i < count; ++i)
      check(ids.data()[i] >= 0 && ids.data()[i] < shape.vocabulary,
            "token " + std::to_string(ids.data()[i]) + " is not in the vocabulary of " + std::to_string(shape.vocabulary));
    check(cache.fits(static_cast<int64_t>(decoder_->layers.size()), shape), "the cache is of another model");
    nb::gil_scoped_release released;
    std::scoped_lock lock(decoder_->mutex, cache.mutex);
    set_precisions(wanted);
    check(cache.length() + count <= decoder_->positions(), "position " + std::to_string(cache.length() + count - 1) +
                                                             " is beyond those known, " + std::to_string(decoder_->positions()));
    return decoder_->step(ids.data(), count, cache, logits ? logits->data() : nullptr, rows > 1);
  }

  void extend_positions(int64_t start, const Array<const float, 2>& cosines, const Array<const float, 2>& sines) {
    const auto half = static_cast<size_t>(decoder_->shape.head / 2);
    check(cosines.shape(1) == half && sines.shape(1) == half && cosines.shape(0) == sines.shape(0),
          "cosines and sines must be [positions, head / 2]");
    nb::gil_scoped_release released;
    std::lock_guard lock(decoder_->mutex);
    check(start >= 0 && start <= decoder_->positions(), "positions must follow those known");
    decoder_->extend_positions(start, start + static_cast<int64_t>(cosines.shape(0)), cosines.data(), sines.data());
  }

  int64_t positions() const { return decoder_->positions(); }

  Cache* new_cache(int bits) const {
    check(bits == 0 || (bits >= kCoarsest && bits <= kFinest), "a cache is float16 (0) or has 3 to 8 mantissa bits");
    return new Cache(static_cast<int64_t>(decoder_->layers.size()), decoder_->shape, bits);
  }

 private:
  struct Slot {
    explicit Slot(Packed& packed) : in_use(&packed), known(packed) {}
    Packed* in_use;  // what steps read
    Packed known;    // with all planes that were attached
    std::vector<Bytes> planes;
  };

  const Matrix& matrix(nb::handle object) {
    kept_.append(object);
    return nb::cast<const Matrix&>(object);
  }

  void take(nb::handle object, int64_t rows, int64_t length, Linear& into) {
    into.weight = matrix(object).packed;
    check(into.weight.rows == rows && into.weight.length == length, "a matrix has the wrong shape");
  }

  const float* vector(nb::handle object, int64_t count) {
    const auto array = nb::cast<Vector>(object, false);
    check(static_cast<int64_t>(array.shape(0)) == count, "a norm or bias has the wrong length");
    kept_.append(object);
    return array.data();
  }

  const float* optional(nb::handle object, int64_t count) { return object.is_none() ? nullptr : vector(object, count); }

  void set_precisions(const std::string& wanted) {
    if (wanted == set_) return;
    check(wanted.size() == slots_.size(), "there must be one precision for each matrix");
    for (size_t i = 0; i < slots_.size(); ++i)
      check(wanted[i] >= kCoarsest && wanted[i] <= slots_[i].known.bits, "a matrix lacks the planes of its precision");
    for (size_t i = 0; i < slots_.size(); ++i) {
      *slots_[i].in_use = slots_[i].known;
      slots_[i].in_use->bits = wanted[i];
    }
    set_ = wanted;
  }

  nb::list kept_;
  std::unique_ptr<Decoder> decoder_;
  std::vector<Slot> slots_;
  std::string set_;
};

void crop(Cache& cache, int64_t length) {
  check(length >= 0, "a cache cannot be cut to less than nothing");
  nb::gil_scoped_release released;
  std::lock_guard lock(cache.mutex);
  cache.crop(length);
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
void encode(const Array<const float, 2>& x, const Array<uint8_t, 2>& base, const std::vector<Array<uint8_t, 2>>& planes,
            const Array<int8_t, 2>& exponents) {
  const auto length = static_cast<int64_t>(x.shape(1));
  const size_t blocks = static_cast<size_t>((length + kBlock - 1) / kBlock), rows = x.shape(0);
  check(planes.size() <= kPlanes, "there are at most five planes");
  check(base.shape(0) == rows && base.shape(1) == blocks * kBaseBytes, "base must be [rows, 16 * blocks]");
  check(exponents.shape(0) == rows && exponents.shape(1) == (x.shape(1) + kCacheGroup - 1) / kCacheGroup, "exponents must be [rows, groups]");
  for (const auto& plane : planes)
    check(plane.shape(0) == rows && plane.shape(1) == blocks * kPlaneBytes, "a plane must be [rows, 4 * blocks]");
  for (size_t row = 0; row < rows; ++row) {
    uint8_t* of_row[kPlanes];
    for (size_t p = 0; p < planes.size(); ++p) of_row[p] = planes[p].data() + row * blocks * kPlaneBytes;
    check(floats_of(kernels()).encode(x.data() + row * x.shape(1), length, kCoarsest + static_cast<int>(planes.size()),
                          base.data() + row * blocks * kBaseBytes, of_row, exponents.data() + row * exponents.shape(1)),
          "a number is 65536 or more, or not finite");
  }
}

// Lets go of the pages that hold some bytes of a mapped file; they are read again when they are next used. The caller must be sure
// that they are mapped from a file and unchanged: other memory would lose its content.
void release_pages(const Bytes& bytes) {
#if defined(__unix__) || defined(__APPLE__)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), start = reinterpret_cast<uintptr_t>(bytes.data());
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
    .def("crop", crop, "length"_a);
  nb::class_<Owner>(m, "Decoder")
    .def(nb::init<int64_t, int64_t, int64_t, float, float, nb::object, nb::object, nb::object, nb::list>(), "heads"_a, "kv_heads"_a,
         "head"_a, "eps"_a, "scale"_a, "embedding"_a, "head_matrix"_a, "norm"_a, "layers"_a)
    .def("step", &Owner::step, plain("ids"), "cache"_a, "bits"_a, plain("logits").none())
    .def("attach", &Owner::attach, "matrix"_a, "bits"_a, plain("plane"))
    .def("extend_positions", &Owner::extend_positions, "start"_a, plain("cosines"), plain("sines"))
    .def_prop_ro("positions", &Owner::positions)
    .def("new_cache", &Owner::new_cache, "bits"_a, nb::rv_policy::take_ownership);
  m.attr("max_step") = kMaxStep;
  m.def("exponential", exponential, plain("x"), plain("out"));
  m.def("through_halves", through_halves, plain("x"), plain("out"));
  m.def("encode", encode, plain("x"), plain("base"), plain("planes"), plain("exponents"));
  m.def("release_pages", release_pages, plain("bytes"));
}

}  // namespace otaro
