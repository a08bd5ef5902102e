// SPDX-License-Identifier: Apache-2.0
// A table of the MPI functions that are used. A small library of this project, libringattn_mpi, provides it and is the
// only one linked to MPI. It is opened when ranks use MPI, so a program without MPI runs on hosts where none is
// installed.
#pragma once

#include <mpi.h>

#include "comm/mpi.hpp"

namespace ringattn {

// Members have the names of MPI's functions without MPI_. The table also holds the constants that an MPI may define as
// objects of its library. All other constants are compile-time numbers.
struct MpiCalls {
  decltype(&MPI_Abort) abort;
  decltype(&MPI_Cancel) cancel;
  decltype(&MPI_Comm_dup) comm_dup;
  decltype(&MPI_Comm_free) comm_free;
  decltype(&MPI_Comm_get_attr) comm_get_attr;
  decltype(&MPI_Comm_rank) comm_rank;
  decltype(&MPI_Comm_set_errhandler) comm_set_errhandler;
  decltype(&MPI_Comm_size) comm_size;
  decltype(&MPI_Error_class) error_class;
  decltype(&MPI_Error_string) error_string;
  decltype(&MPI_Finalize) finalize;
  decltype(&MPI_Get_count) get_count;
  decltype(&MPI_Get_library_version) get_library_version;
  decltype(&MPI_Get_processor_name) get_processor_name;
  decltype(&MPI_Improbe) improbe;
  decltype(&MPI_Imrecv) imrecv;
  decltype(&MPI_Init_thread) init_thread;
  decltype(&MPI_Initialized) initialized;
  decltype(&MPI_Irecv) irecv;
  decltype(&MPI_Isend) isend;
  decltype(&MPI_Mrecv) mrecv;
  decltype(&MPI_Query_thread) query_thread;
  decltype(&MPI_Test) test;
  decltype(&MPI_Testall) testall;
  decltype(&MPI_Testsome) testsome;
  decltype(&MPI_Wait) wait;
  MPI_Comm comm_world;
  MPI_Comm comm_null;
  MPI_Datatype byte_type;
  MPI_Datatype char_type;
  MPI_Errhandler errors_return;
  MPI_Message message_null;
  MPI_Request request_null;
};

// This process's MPI. Unless use_mpi() has set it, the first call opens libringattn_mpi. Throws kUnsupported if that
// fails.
const MpiCalls& mpi();
void use_mpi(const MpiCalls& calls) noexcept;

}  // namespace ringattn
