// SPDX-License-Identifier: Apache-2.0
#include "base/end_process.hpp"

#include <cstdlib>

#include "base/outcome.hpp"
#include "base/unfinished_file.hpp"

namespace ringattn {

void end_process(int code) noexcept {
  remove_unfinished_files();
  std::_Exit(end_outcome(code));
}

}  // namespace ringattn
