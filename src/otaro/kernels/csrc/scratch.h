// Aligned memory for quantized activations.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#include "sefp.h"

namespace otaro {

// Memory for the activations of some tokens; grows, never shrinks.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  Activations activations(const Kernels& kernels, const Packed& weight, int tokens) {
    Activations x;
    x.tokens = x.stride = tokens;
    x.units = weight.units();
    x.unit_blocks = weight.unit_blocks();
    x.run_blocks = kernels.run_blocks ? kernels.run_blocks : x.unit_blocks;
    const auto slots = static_cast<size_t>(tokens * x.units),
               weights = static_cast<size_t>(tokens * x.runs() * x.run_blocks * kBlock);
    const size_t digits = weights * 2, words = digits, sums = (slots * sizeof(int32_t) + 63) / 64 * 64;
    reserve(digits + words + sums + slots * sizeof(float));
    auto* at = static_cast<char*>(memory_);
    x.digits = reinterpret_cast<int8_t*>(at);
    x.words = reinterpret_cast<int16_t*>(at += digits);
    x.sums = reinterpret_cast<int32_t*>(at += words);
    x.scales = reinterpret_cast<float*>(at + sums);
    return x;
  }

 private:
  void reserve(size_t bytes) {
    if (bytes <= size_) return;
    std::free(memory_);
    memory_ = nullptr, size_ = 0;
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    memory_ = std::aligned_alloc(64, rounded);
    if (!memory_) throw std::bad_alloc();
    size_ = rounded;
  }

  void* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace otaro
