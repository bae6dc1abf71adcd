// ARM CPUs with SDOT (Cortex-A76, Neoverse N1, Apple M1 and later).
#define OTARO_ISA dotprod
#include "neon_many.h"
#include "floats.h"

namespace otaro {
const Kernels kDotprod = {"dotprod",
                          dotprod::kRun,
                          dotprod::digit_weight_by_quad,
                          dotprod::quantize,
                          OTARO_INSTANCES(dotprod::linear),
                          dotprod::many,
                          OTARO_INSTANCES(dotprod::decode)};
const Instances<Dots> kDotprodDots = OTARO_INSTANCES(dotprod::dots);
}  // namespace otaro
