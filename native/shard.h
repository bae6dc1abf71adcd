// A shard in memory, and everything that FORMAT.md asks a reader to check of it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace otaro {

struct Tensor {
  std::string dtype;
  std::vector<int64_t> shape;
  const uint8_t* data = nullptr;
  size_t bytes = 0;
  std::string digest;

  // Of all dimensions but the last.
  int64_t rows() const;
};

// What the base shard says of packed tensors.
struct Schema {
  struct Entry {
    std::vector<int64_t> shape;  // as weights
    int scale_exponent = 0;
  };
  int group_size = 0;
  bool truncate = false;
  std::map<std::string, Entry, std::less<>> packed;
};

struct Shard {
  int plane = 0;
  std::string model;
  std::map<std::string, Tensor, std::less<>> tensors;
  Schema schema;  // of the base shard

  // Points into the bytes, which must stay. What is wrong, in words; empty if nothing.
  std::string read(const uint8_t* data, size_t bytes);
  // Whether it has the planes of this model.
  std::string check_against(const Shard& base) const;
  // Whether all bytes are those that were written.
  std::string check_digests() const;
};

}  // namespace otaro
