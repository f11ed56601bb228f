// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <string_view>

#include "cc/common/cpu.h"

namespace tf_ops {

int WidestIsa() {
  int isa = 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) isa = 2;
  if (isa == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    isa = 3;
  }
#endif
  const char* text = std::getenv("TF_OPS_ISA");
  const std::string_view wanted = text ? text : "";
  const int limit = wanted == "baseline" ? 1 : wanted == "avx2" ? 2 : 3;
  return isa < limit ? isa : limit;
}

}  // namespace tf_ops
