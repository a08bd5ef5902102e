// SPDX-License-Identifier: Apache-2.0
// Signs of life as messages of MPI.
#pragma once

#include <memory>

#include "comm/heart.hpp"

namespace ringattn {

// Over MPI_COMM_WORLD: MPI is initialised, and nobody else uses its tag there.
std::unique_ptr<Signs> make_mpi_signs();

}  // namespace ringattn
