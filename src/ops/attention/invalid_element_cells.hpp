// SPDX-License-Identifier: Apache-2.0
// Cells in which decompression tasks report elements that no compressed tensor may have. Tasks write the cells on the
// device. The op reads them after it has waited for its runs.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/memory.hpp"
#include "comm/collective.hpp"
#include "comm/transport.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/quant/compressed_rows.hpp"

namespace ringattn {

class InvalidElementCells {
 public:
  // `count` empty cells in the backend's memory. All arguments outlive the object.
  InvalidElementCells(Backend& backend, const Collective& collective, Transport& transport, std::size_t count);

  InvalidElementCell* at(std::size_t cell) const {
    return reinterpret_cast<InvalidElementCell*>(memory_.data()) + cell;
  }

  // Invalid elements that were reported since the last call. All runs that write cells must have ended. Throws kPeer if
  // the device doesn't answer.
  std::vector<InvalidElementCell> drain();

 private:
  void clear();
  void await_device();

  Backend& backend_;
  const Collective& collective_;
  Transport& transport_;
  std::size_t count_;
  Buffer memory_;
  std::unique_ptr<Events> settled_;
};

}  // namespace ringattn
