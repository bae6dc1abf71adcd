// Every 64-bit ARM CPU.
#define OTARO_ISA neon
#include "neon_many.h"
#include "floats.h"

namespace otaro {
const Kernels kNeon = {"neon",
                       neon::kRun,
                       neon::digit_weight_by_quad,
                       neon::quantize,
                       OTARO_INSTANCES(neon::linear),
                       neon::many,
                       OTARO_INSTANCES(neon::decode)};
const Instances<Dots> kNeonDots = OTARO_INSTANCES(neon::dots);
}  // namespace otaro
