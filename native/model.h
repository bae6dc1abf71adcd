// What is behind `otaro_model`, for those who add to it: files, and the tokenizer of otaro-run.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "decoder.h"
#include "json.h"
#include "otaro.h"
#include "shard.h"

struct otaro_model {
  std::string error;

  std::string description;  // the text of decoder.json
  std::unique_ptr<otaro::Shard> shards[otaro::kPlanes + 1];
  std::deque<std::vector<float>> floats;  // norms, biases and routers
  std::unique_ptr<otaro::Decoder> decoder;
  std::unique_ptr<otaro::Cache> cache;
  struct Slot {
    otaro::Linear* linear;
    std::string tensor;
    int64_t first;  // row
  };
  std::vector<Slot> slots;  // every matrix, in the order of their precisions
  std::vector<uint8_t> bits;
  std::vector<float> logits;
  int64_t positions = otaro::kMostPositions;
  int64_t trained_positions = 0;  // 0: it does not say
  int finest = 0;
  std::string missing, damaged;  // of a directory: the shard after the finest, or what is wrong with it
  std::shared_ptr<void> files;   // what the shards lie in, where the model opened it
};

namespace otaro {

// Sets the error and returns what a function that failed returns.
int refuse(otaro_model* model, std::string why);

}  // namespace otaro
