// SHA-256 (FIPS 180-4), for seals and digests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace otaro {

class Sha256 {
 public:
  void add(const void* data, size_t bytes);
  std::string hex();  // ends it

 private:
  void block(const uint8_t* data);

  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t rest_[64] = {};
  uint64_t bytes_ = 0;
};

}  // namespace otaro
