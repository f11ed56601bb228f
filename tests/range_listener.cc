// SPDX-License-Identifier: Apache-2.0
// A profiler as NVTX sees one: prints where ranges begin and end. NVTX_INJECTION64_PATH names it.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>

namespace {

int Push(const char* name) { return std::fprintf(stderr, "begin %s\n", name); }
int Pop() { return std::fprintf(stderr, "end\n"); }

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions;
  unsigned int size;
  if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &functions, &size)) {
    return 0;
  }
  *functions[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(Push);
  *functions[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(Pop);
  return 1;
}
