#include "decoder.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "multiply.h"
#include "select.h"

#if (defined(__unix__) || defined(__APPLE__)) && !defined(__wasm__) && !defined(__SANITIZE_ADDRESS__)
#define OTARO_PAGES
#include <sys/mman.h>
#endif

namespace otaro {
namespace {

struct Product {
  const Linear& linear;
  int64_t expert;
  Activations x;
  const std::vector<const uint8_t*>& bits;  // of every matrix, for each token of x
  float* out;                               // [tokens, rows]
};

// The products of several matrices in one region: their rows are numbered through. A chunk of rows is small
// enough to stay in the cache while tokens pass.
void multiply(const Kernels& kernels, Pool& pool, const std::vector<Product>& products) {
  constexpr int64_t kChunkBytes = 256 << 10;
  int64_t rows = 0, row_bytes = 1;
  int tokens = 1;
  for (const Product& product : products) {
    rows += product.linear.weight.rows;
    row_bytes = std::max(row_bytes, product.linear.weight.length);
    tokens = std::max(tokens, product.x.tokens);
  }
  const int64_t cached = tokens > 1 ? std::max<int64_t>(16, kChunkBytes / row_bytes / 16 * 16) : rows;
  std::vector<std::vector<Span>> spans;
  for (const Product& product : products)
    spans.push_back(spans_of(
      product.x.tokens, [&](int t) { return product.bits[static_cast<size_t>(t)][product.linear.number]; }));
  pool.run(rows, std::min(pool.grain(rows, 16), cached), [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (size_t i = 0; i < products.size(); ++i) {
      const Product& product = products[i];
      const int64_t all = product.linear.weight.rows;
      const int64_t from = std::max(begin, first) - first, to = std::min(end, first + all) - first;
      first += all;
      if (from >= to) continue;
      const Packed weight = product.linear.at(spans[i].back().bits, product.expert);
      multiply_rows(kernels, weight, product.x, spans[i].data(), static_cast<int>(spans[i].size()), from, to,
                    product.out);
      if (const float* bias = product.linear.bias)
        for (int t = 0; t < product.x.tokens; ++t)
          for (int64_t row = from; row < to; ++row) product.out[t * all + row] += bias[row];
    }
  });
}

// Memory of segments, zeroed: what lies beyond the last position is read, though never used. It comes from
// the system and goes back there. A heap in which many come and go between other things would keep growing.
std::byte* zeroed(size_t bytes) {
#ifdef OTARO_PAGES
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
#else
  void* memory = std::aligned_alloc(64, bytes);
  if (!memory) throw std::bad_alloc();
  std::memset(memory, 0, bytes);
#endif
  return static_cast<std::byte*>(memory);
}

float* buffer(std::vector<float>& memory, int64_t count) {
  if (static_cast<int64_t>(memory.size()) < count) memory.resize(static_cast<size_t>(count));
  return memory.data();
}

}  // namespace

const Floats& floats_of(const Kernels& kernels) {
#ifdef OTARO_X86
#ifdef OTARO_AVXVNNI
  if (&kernels == &kAvxVnni) return avx2::kFloats;
#endif
  if (&kernels == &kAvx2) return avx2::kFloats;
  if (&kernels == &kAvx512) return avx512::kFloats;
#endif
#ifdef OTARO_ARM
  if (&kernels == &kNeon) return neon::kFloats;
  if (&kernels == &kDotprod) return dotprod::kFloats;
  if (&kernels == &kI8mm) return i8mm::kFloats;
#endif
#ifdef __wasm_simd128__
  if (&kernels == &kWasm) return wasm::kFloats;
#endif
  static_cast<void>(kernels);
  return portable::kFloats;
}

Packed Linear::at(int bits, int64_t expert) const {
  Packed rows = weight;
  rows.bits = bits;
  const int64_t first = expert * stride;
  rows.base += first * rows.blocks() * kBaseBytes;
  rows.scales += first * rows.groups();
  for (int p = 0; p < bits - kCoarsest; ++p) rows.planes[p] += first * rows.blocks() * kPlaneBytes;
  return rows;
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

void Cache::Free::operator()(std::byte* memory) const {
#ifdef OTARO_PAGES
  munmap(memory, bytes);
#else
  std::free(memory);
#endif
}

void Cache::crop(int64_t length) {
  length_ = std::min(length, length_);
  segments_.resize(static_cast<size_t>((length_ + kSegment - 1) / kSegment));
}

bool Cache::same_form(const Cache& other) const {
  return layers_ == other.layers_ && kv_heads_ == other.kv_heads_ && head_ == other.head_ &&
         bits_ == other.bits_;
}

void Cache::copy(const Cache& other, int64_t length) {
  crop(0);
  reserve(length);
  for (size_t i = 0; i < segments_.size(); ++i)
    std::memcpy(segments_[i].get(), other.segments_[i].get(), segment_bytes_);
  length_ = length;
}

void Cache::reserve(int64_t length) {
  while (static_cast<int64_t>(segments_.size()) * kSegment < length) {
    segments_.emplace_back(zeroed(segment_bytes_), Free{segment_bytes_});
  }
}

Packed Cache::packed(std::byte* part) const {
  Packed rows;
  rows.rows = kSegment;
  rows.length = head_;
  rows.group_size = kBlock;
  rows.bits = bits_;
  rows.of_cache = true;
  if (part) {
    auto* at = reinterpret_cast<uint8_t*>(part);
    rows.base = at;
    at += kSegment * rows.blocks() * kBaseBytes;
    for (int p = 0; p < bits_ - kCoarsest; ++p, at += kSegment * rows.blocks() * kPlaneBytes)
      rows.planes[p] = at;
    rows.scales = at;
  }
  return rows;
}

Decoder::Decoder(const Shape& shape, std::vector<Layer> layers, const Linear& embedding, const Linear& head,
                 const float* norm, std::vector<Rope> ropes)
  : shape(shape), layers(std::move(layers)), embedding(embedding), head(head), norm(norm) {
  for (Rope& rope : ropes) ropes_.push_back({std::move(rope), {}, {}});
}

void Decoder::extend_positions(int64_t end) {
  const int64_t known = positions();
  if (end <= known) return;
  for (auto& [rope, cosines, sines] : ropes_) {
    const size_t count = rope.frequencies.size();
    cosines.resize(static_cast<size_t>(end) * count), sines.resize(cosines.size());
    for (int64_t position = known; position < end; ++position)
      for (size_t i = 0; i < count; ++i) {
        const size_t at = static_cast<size_t>(position) * count + i;
        double cosine, sine;
        cosine_and_sine(static_cast<float>(position) * rope.frequencies[i], cosine, sine);
        cosines[at] = static_cast<float>(cosine) * rope.scale;
        sines[at] = static_cast<float>(sine) * rope.scale;
      }
  }
  positions_.store(end);
}

// One step in progress.
struct Decoder::Run {
  struct Token {
    Cache* cache;
    int64_t position, sequence;
  };

  Decoder& decoder;
  const std::vector<Sequence>& sequences;
  const int64_t count;
  const Kernels& kernels = otaro::kernels();
  const Floats& floats = floats_of(kernels);
  Pool& pool = Pool::shared();
  const Shape& shape = decoder.shape;
  const int64_t of_queries = shape.heads * shape.head, of_keys = shape.kv_heads * shape.head;
  const int64_t group = shape.heads / shape.kv_heads, state = state_size(shape.head);
  float* x = buffer(decoder.x_, count* shape.hidden);
  float* delta = buffer(decoder.delta_, count* shape.hidden);
  float* normed = buffer(decoder.normed_, count* shape.hidden);
  float* queries = buffer(decoder.queries_, count* of_queries);
  float* keys = buffer(decoder.keys_, count* of_keys);
  float* values = buffer(decoder.values_, count* of_keys);
  std::vector<Token> tokens = {};
  std::vector<const uint8_t*> bits = {};  // of all tokens
  std::vector<std::atomic<bool>> refused = std::vector<std::atomic<bool>>(sequences.size());

  void begin() {
    for (size_t i = 0; i < sequences.size(); ++i) {
      const Sequence& sequence = sequences[i];
      for (int64_t t = 0; t < sequence.count; ++t)
        tokens.push_back({sequence.cache, sequence.cache->length_ + t, static_cast<int64_t>(i)});
    }
    bits = bits_of(count, [](int64_t t) { return t; });
  }

  // Some tokens, those numbered by token_of(0), token_of(1), ...
  template <class TokenOf>
  std::vector<const uint8_t*> bits_of(int64_t some, TokenOf&& token_of) const {
    std::vector<const uint8_t*> found;
    for (int64_t i = 0; i < some; ++i)
      found.push_back(sequences[static_cast<size_t>(tokens[static_cast<size_t>(token_of(i))].sequence)].bits);
    return found;
  }

  // body(i) for i < some: several are shared out, one is not worth it.
  template <class Body>
  void each(int64_t some, Body&& body) {
    pool.run(some, std::max<int64_t>(2, pool.grain(some)), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }

  Activations activations_for(const Linear& linear, int64_t some) {
    return decoder.activations_.activations(kernels, linear.weight, static_cast<int>(some));
  }

  // Adds what the last part of the layers made of a token, and gives its norm, where there is one, or else
  // the sum.
  const float* add_and_norm(int64_t t, bool add, const float* output_norm, const float* weight) {
    float *row = x + t * shape.hidden, *made = delta + t * shape.hidden, *out = normed + t * shape.hidden;
    if (add) {
      if (output_norm) floats.rms_norm(made, output_norm, shape.eps, shape.hidden, made);
      if (shape.residual_scale != 1) floats.scale(made, shape.residual_scale, shape.hidden);
      floats.add(row, made, shape.hidden);
    }
    if (!weight) return row;
    floats.rms_norm(row, weight, shape.eps, shape.hidden, out);
    return out;
  }

  void layer(int64_t number) {
    const Layer& layer = decoder.layers[static_cast<size_t>(number)];
    const float* before = number ? decoder.layers[static_cast<size_t>(number) - 1].mlp_output_norm : nullptr;
    const Activations hidden = activations_for(layer.query, count);
    each(count, [&](int64_t t) {
      kernels.quantize(add_and_norm(t, number > 0, before, layer.attention_norm), shape.hidden, hidden,
                       static_cast<int>(t));
    });
    multiply(kernels, pool,
             {{layer.query, 0, hidden, bits, queries},
              {layer.key, 0, hidden, bits, keys},
              {layer.value, 0, hidden, bits, values}});
    each(count, [&](int64_t t) { rope_and_cache(layer, number, t); });
    quantize_queries();
    attend(layer, number);
    const Activations attended = activations_for(layer.output, count);
    each(count, [&](int64_t t) {
      kernels.quantize(queries + t * of_queries, of_queries, attended, static_cast<int>(t));
    });
    multiply(kernels, pool, {{layer.output, 0, attended, bits, delta}});
    if (layer.experts.count)
      experts(layer);
    else
      mlp(layer);
  }

  void mlp(const Layer& layer) {
    const int64_t width = layer.gate.weight.rows;
    float *gate = buffer(decoder.gate_, count * width), *up = buffer(decoder.up_, count * width);
    const Activations hidden = activations_for(layer.gate, count);
    each(count, [&](int64_t t) {
      const float* row = add_and_norm(t, true, layer.attention_output_norm, layer.mlp_norm);
      kernels.quantize(row, shape.hidden, hidden, static_cast<int>(t));
    });
    multiply(kernels, pool, {{layer.gate, 0, hidden, bits, gate}, {layer.up, 0, hidden, bits, up}});
    const Activations gated = activations_for(layer.down, count);
    each(count, [&](int64_t t) { activate(gate + t * width, up + t * width, width, gated, t); });
    multiply(kernels, pool, {{layer.down, 0, gated, bits, delta}});
  }

  void activate(float* gate, const float* up, int64_t width, const Activations& out, int64_t slot) const {
    (shape.gelu ? floats.gelu : floats.silu)(gate, up, width);
    kernels.quantize(gate, width, out, static_cast<int>(slot));
  }

  // A token and one of its experts.
  struct Pair {
    int64_t expert, token;
    float weight;
  };

  // Only chosen experts are read. Pairs are sorted by expert, then by token: a token's sum is in the order of
  // its experts, whoever else is there.
  void experts(const Layer& layer) {
    const Experts& experts = layer.experts;
    float* scores = buffer(decoder.scores_, count * experts.count);
    std::vector<const float*> rows(static_cast<size_t>(count));
    each(count, [&](int64_t t) {
      const float* row = add_and_norm(t, true, layer.attention_output_norm, layer.mlp_norm);
      rows[static_cast<size_t>(t)] = row;
      float* of_token = scores + t * experts.count;
      for (int64_t e = 0; e < experts.count; ++e)
        of_token[e] = floats.dot(row, experts.router + e * shape.hidden, shape.hidden);
      floats.softmax(of_token, experts.count);
    });
    std::vector<Pair> pairs;
    for (int64_t t = 0; t < count; ++t) choose(experts, scores + t * experts.count, t, pairs);
    std::sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) {
      return a.expert != b.expert ? a.expert < b.expert : a.token < b.token;
    });

    const auto some = static_cast<int64_t>(pairs.size());
    const int64_t width = layer.gate.weight.rows;
    float *gate = buffer(decoder.gate_, some * width), *up = buffer(decoder.up_, some * width);
    float* down = buffer(decoder.down_, some * shape.hidden);
    struct Same {
      int64_t expert, first, count;
      std::vector<const uint8_t*> bits;
    };
    std::vector<Same> same;  // pairs of one expert
    for (int64_t i = 0; i < some; ++i) {
      if (same.empty() || same.back().expert != pairs[static_cast<size_t>(i)].expert)
        same.push_back({pairs[static_cast<size_t>(i)].expert, i, 0, {}});
      ++same.back().count;
    }
    for (Same& one : same)
      one.bits =
        bits_of(one.count, [&](int64_t i) { return pairs[static_cast<size_t>(one.first + i)].token; });
    const auto of = [](const Activations& all, const Same& one) {
      return all.some(static_cast<int>(one.first), static_cast<int>(one.count));
    };
    std::vector<Product> products;
    const Activations hidden = activations_for(layer.gate, some);
    each(some, [&](int64_t i) {
      const float* row = rows[static_cast<size_t>(pairs[static_cast<size_t>(i)].token)];
      kernels.quantize(row, shape.hidden, hidden, static_cast<int>(i));
    });
    for (const Same& one : same) {
      products.push_back({layer.gate, one.expert, of(hidden, one), one.bits, gate + one.first * width});
      products.push_back({layer.up, one.expert, of(hidden, one), one.bits, up + one.first * width});
    }
    multiply(kernels, pool, products);
    const Activations gated = activations_for(layer.down, some);
    each(some, [&](int64_t i) { activate(gate + i * width, up + i * width, width, gated, i); });
    std::vector<Product> last;
    for (const Same& one : same)
      last.push_back({layer.down, one.expert, of(gated, one), one.bits, down + one.first * shape.hidden});
    multiply(kernels, pool, last);
    std::memset(delta, 0, static_cast<size_t>(count * shape.hidden) * sizeof(float));
    for (int64_t i = 0; i < some; ++i) {
      const Pair& pair = pairs[static_cast<size_t>(i)];
      floats.scale(down + i * shape.hidden, pair.weight, shape.hidden);
      floats.add(delta + pair.token * shape.hidden, down + i * shape.hidden, shape.hidden);
    }
  }

  // Of equal scores the first counts. Where scores are no numbers, any experts will do.
  static void choose(const Experts& experts, const float* scores, int64_t t, std::vector<Pair>& pairs) {
    const size_t first = pairs.size();
    float sum = 0;
    for (int64_t k = 0; k < experts.chosen; ++k) {
      int64_t best = -1;
      for (int64_t e = 0; e < experts.count; ++e) {
        const auto taken = [&](const Pair& pair) { return pair.expert == e; };
        if (std::any_of(pairs.begin() + static_cast<std::ptrdiff_t>(first), pairs.end(), taken)) continue;
        if (best < 0 || scores[e] > scores[best]) best = e;
      }
      pairs.push_back({best, t, scores[best]});
      sum += scores[best];
    }
    if (experts.normalize)
      for (size_t i = first; i < pairs.size(); ++i) pairs[i].weight /= sum;
  }

  // Norms and rotates a token's queries and keys, and puts its keys and values into its cache.
  void rope_and_cache(const Layer& layer, int64_t number, int64_t t) {
    const Token& token = tokens[static_cast<size_t>(t)];
    Cache& cache = *token.cache;
    const int64_t segment = token.position / kSegment, at = token.position % kSegment, head = shape.head;
    const Tables* rope = layer.rope < 0 ? nullptr : &decoder.ropes_[static_cast<size_t>(layer.rope)];
    const auto norm_and_rope = [&](float* vectors, int64_t heads, const float* weight) {
      if (weight && layer.norms_all_heads) floats.rms_norm(vectors, weight, shape.eps, heads * head, vectors);
      for (int64_t h = 0; h < heads; ++h) {
        float* vector = vectors + h * head;
        if (weight && !layer.norms_all_heads) floats.rms_norm(vector, weight, shape.eps, head, vector);
        if (rope) {
          const auto half = static_cast<int64_t>(rope->rope.frequencies.size());
          const int64_t first = token.position * half;
          floats.rope(vector, rope->cosines.data() + first, rope->sines.data() + first, half);
        }
      }
    };
    float *of_token = queries + t * of_queries, *keys_of_token = keys + t * of_keys;
    norm_and_rope(of_token, shape.heads, layer.query_norm);
    floats.scale(of_token, shape.scale, of_queries);
    norm_and_rope(keys_of_token, shape.kv_heads, layer.key_norm);
    bool held = true;
    for (int64_t h = 0; h < shape.kv_heads; ++h) {
      float* key = keys_of_token + h * head;
      const float* value = values + t * of_keys + h * head;
      std::byte* key_part = cache.part(segment, number, h, false);
      std::byte* value_part = cache.part(segment, number, h, true);
      if (cache.bits_) {
        // The same from all keys of a head, so that all scores of a query change alike (../kv_cache.py).
        if (const float* offset = layer.key_offset)
          for (int64_t i = 0; i < head; ++i) key[i] -= offset[h * head + i];
        held &= encode(key, cache.packed(key_part), at);
        held &= encode(value, cache.packed(value_part), at);
      } else {
        held &= floats.store_key(key, head, reinterpret_cast<uint16_t*>(key_part), at);
        held &= floats.store_value(value, head, reinterpret_cast<uint16_t*>(value_part) + at * padded(head));
      }
    }
    if (!held) refused[static_cast<size_t>(token.sequence)].store(true, std::memory_order_relaxed);
  }

  bool encode(const float* row, const Packed& rows, int64_t at) const {
    uint8_t* planes[kPlanes];
    for (int p = 0; p < rows.bits - kCoarsest; ++p)
      planes[p] = const_cast<uint8_t*>(rows.planes[p]) + at * rows.blocks() * kPlaneBytes;
    return floats.encode(row, shape.head, rows.bits,
                         const_cast<uint8_t*>(rows.base) + at * rows.blocks() * kBaseBytes, planes,
                         reinterpret_cast<int8_t*>(const_cast<uint8_t*>(rows.scales)) + at * rows.groups());
  }

  Activations query_activations = {};  // of every token and head, for packed caches

  void quantize_queries() {
    const auto packed =
      std::find_if(tokens.begin(), tokens.end(), [](const Token& token) { return token.cache->bits_ != 0; });
    if (packed == tokens.end()) return;
    const Packed like = packed->cache->packed(nullptr);  // the same for all, but for their bits
    query_activations =
      decoder.query_activations_.activations(kernels, like, static_cast<int>(count * shape.heads));
    each(count, [&](int64_t t) {
      for (int64_t h = t * shape.heads; h < (t + 1) * shape.heads; ++h)
        kernels.quantize(queries + h * shape.head, shape.head, query_activations, static_cast<int>(h));
    });
  }

  // Attention: queries are replaced by what they attend to. Segments give one state each, merged in ascending
  // order. Few tokens share out segments, many tokens share out tokens.
  void attend(const Layer& layer, int64_t number) {
    struct Seen {
      int64_t first, end;  // positions
      int64_t from() const { return first / kSegment; }
      int64_t segments() const { return (end - 1) / kSegment - from() + 1; }
    };
    std::vector<Seen> seen;
    int64_t most = 0;
    for (const Token& token : tokens) {
      const int64_t end = token.position + 1;
      seen.push_back({layer.window ? std::max<int64_t>(0, end - layer.window) : 0, end});
      most = std::max(most, seen.back().segments());
    }
    const int64_t pairs = count * shape.kv_heads;
    const bool split = pairs < 4 * pool.threads() && most > 1;
    const int64_t slots = split ? most : 2;
    float* states = buffer(decoder.states_, pairs * slots * group * state);
    const auto merge = [&](float* into, const float* next) {
      for (int64_t g = 0; g < group; ++g) floats.merge(into + g * state, next + g * state, shape.head);
    };
    const auto finish = [&](int64_t pair, const float* from) {
      for (int64_t g = 0; g < group; ++g)
        floats.finish(from + g * state, queries + (pair * group + g) * shape.head, shape.head);
    };
    const auto seen_by = [&](int64_t pair) { return seen[static_cast<size_t>(pair / shape.kv_heads)]; };
    const auto states_of = [&](int64_t pair, int64_t slot) {
      return states + (pair * slots + slot) * group * state;
    };
    if (split) {
      pool.run(pairs * most, 2, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const Seen of_pair = seen_by(i / most);
          if (i % most < of_pair.segments())
            attend_segment(number, i / most, of_pair.from() + i % most, of_pair.first, of_pair.end,
                           states_of(i / most, i % most));
        }
      });
      for (int64_t pair = 0; pair < pairs; ++pair) {
        for (int64_t s = 1; s < seen_by(pair).segments(); ++s) merge(states_of(pair, 0), states_of(pair, s));
        finish(pair, states_of(pair, 0));
      }
      return;
    }
    pool.run(pairs, count == 1 ? pairs : std::max<int64_t>(1, pool.grain(pairs) / 4),
             [&](int64_t begin, int64_t end) {
               for (int64_t pair = begin; pair < end; ++pair) {
                 const Seen of_pair = seen_by(pair);
                 for (int64_t s = 0; s < of_pair.segments(); ++s) {
                   attend_segment(number, pair, of_pair.from() + s, of_pair.first, of_pair.end,
                                  states_of(pair, s > 0));
                   if (s) merge(states_of(pair, 0), states_of(pair, 1));
                 }
                 finish(pair, states_of(pair, 0));
               }
             });
  }

  // The states of the queries of one token and kv head over the positions from `first` to `end` that lie in a
  // segment.
  void attend_segment(int64_t number, int64_t pair, int64_t segment, int64_t first, int64_t end,
                      float* states) const {
    const Cache& cache = *tokens[static_cast<size_t>(pair / shape.kv_heads)].cache;
    const int64_t start = segment * kSegment, begin = std::max<int64_t>(0, first - start),
                  kv_head = pair % shape.kv_heads;
    end = std::min<int64_t>(kSegment, end - start);
    std::byte* keys_here = cache.part(segment, number, kv_head, false);
    std::byte* values_here = cache.part(segment, number, kv_head, true);
    alignas(64) float decoded[kSegment * kMaxHead];
    if (cache.bits_) {
      const Packed rows = cache.packed(values_here);
      const auto decode = kernels.decode[rows.bits - kCoarsest][false];
      const int64_t width = padded(shape.head);
      for (int64_t i = begin; i < end; ++i) {
        decode(rows, i, decoded + i * width);
        std::memset(decoded + i * width + shape.head, 0,
                    static_cast<size_t>(width - shape.head) * sizeof(float));
      }
    }
    for (int64_t g = 0; g < group; g += kMaxRows) {
      const int rows = static_cast<int>(std::min<int64_t>(kMaxRows, group - g));
      const int64_t query = pair * group + g;
      alignas(64) float scores[kMaxRows * kSegment];
      if (cache.bits_) {
        const Packed packed = cache.packed(keys_here);
        kernels.linear[packed.bits - kCoarsest][false](
          packed, query_activations.some(static_cast<int>(query), rows), begin, end, scores, kSegment);
      } else {
        floats.score(queries + query * shape.head, rows, shape.head, reinterpret_cast<uint16_t*>(keys_here),
                     end, scores);
      }
      if (shape.attention_cap != 0)
        for (int r = 0; r < rows; ++r)
          floats.cap(scores + r * kSegment + begin, shape.attention_cap, end - begin);
      float* into = states + g * state;
      floats.weigh(scores, rows, begin, end, into, shape.head);
      if (cache.bits_)
        floats.gather_floats(scores, rows, begin, end, decoded, into, shape.head);
      else
        floats.gather_halves(scores, rows, begin, end, reinterpret_cast<uint16_t*>(values_here), into,
                             shape.head);
    }
  }

  void logits_of(const std::vector<int64_t>& wanted, float* logits) {
    const auto some = static_cast<int64_t>(wanted.size()), vocabulary = shape.vocabulary;
    const Activations last = activations_for(decoder.head, some);
    const auto token_of = [&](int64_t i) { return wanted[static_cast<size_t>(i)]; };
    each(some, [&](int64_t i) {
      const float* row = add_and_norm(token_of(i), true, decoder.layers.back().mlp_output_norm, decoder.norm);
      kernels.quantize(row, shape.hidden, last, static_cast<int>(i));
    });
    const std::vector<const uint8_t*> of_wanted = bits_of(some, token_of);
    multiply(kernels, pool, {{decoder.head, 0, last, of_wanted, logits}});
    if (shape.logit_scale == 1 && shape.logit_cap == 0) return;
    pool.run(some * vocabulary, 4096, [&](int64_t begin, int64_t end) {
      if (shape.logit_scale != 1) floats.scale(logits + begin, shape.logit_scale, end - begin);
      if (shape.logit_cap != 0) floats.cap(logits + begin, shape.logit_cap, end - begin);
    });
  }
};

