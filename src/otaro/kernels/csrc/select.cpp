#include "select.h"

#include <atomic>
#include <cstring>

namespace otaro {
namespace {

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
  if (avx2) found.push_back(&kAvx2);
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

bool choose(const std::string& name) {
  for (const Kernels* one : runnable())
    if (name == one->name) {
      chosen.store(one, std::memory_order_relaxed);
      return true;
    }
  return false;
}

}  // namespace otaro
