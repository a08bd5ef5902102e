// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_calls.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <type_traits>

#include "base/error.hpp"
#include "comm/nccl.hpp"

namespace ringattn {

namespace {

constexpr const char* kNcclLibrary = "libnccl.so.2";
constexpr int kOldestNccl = 21900;  // 2.19: non-blocking communicators that can be aborted

struct OpenedNccl {
  NcclCalls calls;
  std::string why_not;  // empty if it can be used
};

// A library that the process already has, such as PyTorch's, is taken before any of the system's.
OpenedNccl open_nccl() {
  OpenedNccl opened;
  void* const library = ::dlopen(kNcclLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    opened.why_not = ::dlerror();
    return opened;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    if (function == nullptr && opened.why_not.empty()) opened.why_not = ::dlerror();
  };
  decltype(&::ncclGetVersion) get_version = nullptr;
  find(get_version, "ncclGetVersion");
  NcclCalls& calls = opened.calls;
  int& version = calls.version;
  if (get_version != nullptr && get_version(&version) == ncclSuccess && version < kOldestNccl) {
    opened.why_not =
        fmt::format("{} is version {}.{}, and 2.19 is needed", kNcclLibrary, version / 10000, version / 100 % 100);
    return opened;
  }
  find(calls.get_unique_id, "ncclGetUniqueId");
  find(calls.comm_init_rank_config, "ncclCommInitRankConfig");
  find(calls.comm_finalize, "ncclCommFinalize");
  find(calls.comm_destroy, "ncclCommDestroy");
  find(calls.comm_abort, "ncclCommAbort");
  find(calls.comm_get_async_error, "ncclCommGetAsyncError");
  find(calls.get_error_string, "ncclGetErrorString");
  find(calls.get_last_error, "ncclGetLastError");
  find(calls.group_start, "ncclGroupStart");
  find(calls.group_end, "ncclGroupEnd");
  find(calls.send, "ncclSend");
  find(calls.recv, "ncclRecv");
  return opened;
}

const OpenedNccl& opened_nccl() {
  static const OpenedNccl opened = open_nccl();
  return opened;
}

}  // namespace

std::string why_no_nccl() { return opened_nccl().why_not; }

const NcclCalls& nccl() {
  const OpenedNccl& opened = opened_nccl();
  if (opened.why_not.empty()) return opened.calls;
  fail(ErrorCode::kUnsupported, "there is no NCCL here", opened.why_not,
       "Install NCCL where the dynamic linker finds it, or use another transport.");
}

}  // namespace ringattn
