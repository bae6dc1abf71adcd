#include "decoder.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <new>

#include "multiply.h"
#include "select.h"

namespace otaro {
namespace {

struct Product {
  const Linear& linear;
  float* out;  // [tokens, rows]
};

// Products of the same activations in one region: rows of all matrices are numbered through. A chunk of rows is small enough to
// stay in the cache while tokens pass.
void multiply(const Kernels& kernels, Pool& pool, std::initializer_list<Product> products, const Activations& x) {
  constexpr int64_t kChunkBytes = 256 << 10;
  int64_t rows = 0, row_bytes = 1;
  for (const Product& product : products) {
    rows += product.linear.weight.rows;
    row_bytes = std::max(row_bytes, product.linear.weight.length);
  }
  const int64_t cached = x.tokens > 1 ? std::max<int64_t>(16, kChunkBytes / row_bytes / 16 * 16) : rows;
  pool.run(rows, std::min(pool.grain(rows, 16), cached), [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (const Product& product : products) {
      const Packed& weight = product.linear.weight;
      const int64_t from = std::max(begin, first) - first, to = std::min(end, first + weight.rows) - first;
      first += weight.rows;
      if (from >= to) continue;
      multiply_rows(kernels, weight, x, from, to, product.out);
      if (const float* bias = product.linear.bias)
        for (int t = 0; t < x.tokens; ++t)
          for (int64_t row = from; row < to; ++row) product.out[t * weight.rows + row] += bias[row];
    }
  });
}

float* room(std::vector<float>& buffer, int64_t count) {
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(static_cast<size_t>(count));
  return buffer.data();
}

}  // namespace

const Floats& floats_of(const Kernels& kernels) {
#ifdef OTARO_X86
  if (&kernels == &kAvx2) return avx2::kFloats;
  if (&kernels == &kAvx512) return avx512::kFloats;
#endif
  static_cast<void>(kernels);
  return portable::kFloats;
}

Cache::Cache(int64_t layers, const Shape& shape, int bits)
  : layers_(layers), kv_heads_(shape.kv_heads), head_(shape.head), bits_(bits) {
  if (bits) {
    const Packed row = packed(nullptr);
    part_bytes_ = kSegment * (row.blocks() * (kBaseBytes + (bits - kCoarsest) * kPlaneBytes) + row.groups());
  } else {
    part_bytes_ = kSegment * padded(head_) * static_cast<int64_t>(sizeof(uint16_t));
  }
  part_bytes_ = (part_bytes_ + 63) / 64 * 64;
  segment_bytes_ = static_cast<size_t>(layers_ * kv_heads_ * 2 * part_bytes_);
}

bool Cache::fits(int64_t layers, const Shape& shape) const {
  return layers == layers_ && shape.kv_heads == kv_heads_ && shape.head == head_;
}

void Cache::crop(int64_t length) {
  length_ = std::min(length, length_);
  segments_.resize(static_cast<size_t>((length_ + kSegment - 1) / kSegment));
}

void Cache::reserve(int64_t length) {
  while (static_cast<int64_t>(segments_.size()) * kSegment < length) {
    std::unique_ptr<std::byte, Free> memory(static_cast<std::byte*>(std::aligned_alloc(64, segment_bytes_)));
    if (!memory) throw std::bad_alloc();
    std::memset(memory.get(), 0, segment_bytes_);  // what lies beyond the last position is read, though never used
    segments_.push_back(std::move(memory));
  }
}

Packed Cache::packed(std::byte* part) const {
  Packed rows;
  rows.rows = kSegment;
  rows.length = head_;
  rows.group_size = kCacheGroup;
  rows.bits = bits_;
  rows.of_cache = true;
  if (part) {
    auto* at = reinterpret_cast<uint8_t*>(part);
    rows.base = at;
    at += kSegment * rows.blocks() * kBaseBytes;
    for (int p = 0; p < bits_ - kCoarsest; ++p, at += kSegment * rows.blocks() * kPlaneBytes) rows.planes[p] = at;
    rows.scales = at;
  }
  return rows;
}

void Decoder::extend_positions(int64_t start, int64_t end, const float* cosines, const float* sines) {
  const int64_t known = positions(), half = shape.head / 2;
  if (end <= known) return;
  const int64_t skip = (known - start) * half, count = (end - start) * half;
  cosines_.insert(cosines_.end(), cosines + skip, cosines + count);
  sines_.insert(sines_.end(), sines + skip, sines + count);
  positions_.store(end);
}

// One step in progress.
struct Decoder::Run {
  Decoder& decoder;
  Cache& cache;
  const int64_t count, past;
  const Kernels& kernels = otaro::kernels();
  const Floats& floats = floats_of(kernels);
  Pool& pool = Pool::shared();
  const Shape& shape = decoder.shape;
  const int64_t of_queries = shape.heads * shape.head, of_keys = shape.kv_heads * shape.head;
  const int64_t group = shape.heads / shape.kv_heads, state = state_size(shape.head);
  float* x = room(decoder.x_, count * shape.hidden);
  float* delta = room(decoder.delta_, count * shape.hidden);
  float* normed = room(decoder.normed_, count * shape.hidden);
  float* queries = room(decoder.queries_, count * of_queries);
  float* keys = room(decoder.keys_, count * of_keys);
  float* values = room(decoder.values_, count * of_keys);
  float* gate = room(decoder.gate_, count * shape.intermediate);
  float* up = room(decoder.up_, count * shape.intermediate);
  std::atomic<bool> held{true};  // so far the cache could hold everything