std::vector<int64_t> Decoder::step(const int64_t* ids, const std::vector<Sequence>& sequences,
                                   const std::vector<int64_t>& wanted, float* logits) {
  static_assert(kMaxRows <= kMaxTokens && kMaxStep <= kManyTokens);
  int64_t count = 0;
  for (const Sequence& sequence : sequences) {
    count += sequence.count;
    sequence.cache->reserve(sequence.cache->length_ + sequence.count);
  }
  Run run{*this, sequences, count};
  run.begin();
  for (int64_t t = 0; t < count; ++t) {
    const uint8_t* bits = sequences[static_cast<size_t>(run.tokens[static_cast<size_t>(t)].sequence)].bits;
    const Packed rows = embedding.at(bits[embedding.number]);
    float* row = run.x + t * shape.hidden;
    run.kernels.decode[rows.bits - kCoarsest][rows.truncate](rows, ids[t], row);
    if (shape.embedding_scale != 1) run.floats.scale(row, shape.embedding_scale, shape.hidden);
  }
  const auto number = static_cast<int64_t>(layers.size());
  for (int64_t i = 0; i < number; ++i) run.layer(i);
  std::vector<int64_t> refused;
  for (size_t i = 0; i < sequences.size(); ++i) {
    Cache& cache = *sequences[i].cache;
    if (run.refused[i].load()) {
      refused.push_back(static_cast<int64_t>(i));
      cache.crop(cache.length_);
    } else {
      cache.length_ += sequences[i].count;
    }
  }
  if (!wanted.empty()) run.logits_of(wanted, logits);
  return refused;
}

}  // namespace otaro
