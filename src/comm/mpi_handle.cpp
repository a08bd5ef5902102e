// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_handle.hpp"

#ifdef RINGATTN_HAVE_MPI
#include "comm/mpi_calls.hpp"
#endif

namespace ringattn {

#ifdef RINGATTN_HAVE_MPI

std::string mpi_library_version() {
  if (const std::string why = why_no_mpi(); !why.empty()) return "none (" + why + ")";
  char text[MPI_MAX_LIBRARY_VERSION_STRING + 1] = {};
  int length = 0;
  if (mpi().get_library_version(text, &length) != MPI_SUCCESS) return "unknown (MPI_Get_library_version failed)";
  return text;
}

std::unique_ptr<Transport> make_mpi_transport_of(const void* communicator) {
  return make_mpi_transport(mpi(), *static_cast<const MPI_Comm*>(communicator), {});
}

#else

std::string why_no_mpi() { return "this build has no MPI"; }

std::string mpi_library_version() { return "none (" + why_no_mpi() + ")"; }

std::unique_ptr<Transport> make_mpi_transport_of(const void*) {
  fail(ErrorCode::kUnsupported, "there is no MPI here", why_no_mpi(),
       "Build with MPI, or use a world of another kind.");
}

#endif

}  // namespace ringattn
