// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_calls.hpp"

#include <dlfcn.h>

#include <atomic>
#include <string>

#include "base/error.hpp"
#include "comm/mpi_handle.hpp"

namespace ringattn {

namespace {

std::atomic<const MpiCalls*> known{nullptr};

// Opens the library. Returns nullptr with the reason in `why` if it can't be opened. It stays open.
const MpiCalls* open_library(std::string& why) {
  if (const MpiCalls* calls = known.load(std::memory_order_acquire)) return calls;
  // RTLD_GLOBAL: plugins that MPI opens later need its symbols.
  void* const library = ::dlopen(RINGATTN_MPI_LIBRARY, RTLD_NOW | RTLD_GLOBAL);
  void* const function = library == nullptr ? nullptr : ::dlsym(library, "ringattn_mpi_calls");
  if (function == nullptr) {
    why = ::dlerror();
    return nullptr;
  }
  const MpiCalls* const calls = reinterpret_cast<decltype(&ringattn_mpi_calls)>(function)();
  known.store(calls, std::memory_order_release);
  return calls;
}

}  // namespace

const MpiCalls& mpi() {
  std::string why;
  if (const MpiCalls* calls = open_library(why)) return *calls;
  fail(ErrorCode::kUnsupported, "there is no MPI here", why,
       "Install the MPI that ringattn was built with, and " RINGATTN_MPI_LIBRARY
       " beside the library, or use a world of another kind.");
}

void use_mpi(const MpiCalls& calls) noexcept { known.store(&calls, std::memory_order_release); }

std::string why_no_mpi() {
  std::string why;
  open_library(why);
  return why;
}

}  // namespace ringattn
