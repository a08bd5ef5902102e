// SPDX-License-Identifier: Apache-2.0
// The parts of a job's input that the ranks of a process share. The first rank that needs a part opens, reads or makes
// it. The code that starts a job makes one JobShare, and passes it to the ranks that are threads of the process.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "base/heartbeat_lock.hpp"

namespace ringattn {

struct InputFile;
struct SsmFile;
struct SharedBlockMask;
struct SyntheticTensors;
struct TensorFile;

// The last value. It is kept as long as a caller, or with `keep` the share itself, holds it.
template <typename Value>
class MadeOnce {
 public:
  explicit MadeOnce(bool keep = false) : keep_(keep) {}

  // Returns the last value if it is the wanted one (`same`), otherwise the value that `make` returns. Ranks wait for
  // each other, so even a value that is refused is in memory only once.
  std::shared_ptr<const Value> get(const std::function<bool(const Value&)>& same,
                                   const std::function<std::shared_ptr<const Value>()>& make) {
    const auto lock = lock_with_heartbeat(mutex_);
    if (std::shared_ptr<const Value> last = last_.lock(); last != nullptr && same(*last)) return last;
    kept_.reset();
    std::shared_ptr<const Value> made = make();
    last_ = made;
    if (keep_) kept_ = made;
    return made;
  }

 private:
  std::mutex mutex_;
  std::weak_ptr<const Value> last_;
  std::shared_ptr<const Value> kept_;
  bool keep_;
};

struct JobShare {
  MadeOnce<TensorFile> file{true};  // open_tensor_file()
  MadeOnce<InputFile> attention{true};
  MadeOnce<SsmFile> ssm{true};
  MadeOnce<SharedBlockMask> block_mask;
  MadeOnce<SyntheticTensors> synthetic;  // compressed keys and values of a seed
};

// The share, or a new one if it is null.
inline std::shared_ptr<JobShare> share_or_new(std::shared_ptr<JobShare> share) {
  return share != nullptr ? std::move(share) : std::make_shared<JobShare>();
}

}  // namespace ringattn
