// SPDX-License-Identifier: Apache-2.0
#include "base/build.hpp"

#include <elf.h>
#include <fmt/format.h>
#include <link.h>

#include <cstring>

#include "ringattn_revision.hpp"  // written by the build: kGitRevision, kGitDirty

namespace ringattn {

std::string_view version() { return RINGATTN_VERSION; }
std::string_view git_revision() { return kGitRevision; }
bool git_dirty() { return kGitDirty; }
std::string_view compiler() { return RINGATTN_COMPILER; }
std::string_view build_type() { return RINGATTN_BUILD_TYPE; }

namespace {

// Reads the GNU build-id note of one program header segment, if it is there.
std::string build_id_in_notes(const char* note, std::size_t bytes) {
  std::size_t at = 0;
  const auto padded = [](std::size_t n) { return (n + 3) / 4 * 4; };
  while (at + sizeof(ElfW(Nhdr)) <= bytes) {
    ElfW(Nhdr) header;
    std::memcpy(&header, note + at, sizeof header);
    const char* name = note + at + sizeof header;
    const char* description = name + padded(header.n_namesz);
    at += sizeof header + padded(header.n_namesz) + padded(header.n_descsz);
    if (at > bytes) break;
    if (header.n_type != NT_GNU_BUILD_ID || header.n_namesz != 4 || std::memcmp(name, "GNU", 4) != 0) continue;
    std::string hex;
    for (std::size_t i = 0; i < header.n_descsz; ++i) {
      hex += fmt::format("{:02x}", static_cast<unsigned char>(description[i]));
    }
    return hex;
  }
  return {};
}

// True for the object (a program or a shared library) whose code segments contain this function.
bool is_ours(const dl_phdr_info& info) {
  const auto here = reinterpret_cast<ElfW(Addr)>(&is_ours);
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    const auto& segment = info.dlpi_phdr[i];
    const ElfW(Addr) begin = info.dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_LOAD && here >= begin && here - begin < segment.p_memsz) return true;
  }
  return false;
}

int visit_object(dl_phdr_info* info, std::size_t, void* result) {
  if (!is_ours(*info)) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    const char* begin = reinterpret_cast<const char*>(info->dlpi_addr + segment.p_vaddr);
    const std::string id = build_id_in_notes(begin, segment.p_memsz);
    if (!id.empty()) {
      *static_cast<std::string*>(result) = id;
      break;
    }
  }
  return 1;  // stop
}

}  // namespace

std::string build_id() {
  std::string id;
  dl_iterate_phdr(visit_object, &id);
  return id;
}

}  // namespace ringattn
