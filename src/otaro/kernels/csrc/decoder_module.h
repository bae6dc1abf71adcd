#pragma once

#include <nanobind/nanobind.h>

namespace otaro {

// Adds the decoder to the Python module.
void define_decoder(nanobind::module_& m);

}  // namespace otaro
