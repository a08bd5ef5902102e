// SPDX-License-Identifier: Apache-2.0
// A device that doesn't end its work is told of, and not waited for without an end.
#include "kernels/finish.hpp"

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/still_backend.hpp"

namespace ringattn::testing {
namespace {

// A device that works until it has been asked so many times.
class BusyBackend final : public StillBackend {
 public:
  explicit BusyBackend(int looks) : looks_(looks) {}

  int looks() const { return looks_; }  // that are left

  void synchronize(Stream, const Deadline&, const Progress& progress) override {
    for (; looks_ > 0; --looks_) progress();
  }

 private:
  int looks_;
};

TEST(Finish, WaitsForADeviceThatWorks) {
  BusyBackend backend(1000);
  finish(backend, {}, DevicePatience::for_piece());
  EXPECT_EQ(backend.looks(), 0);
}

TEST(Finish, EndsWithTheReasonWhereTheDeviceDoesNot) {
  BusyBackend backend(1'000'000'000);
  const Error error = error_of([&] { finish(backend, {}, Deadline::after(0.02)); });
  EXPECT_EQ(error.code(), ErrorCode::kPeer);
  EXPECT_STREQ(
      error.what(),
      "the device's work did not end within 0.02 s (no other rank has a part in it). See whether the GPU still "
      "answers (nvidia-smi).");
}

}  // namespace
}  // namespace ringattn::testing
