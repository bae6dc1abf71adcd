// Every 64-bit ARM CPU.
#define OTARO_ISA neon
#include "neon.h"
#include "floats.h"

namespace otaro {
const Kernels kNeon = {"neon",
                       neon::kRun,
                       neon::digit_weight_by_quad,
                       neon::quantize,
                       OTARO_INSTANCES(neon::linear),
                       {},
                       OTARO_INSTANCES(neon::dots),
                       OTARO_INSTANCES(neon::decode)};
}
