// What is behind `otaro_tokenizer`.
#pragma once

#include <string>

#include "otaro.h"
#include "tokenizer.h"

struct otaro_tokenizer {
  std::string error;
  otaro::Tokenizer tokenizer;
  bool read = false;
};
