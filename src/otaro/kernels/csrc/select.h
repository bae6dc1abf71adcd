// Which instruction set serves.
#pragma once

#include <string>
#include <vector>

#include "sefp.h"

namespace otaro {

// The names of those that this CPU can run, the best first.
std::vector<std::string> available();

// The one in use: the best, or the one chosen by name.
const Kernels& kernels();
bool choose(const std::string& name);

// Its integers, for tests.
Dots dots_of(const Kernels& kernels, const Packed& weight);

}  // namespace otaro
