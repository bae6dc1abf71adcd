// ARM CPUs with I8MM, that is USDOT and USMMLA (Cortex-A710, Neoverse V1, Apple M2 and later).
#define OTARO_ISA i8mm
#include "neon_many.h"
#include "floats.h"

namespace otaro {
const Kernels kI8mm = {"i8mm",
                       i8mm::kRun,
                       i8mm::digit_weight_by_quad,
                       i8mm::quantize,
                       OTARO_INSTANCES(i8mm::linear),
                       i8mm::many,
                       OTARO_INSTANCES(i8mm::decode)};
const Instances<Dots> kI8mmDots = OTARO_INSTANCES(i8mm::dots);
}  // namespace otaro
