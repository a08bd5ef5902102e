// SPDX-License-Identifier: Apache-2.0
// NCCL's functions, for the transport `nccl` and for nccl_version(). The library is opened when ranks first use it and
// is never linked, so that one build runs with and without NCCL.
#pragma once

#include <nccl.h>

#include <string>

namespace ringattn {

struct NcclCalls {
  int version = 0;  // as of ncclGetVersion(): 10000 · major + 100 · minor + patch
  decltype(&::ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&::ncclCommInitRankConfig) comm_init_rank_config = nullptr;
  decltype(&::ncclCommFinalize) comm_finalize = nullptr;
  decltype(&::ncclCommDestroy) comm_destroy = nullptr;
  decltype(&::ncclCommAbort) comm_abort = nullptr;
  decltype(&::ncclCommGetAsyncError) comm_get_async_error = nullptr;
  decltype(&::ncclGetErrorString) get_error_string = nullptr;
  decltype(&::ncclGetLastError) get_last_error = nullptr;
  decltype(&::ncclGroupStart) group_start = nullptr;
  decltype(&::ncclGroupEnd) group_end = nullptr;
  decltype(&::ncclSend) send = nullptr;
  decltype(&::ncclRecv) recv = nullptr;
};

// Throws kUnsupported if the library can't be used.
const NcclCalls& nccl();

}  // namespace ringattn
