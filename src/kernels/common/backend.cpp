// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/backend.hpp"

#include <fmt/format.h>

#include <string_view>

#include "base/error.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const Backend& backend, std::string_view what) {
  fail(ErrorCode::kUnsupported, fmt::format("rows are not {} on {}", what, backend.identity()),
       "this backend has no such kernel", {"Do it on the host: ", setting("backend", "cpu"), "."});
}

}  // namespace

void Backend::decompress(const DecompressTask&, Stream) { refuse(*this, "decompressed"); }
void Backend::compress(const CompressTask&, Stream) { refuse(*this, "compressed"); }
void Backend::compute_absmax(const AbsmaxTask&, Stream) { refuse(*this, "compressed"); }
void Backend::append(const AppendTask&, Stream) { refuse(*this, "compressed"); }
void Backend::check_finite(const FiniteTask&, Stream) { refuse(*this, "compressed"); }
void Backend::find_codebook(const CodebookTask&, Stream) { refuse(*this, "compressed"); }
void Backend::add_gram(const GramTask&, Stream) { refuse(*this, "compressed"); }

}  // namespace ringattn
