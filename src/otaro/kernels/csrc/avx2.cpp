#define OTARO_ISA avx2
#include "x86.h"

namespace otaro {
const Kernels kAvx2 = {"avx2", avx2::quantise, OTARO_INSTANCES(avx2::linear), OTARO_INSTANCES(avx2::dots), OTARO_INSTANCES(avx2::decode)};
}
