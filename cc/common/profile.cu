// SPDX-License-Identifier: Apache-2.0
// A .cu, for the headers of NVTX are found where those of CUDA are.
#include "cc/common/profile.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#endif

namespace tf_ops {

#ifdef NVTX_VERSION
void BeginRange(const std::string& name) { nvtxRangePushA(name.c_str()); }
void EndRange() { nvtxRangePop(); }
#else
void BeginRange(const std::string&) {}
void EndRange() {}
#endif

}  // namespace tf_ops
