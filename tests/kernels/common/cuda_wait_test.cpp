// SPDX-License-Identifier: Apache-2.0
// A wait for a device that doesn't end its work: the words of who waits come before the device's.
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/finish.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/stream_brake.hpp"

namespace ringattn::testing {
namespace {

class CudaWaitTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!gpus_unavailable().empty()) GTEST_SKIP() << "needs: " << gpus_unavailable();
  }

  // What a wait on a stream that is held throws, whose caller looks up with `progress`.
  static std::string wait_in_vain(const Deadline& deadline, const Progress& progress) {
    cuda::CudaBackend device(0);
    StreamBrake brake;
    brake.hold(cuda_stream(device.stream()));
    const Error error = error_of([&] { device.synchronize(device.stream(), deadline, progress); });
    brake.release();
    device.synchronize(device.stream(), Deadline::after(60.0), {});
    EXPECT_EQ(error.code(), ErrorCode::kPeer);
    return error.what();
  }
};

TEST_F(CudaWaitTest, NamesTheDeviceWhereNobodyKnowsMore) {
  const std::string text = wait_in_vain(Deadline::after(0.05), {});
  EXPECT_NE(text.find("GPU 0 did not finish within 0.05 s"), std::string::npos) << text;
}

// The deadline passes while the caller looks up, just after it checked that deadline itself.
TEST_F(CudaWaitTest, LetsTheCallerSpeakFirst) {
  const Deadline deadline = Deadline::after(0.05);
  const std::string text = wait_in_vain(deadline, [&] {
    DeviceTimeouts::check(deadline, "no other rank has a part in it");
    while (!deadline.expired()) std::this_thread::yield();
  });
  EXPECT_NE(text.find("no other rank has a part in it"), std::string::npos) << text;
}

}  // namespace
}  // namespace ringattn::testing
