// SPDX-License-Identifier: Apache-2.0
// For tests under mpirun: each of them over every transport that joins processes. Without a GPU for each rank the
// device transports are skipped.
#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <memory>
#include <string>

#include "comm/device_world.hpp"
#include "comm/mpi.hpp"
#include "comm/transport.hpp"

namespace ringattn::testing {

// The parameter is the transport's name.
class OverMpi : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    host_ = make_mpi_transport(MPI_COMM_WORLD);
    if (GetParam() == "mpi") return;
    WorldRequest request;
    request.transport = GetParam();
    try {
      device_ = make_device_world(*host_, request).transport;
    } catch (const AgreedError& error) {
      skip(error.what());
      return;
    }
    if (device_ == nullptr) skip("this build has no such transport");
  }

  Transport& transport() { return device_ ? *device_ : *host_; }
  std::string backend() const { return device_ ? "cuda" : "cpu"; }

 private:
  static void skip(const std::string& why) { GTEST_SKIP() << "needs a GPU for each rank: " << why; }

  std::unique_ptr<Transport> host_;
  std::unique_ptr<Transport> device_;
};

inline std::string transport_name(const ::testing::TestParamInfo<std::string>& test) { return test.param; }

}  // namespace ringattn::testing
