// Chooses the instruction set, once per process.
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include "host/cpu/kernels.hpp"
#include "host/cpu/launch.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ndsoftmax::cpu {

#define NDSOFTMAX_DECLARE_KERNELS(name)        \
  namespace name {                             \
  extern const Kernels<float> kFloatKernels;   \
  extern const Kernels<double> kDoubleKernels; \
  }
NDSOFTMAX_DECLARE_KERNELS(baseline)
#if defined(__x86_64__)
NDSOFTMAX_DECLARE_KERNELS(avx2)
NDSOFTMAX_DECLARE_KERNELS(avx512)
#endif

namespace {

struct Choice {
  const char* name;
  const Kernels<float>& float_kernels;
  const Kernels<double>& double_kernels;
};

Choice choose() {
  const char* variable = std::getenv("NDSOFTMAX_CPU_CAPABILITY");
  const std::string_view wanted = variable ? variable : "";
  if (!wanted.empty() && wanted != "avx512" && wanted != "avx2" && wanted != "baseline")
    throw std::invalid_argument("NDSOFTMAX_CPU_CAPABILITY is '" + std::string(wanted) +
                                "'; it may be avx512, avx2 or baseline");
#if defined(__x86_64__)
  unsigned eax, ebx, ecx = 0, edx;  // Clang's __builtin_cpu_supports does not know f16c
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c;
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && wanted != "avx2" && wanted != "baseline")
    return {"avx512", avx512::kFloatKernels, avx512::kDoubleKernels};
  if (has_avx2 && wanted != "baseline") return {"avx2", avx2::kFloatKernels, avx2::kDoubleKernels};
#endif
  return {"baseline", baseline::kFloatKernels, baseline::kDoubleKernels};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

const char* capability() { return choice().name; }

template <>
const Kernels<float>& kernels() {
  return choice().float_kernels;
}

template <>
const Kernels<double>& kernels() {
  return choice().double_kernels;
}

}  // namespace ndsoftmax::cpu