  // body(token) for each token: several tokens are shared out, one is not worth it.
  template <class Body>
  void each_token(Body&& body) {
    pool.run(count, std::max<int64_t>(2, pool.grain(count)), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) body(t);
    });
  }

  // The next norm of x, to which delta is added first if there is one, quantised.
  Activations normalised(const float* weight, const Packed& next, bool add) {
    const Activations out = decoder.activations_.activations(next, static_cast<int>(count));
    each_token([&](int64_t t) {
      float* row = x + t * shape.hidden;
      if (add) floats.add(row, delta + t * shape.hidden, shape.hidden);
      floats.norm(row, weight, shape.eps, shape.hidden, normed + t * shape.hidden);
      kernels.quantise(normed + t * shape.hidden, shape.hidden, out, static_cast<int>(t));
    });
    return out;
  }

  void layer(int64_t number) {
    const Layer& layer = decoder.layers[static_cast<size_t>(number)];
    multiply(kernels, pool, {{layer.query, queries}, {layer.key, keys}, {layer.value, values}},
             normalised(layer.input_norm, layer.query.weight, number > 0));
    each_token([&](int64_t t) { place(layer, number, t); });
    if (cache.bits_) quantise_queries();
    attend(layer, number);
    const Activations attended = decoder.activations_.activations(layer.output.weight, static_cast<int>(count));
    each_token([&](int64_t t) { kernels.quantise(queries + t * of_queries, of_queries, attended, static_cast<int>(t)); });
    multiply(kernels, pool, {{layer.output, delta}}, attended);
    multiply(kernels, pool, {{layer.gate, gate}, {layer.up, up}}, normalised(layer.mlp_norm, layer.gate.weight, true));
    const Activations gated = decoder.activations_.activations(layer.down.weight, static_cast<int>(count));
    each_token([&](int64_t t) {
      float* row = gate + t * shape.intermediate;
      floats.silu(row, up + t * shape.intermediate, shape.intermediate);
      kernels.quantise(row, shape.intermediate, gated, static_cast<int>(t));
    });
    multiply(kernels, pool, {{layer.down, delta}}, gated);
  }

  // Norms and rotates a token's queries and keys, and puts its keys and values into the cache.
  void place(const Layer& layer, int64_t number, int64_t t) {
    const int64_t position = past + t, segment = position / kSegment, at = position % kSegment, head = shape.head;
    const float* cosines = decoder.cosines_.data() + position * (head / 2);
    const float* sines = decoder.sines_.data() + position * (head / 2);
    const auto turn = [&](float* vector, const float* weight) {
      if (weight) floats.norm(vector, weight, shape.eps, head, vector);
      floats.rotate(vector, cosines, sines, head / 2);
    };
    float* of_token = queries + t * of_queries;
    for (int64_t h = 0; h < shape.heads; ++h) turn(of_token + h * head, layer.query_norm);
    floats.scale(of_token, shape.scale, of_queries);
    for (int64_t h = 0; h < shape.kv_heads; ++h) {
      float* key = keys + t * of_keys + h * head;
      const float* value = values + t * of_keys + h * head;
      turn(key, layer.key_norm);
      std::byte* key_part = cache.part(segment, number, h, false);
      std::byte* value_part = cache.part(segment, number, h, true);
      if (cache.bits_) {
        // The same from all keys of a head, so that all scores of a query change alike: ../keyvalues.py says why.
        if (const float* offset = layer.key_offset)
          for (int64_t i = 0; i < head; ++i) key[i] -= offset[h * head + i];
        if (!encode(key, cache.packed(key_part), at) || !encode(value, cache.packed(value_part), at))
          held.store(false, std::memory_order_relaxed);
      } else {
        const bool key_held = floats.store_key(key, head, reinterpret_cast<uint16_t*>(key_part), at);
        if (!floats.store_value(value, head, reinterpret_cast<uint16_t*>(value_part) + at * padded(head)) || !key_held)
          held.store(false, std::memory_order_relaxed);
      }
    }
  }

  bool encode(const float* row, const Packed& rows, int64_t at) const {
    uint8_t* planes[kPlanes];
    for (int p = 0; p < rows.bits - kCoarsest; ++p)
      planes[p] = const_cast<uint8_t*>(rows.planes[p]) + at * rows.blocks() * kPlaneBytes;
    return floats.encode(row, shape.head, rows.bits, const_cast<uint8_t*>(rows.base) + at * rows.blocks() * kBaseBytes, planes,
                         reinterpret_cast<int8_t*>(const_cast<uint8_t*>(rows.scales)) + at * rows.groups());
  }

  Activations query_activations = {};  // of every token and head, for a packed cache

  void quantise_queries() {
    query_activations = decoder.query_activations_.activations(cache.packed(nullptr), static_cast<int>(count * shape.heads));
    each_token([&](int64_t t) {
      for (int64_t h = t * shape.heads; h < (t + 1) * shape.heads; ++h)
        kernels.quantise(queries + h * shape.head, shape.head, query_activations, static_cast<int>(h));
    });
  }

  // Attention: queries are replaced by what they attend to. Segments give one state each, merged in ascending order. One token
  // shares out segments, many tokens share out tokens.
  void attend(const Layer& layer, int64_t number) {
    const int64_t pairs = count * shape.kv_heads, last = (past + count - 1) / kSegment;
    const auto first_of = [&](int64_t t) { return layer.window ? std::max<int64_t>(0, past + t + 1 - layer.window) : 0; };
    const int64_t first = first_of(0) / kSegment, segments = last - first + 1;
    const bool split = pairs < 4 * pool.threads() && segments > 1;
    const int64_t slots = split ? segments : 2;
    float* states = room(decoder.states_, pairs * slots * group * state);
    const auto finish = [&](int64_t pair, const float* from) {
      for (int64_t g = 0; g < group; ++g) floats.finish(from + g * state, queries + (pair * group + g) * shape.head, shape.head);
    };
    const auto merge = [&](float* into, const float* next) {
      for (int64_t g = 0; g < group; ++g) floats.merge(into + g * state, next + g * state, shape.head);
    };
    if (split) {
      pool.run(pairs * segments, 2, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t pair = i / segments, segment = first + i % segments, t = pair / shape.kv_heads;
          attend_segment(number, pair, segment, first_of(t), past + t + 1, states + i * group * state);
        }
      });
      for (int64_t pair = 0; pair < pairs; ++pair) {
        float* into = states + pair * segments * group * state;
        const int64_t t = pair / shape.kv_heads, from = first_of(t) / kSegment - first, to = (past + t) / kSegment - first;
        for (int64_t s = from + 1; s <= to; ++s) merge(into + from * group * state, into + s * group * state);
        finish(pair, into + from * group * state);
      }
      return;
    }
    pool.run(pairs, count == 1 ? pairs : std::max<int64_t>(1, pool.grain(pairs) / 4), [&](int64_t begin, int64_t end) {
      for (int64_t pair = begin; pair < end; ++pair) {
        const int64_t t = pair / shape.kv_heads, from = first_of(t) / kSegment, to = (past + t) / kSegment;
        float* into = states + pair * slots * group * state;
        for (int64_t s = from; s <= to; ++s) {
          float* here = s == from ? into : into + group * state;
          attend_segment(number, pair, s, first_of(t), past + t + 1, here);
          if (s > from) merge(into, here);
        }
        finish(pair, into);
      }
    });
  }

  // The states of the queries of one token and kv head over the positions from `first` to `end` that lie in a segment, if any.
  void attend_segment(int64_t number, int64_t pair, int64_t segment, int64_t first, int64_t end, float* states) const {
    const int64_t start = segment * kSegment, begin = std::max<int64_t>(0, first - start);
    end = std::min<int64_t>(kSegment, end - start);
    if (begin >= end) return;
    const int64_t kv_head = pair % shape.kv_heads;
    std::byte* keys_here = cache.part(segment, number, kv_head, false);
    std::byte* values_here = cache.part(segment, number, kv_head, true);
    alignas(64) float decoded[kSegment * kMaxHead];
    if (cache.bits_) {
      const Packed rows = cache.packed(values_here);
      const auto decode = kernels.decode[rows.bits - kCoarsest][false];
      const int64_t width = padded(shape.head);
      for (int64_t i = begin; i < end; ++i) {
        decode(rows, i, decoded + i * width);
        std::memset(decoded + i * width + shape.head, 0, static_cast<size_t>(width - shape.head) * sizeof(float));
      }
    }
    for (int64_t g = 0; g < group; g += kMaxRows) {
      const int rows = static_cast<int>(std::min<int64_t>(kMaxRows, group - g));
      const int64_t query = pair * group + g;
      alignas(64) float scores[kMaxRows * kSegment];
      if (cache.bits_) {
        const Packed packed = cache.packed(keys_here);
        kernels.linear[packed.bits - kCoarsest][false](packed, query_activations.some(static_cast<int>(query), rows), begin, end,
                                                       scores, kSegment);
      } else {
        floats.score(queries + query * shape.head, rows, shape.head, reinterpret_cast<uint16_t*>(keys_here), end, scores);
      }
      float* into = states + g * state;
      floats.weigh(scores, rows, begin, end, into, shape.head);
      if (cache.bits_)
        floats.gather_floats(scores, rows, begin, end, decoded, into, shape.head);
      else
        floats.gather_halves(scores, rows, begin, end, reinterpret_cast<uint16_t*>(values_here), into, shape.head);
    }
  }
};

bool Decoder::step(const int64_t* ids, int64_t count, Cache& cache, float* logits, bool all) {
  static_assert(kMaxRows <= kMaxTokens);
  const int64_t past = cache.length_;
  cache.reserve(past + count);
  Run run{*this, cache, count, past};
  const auto decode = run.kernels.decode[embedding.bits - kCoarsest][embedding.truncate];
  for (int64_t t = 0; t < count; ++t) decode(embedding, ids[t], run.x + t * shape.hidden);
  const auto number = static_cast<int64_t>(layers.size());
  for (int64_t i = 0; i < number; ++i) run.layer(i);
  if (!run.held.load()) {
    cache.crop(past);
    return false;
  }
  cache.length_ = past + count;
  if (logits) {
    Activations x = run.normalised(norm, head.weight, number > 0);
    if (!all) x = x.some(static_cast<int>(count) - 1, 1);
    multiply(run.kernels, run.pool, {{head, logits}}, x);
  }
  return true;
}

}  // namespace otaro
