// SPDX-License-Identifier: Apache-2.0
// libringattn_mpi: the only library linked to MPI.
#include "comm/mpi_calls.hpp"

extern "C" const ringattn::MpiCalls* ringattn_mpi_calls() {
  // Not constexpr: if MPI's constants are objects, their addresses are known only at load time.
  static const ringattn::MpiCalls calls = {.abort = MPI_Abort,
                                           .cancel = MPI_Cancel,
                                           .comm_dup = MPI_Comm_dup,
                                           .comm_free = MPI_Comm_free,
                                           .comm_get_attr = MPI_Comm_get_attr,
                                           .comm_rank = MPI_Comm_rank,
                                           .comm_set_errhandler = MPI_Comm_set_errhandler,
                                           .comm_size = MPI_Comm_size,
                                           .error_class = MPI_Error_class,
                                           .error_string = MPI_Error_string,
                                           .finalize = MPI_Finalize,
                                           .get_count = MPI_Get_count,
                                           .get_library_version = MPI_Get_library_version,
                                           .get_processor_name = MPI_Get_processor_name,
                                           .improbe = MPI_Improbe,
                                           .imrecv = MPI_Imrecv,
                                           .init_thread = MPI_Init_thread,
                                           .initialized = MPI_Initialized,
                                           .irecv = MPI_Irecv,
                                           .isend = MPI_Isend,
                                           .mrecv = MPI_Mrecv,
                                           .query_thread = MPI_Query_thread,
                                           .test = MPI_Test,
                                           .testall = MPI_Testall,
                                           .testsome = MPI_Testsome,
                                           .wait = MPI_Wait,
                                           .comm_world = MPI_COMM_WORLD,
                                           .comm_null = MPI_COMM_NULL,
                                           .byte_type = MPI_BYTE,
                                           .char_type = MPI_CHAR,
                                           .errors_return = MPI_ERRORS_RETURN,
                                           .message_null = MPI_MESSAGE_NULL,
                                           .request_null = MPI_REQUEST_NULL};
  return &calls;
}
