#define OTARO_ISA avx512
#include "x86.h"

namespace otaro {
const Kernels kAvx512 = {"avx512", avx512::quantise, OTARO_INSTANCES(avx512::linear), OTARO_INSTANCES(avx512::dots), OTARO_INSTANCES(avx512::decode)};
}
