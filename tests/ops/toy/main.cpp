// SPDX-License-Identifier: Apache-2.0
// The program with one more op.
#include "launch/program.hpp"
#include "ops/op_table.hpp"
#include "tests/ops/toy/toy_op.hpp"

int main(int argc, char** argv) {
  ringattn::add_op(ringattn::testing::kToyOp);
  return ringattn::run_program({argv, argv + argc});
}
