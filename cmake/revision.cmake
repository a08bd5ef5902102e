# SPDX-License-Identifier: Apache-2.0
cmake_minimum_required(VERSION 3.25)
# Writes OUTPUT with the source revision, and only when it changed. Run by the build: cmake -DSOURCE=… -DOUTPUT=… -P.
execute_process(COMMAND git -C ${SOURCE} rev-parse --short=12 HEAD OUTPUT_VARIABLE revision ERROR_QUIET
                OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status)
set(dirty false)
if(status EQUAL 0)
  execute_process(COMMAND git -C ${SOURCE} status --porcelain --untracked-files=no OUTPUT_VARIABLE changes ERROR_QUIET)
  if(changes)
    set(dirty true)
  endif()
else()
  set(revision unknown)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#pragma once
namespace ringattn {
inline constexpr char kGitRevision[] = \"@revision@\";
inline constexpr bool kGitDirty = @dirty@;
}  // namespace ringattn
" @ONLY)
