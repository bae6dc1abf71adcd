// A decoder of the LLaMA family on packed planes: all layers of one step in one call. What the layers compute is transformers'
// own (RMS norms, rotary positions, grouped attention, gated SiLU); every linear is the product of sefp.h on
// activations that are quantised once per input. A token's arithmetic never depends on the tokens it is computed with, on the
// instruction set or on the threads, so a prompt gives the same bits at once, in pieces and token by token.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "floats.h"
#include "pool.h"
#include "scratch.h"
#include "sefp.h"

namespace otaro {

constexpr int64_t kMaxStep = 64;  // tokens of one call

// The functions on floats of the same instruction set.
const Floats& floats_of(const Kernels& kernels);

struct Shape {
  int64_t hidden = 0, heads = 0, kv_heads = 0, head = 0, intermediate = 0, vocabulary = 0;
  float eps = 0, scale = 1;  // of queries
};

struct Linear {
  Packed weight;
  const float* bias = nullptr;  // [rows] or none
};

struct Layer {
  const float *input_norm = nullptr, *mlp_norm = nullptr;
  const float *query_norm = nullptr, *key_norm = nullptr;  // [head] or none
  const float* key_offset = nullptr;                       // what packed keys are kept less, [kv_heads * head] or none
  Linear query, key, value, output, gate, up, down;
  int64_t window = 0;  // positions that a token sees, itself included; 0: all
};

// Keys and values, in segments of kSegment positions that are added as they are needed. In a segment every layer and kv head has its
// keys, then its values: in float16 (floats.h says how they lie), or as packed rows of `head` weights, in `midpoint`.
// Whoever uses what may change (all but `fits`) holds the mutex.
class Cache {
 public:
  Cache(int64_t layers, const Shape& shape, int bits);  // bits: 0 is float16

  int64_t length() const { return length_; }
  size_t bytes() const { return segments_.size() * segment_bytes_; }
  void crop(int64_t length);
  bool fits(int64_t layers, const Shape& shape) const;

  std::mutex mutex;

 private:
  friend class Decoder;
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  void reserve(int64_t length);
  std::byte* part(int64_t segment, int64_t layer, int64_t kv_head, bool value) const {
    return segments_[static_cast<size_t>(segment)].get() + (((layer * kv_heads_ + kv_head) * 2) + value) * part_bytes_;
  }
  Packed packed(std::byte* part) const;

  const int64_t layers_, kv_heads_, head_;
  const int bits_;
  int64_t part_bytes_ = 0;
  size_t segment_bytes_ = 0;
  int64_t length_ = 0;
  std::vector<std::unique_ptr<std::byte, Free>> segments_;
};

// Whoever uses what may change (all but `shape` and `positions`) holds the mutex: threads may share a decoder.
class Decoder {
 public:
  Decoder(const Shape& shape, std::vector<Layer> layers, const Packed& embedding, const Linear& head, const float* norm)
    : shape(shape), layers(std::move(layers)), embedding(embedding), head(head), norm(norm) {}

  // Reads `count` tokens, at most kMaxStep, after those in the cache. Logits of the last one, or of all, go to `logits`, unless
  // it is null. False where the cache cannot hold a key or value, in float16 or packed; it is then as long as before.
  bool step(const int64_t* ids, int64_t count, Cache& cache, float* logits, bool all);

  // Cosines and sines [end - start, head / 2] of the positions from `start`, at most `positions()`, to `end`. Those that are
  // known already stay, so that it does not matter how many threads bring the same ones.
  void extend_positions(int64_t start, int64_t end, const float* cosines, const float* sines);
  // How many positions are known, from 0 on. They never become fewer.
  int64_t positions() const { return positions_.load(); }

  const Shape shape;
  std::vector<Layer> layers;
  Packed embedding;
  Linear head;
  const float* norm;
  std::mutex mutex;

 private:
  struct Run;
  std::atomic<int64_t> positions_{0};
  std::vector<float> cosines_, sines_;
  std::vector<float> x_, delta_, normed_, queries_, keys_, values_, gate_, up_, states_;
  Scratch activations_, query_activations_;
};

}  // namespace otaro
