// SPDX-License-Identifier: Apache-2.0
// A profiler for tests, which NVTX loads by NVTX_INJECTION64_PATH: writes the names of ranges to stderr.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>

namespace {

int depth = 0;

int NVTX_API push_range(const char* name) {
  std::fprintf(stderr, "nvtx push %s\n", name);
  return depth++;
}

int NVTX_API pop_range() {
  std::fprintf(stderr, "nvtx pop\n");
  return --depth;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int NVTX_API
InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) == 0) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(push_range);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(pop_range);
  return 1;
}
