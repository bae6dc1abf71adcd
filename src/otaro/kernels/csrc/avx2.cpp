#define OTARO_ISA avx2
#include "x86.h"
#include "floats.h"

namespace otaro {
const Kernels kAvx2 = {"avx2",
                       avx2::digit_weight_by_block,
                       avx2::quantise<avx2::ByBlock>,
                       OTARO_INSTANCES(avx2::For<avx2::Avx2>::linear),
                       {},
                       OTARO_INSTANCES(avx2::For<avx2::Avx2>::dots),
                       OTARO_INSTANCES(avx2::decode)};
}
