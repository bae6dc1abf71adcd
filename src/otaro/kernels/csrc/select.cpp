#include "select.h"

#include <atomic>
#include <cstring>

#if defined(OTARO_ARM) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(OTARO_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace otaro {
namespace {

#ifdef OTARO_ARM
struct ArmFeatures {
  bool dotprod = false, i8mm = false;

  ArmFeatures() {
#ifdef __linux__
    constexpr unsigned long kDotprod = 1UL << 20, kI8mm = 1UL << 13;  // of AT_HWCAP, of AT_HWCAP2
    dotprod = getauxval(AT_HWCAP) & kDotprod;
    i8mm = getauxval(AT_HWCAP2) & kI8mm;
#elif defined(__APPLE__)
    const auto has = [](const char* name) {
      int value = 0;
      size_t size = sizeof value;
      return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value == 1;
    };
    dotprod = has("hw.optional.arm.FEAT_DotProd");
    i8mm = has("hw.optional.arm.FEAT_I8MM");
#endif
  }
};
#endif

std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> found;
#ifdef OTARO_X86
  __builtin_cpu_init();
  const bool avx2 =
    __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("gfni"))
    found.push_back(&kAvx512);
#ifdef OTARO_AVXVNNI
  if (avx2 && __builtin_cpu_supports("avxvnni") && __builtin_cpu_supports("gfni")) found.push_back(&kAvxVnni);
#endif
  if (avx2) found.push_back(&kAvx2);
#endif
#ifdef OTARO_ARM
  const ArmFeatures cpu;
  if (cpu.dotprod && cpu.i8mm) found.push_back(&kI8mm);
  if (cpu.dotprod) found.push_back(&kDotprod);
  found.push_back(&kNeon);
#endif
#ifdef __wasm_simd128__
  found.push_back(&kWasm);
#endif
  found.push_back(&kPortable);
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

std::vector<std::string> available() {
  std::vector<std::string> names;
  for (const Kernels* one : runnable()) names.emplace_back(one->name);
  return names;
}

const Kernels& kernels() {
  const Kernels* one = chosen.load(std::memory_order_relaxed);
  if (!one) chosen.store(one = runnable().front(), std::memory_order_relaxed);
  return *one;
}

Dots dots_of(const Kernels& kernels, const Packed& weight) {
  const Instances<Dots>* found = &kPortableDots;
#ifdef OTARO_X86
  if (&kernels == &kAvx512) found = &kAvx512Dots;
#ifdef OTARO_AVXVNNI
  if (&kernels == &kAvxVnni) found = &kAvxVnniDots;
#endif
  if (&kernels == &kAvx2) found = &kAvx2Dots;
#endif
#ifdef OTARO_ARM
  if (&kernels == &kI8mm) found = &kI8mmDots;
  if (&kernels == &kDotprod) found = &kDotprodDots;
  if (&kernels == &kNeon) found = &kNeonDots;
#endif
#ifdef __wasm_simd128__
  if (&kernels == &kWasm) found = &kWasmDots;
#endif
  return (*found)[weight.bits - kCoarsest][weight.truncate];
}

bool choose(const std::string& name) {
  for (const Kernels* one : runnable())
    if (name == one->name) {
      chosen.store(one, std::memory_order_relaxed);
      return true;
    }
  return false;
}

}  // namespace otaro
