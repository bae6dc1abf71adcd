// A decoder on packed planes: all layers of one step in one call. What the layers compute is transformers'
// own (RMS norms, rotary positions, grouped attention, gated activations, experts;
// ../../runtime/description.py has it on a page); every linear is the product of sefp.h on activations that
// are quantized once per input. A step reads tokens of one sequence or of several, each at its own precision.
// A token's arithmetic never depends on the tokens it is computed with, on the instruction set or on the
// threads, so a prompt gives the same bits at once, in pieces, token by token and beside others.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "angles.h"
#include "floats.h"
#include "pool.h"
#include "scratch.h"
#include "sefp.h"

namespace otaro {

constexpr int64_t kMaxStep = 64;  // tokens of one call
constexpr int64_t kMostExperts = 1 << 16, kMostPositions = 1 << 24;

// The functions on floats of the same instruction set.
const Floats& floats_of(const Kernels& kernels);

struct Shape {
  int64_t hidden = 0, heads = 0, kv_heads = 0, head = 0, vocabulary = 0;
  float eps = 0, scale = 1;                // of queries
  float attention_cap = 0, logit_cap = 0;  // 0: none
  float embedding_scale = 1, residual_scale = 1, logit_scale = 1;
  bool gelu = false;  // or silu
};

struct Linear {
  Packed weight;  // of the first expert, where there are several; with all planes that were attached
  const float* bias = nullptr;  // [rows] or none
  int64_t stride = 0;           // rows from one expert to the next
  int number = 0;               // whose precision is its own

  Packed at(int bits, int64_t expert = 0) const;
};

// Each token has the `chosen` experts with the highest scores.
struct Experts {
  const float* router = nullptr;  // [count, hidden]
  int64_t count = 0, chosen = 0;
  bool normalize = false;
};

struct Layer {
  const float *attention_norm = nullptr, *attention_output_norm = nullptr;  // [hidden] or none, as all norms
  const float *mlp_norm = nullptr, *mlp_output_norm = nullptr;
  const float *query_norm = nullptr, *key_norm = nullptr;  // [head], or of all heads at once
  bool norms_all_heads = false;
  const float* key_offset = nullptr;  // what packed keys are kept less, [kv_heads * head] or none
  Linear query, key, value, output, gate, up, down;
  int rope = 0;        // -1: none
  int64_t window = 0;  // positions that a token sees, itself included; 0: all
  Experts experts;
};

// Keys and values, in segments of kSegment positions that are added as they are needed. In a segment every
// layer and kv head has its keys, then its values: in float16 (floats.h says how they lie), or as packed rows
// of `head` weights, in `midpoint`. Whoever uses what may change (all but `fits`) holds the mutex.
class Cache {
 public:
  Cache(int64_t layers, const Shape& shape, int bits);  // bits: 0 is float16

  int64_t length() const { return length_; }
  size_t bytes() const { return segments_.size() * segment_bytes_; }
  void crop(int64_t length);
  // Becomes the first `length` tokens of another cache of the same form.
  void copy(const Cache& other, int64_t length);
  bool same_form(const Cache& other) const;
  bool fits(int64_t layers, const Shape& shape) const;

  std::mutex mutex;

 private:
  friend class Decoder;
  struct Free {
    size_t bytes;
    void operator()(std::byte* memory) const;
  };

  void reserve(int64_t length);
  std::byte* part(int64_t segment, int64_t layer, int64_t kv_head, bool value) const {
    return segments_[static_cast<size_t>(segment)].get() +
           (((layer * kv_heads_ + kv_head) * 2) + value) * part_bytes_;
  }
  Packed packed(std::byte* part) const;

  const int64_t layers_, kv_heads_, head_;
  const int bits_;
  int64_t part_bytes_ = 0;
  size_t segment_bytes_ = 0;
  int64_t length_ = 0;
  std::vector<std::unique_ptr<std::byte, Free>> segments_;
};

// Some tokens of a sequence, read after those in its cache.
struct Sequence {
  Cache* cache;
  int64_t count;
  const uint8_t* bits;  // mantissa bits of all matrices
};

// Whoever uses what may change (all but `shape` and `positions`) holds the mutex: threads may share a
// decoder.
class Decoder {
 public:
  Decoder(const Shape& shape, std::vector<Layer> layers, const Linear& embedding, const Linear& head,
          const float* norm, std::vector<Rope> ropes);

  // Reads tokens, at most kMaxStep in all, those of the first sequence first. Logits of the tokens numbered
  // `wanted`, ascending, go to `logits`. Returns the sequences whose cache cannot hold a key or value, in
  // float16 or packed; these are as long as before. No two sequences have the same cache.
  std::vector<int64_t> step(const int64_t* ids, const std::vector<Sequence>& sequences,
                            const std::vector<int64_t>& wanted, float* logits);

  // Computes the angles of positions up to `end`; those that are known already stay.
  void extend_positions(int64_t end);
  // How many positions are known, from 0 on. They never become fewer.
  int64_t positions() const { return positions_.load(); }

  const Shape shape;
  std::vector<Layer> layers;
  Linear embedding, head;
  const float* norm;
  std::mutex mutex;

 private:
  struct Run;
  struct Tables {
    Rope rope;
    std::vector<float> cosines, sines;  // [positions, frequencies]
  };
  std::atomic<int64_t> positions_{0};
  std::vector<Tables> ropes_;
  std::vector<float> x_, delta_, normed_, queries_, keys_, values_, gate_, up_, down_, scores_, states_;
  Scratch activations_, query_activations_;
};

}  // namespace otaro
