# ringattn_store_check(<name> RANKS n CODE c [MESSAGES m] [MATCH regex] [TIMEOUT s] [EXCEPT rank] [MISSING rank] [LIMIT s]
# [SET rank NAME=VALUE …] COMMAND …): runs a command as ranks that meet at RINGATTN_STORE (support/store_ranks.py says what
# EXCEPT, MISSING, SET and LIMIT mean) and checks what ringattn_mpirun_check does.
find_program(RINGATTN_PYTHON NAMES python3)
function(ringattn_store_check name)
  if(NOT RINGATTN_PYTHON OR RINGATTN_FAST_TESTS)
    return()
  endif()
  cmake_parse_arguments(arg "" "RANKS;CODE;MESSAGES;MATCH;TIMEOUT;EXCEPT;MISSING;LIMIT" "COMMAND;SET;LABELS" ${ARGN})
  if(NOT arg_LABELS)
    set(arg_LABELS distributed)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  set(options)
  foreach(option EXCEPT MISSING LIMIT SET)
    if(DEFINED arg_${option})
      string(TOLOWER ${option} flag)
      list(APPEND options --${flag} ${arg_${option}})
    endif()
  endforeach()
  add_test(NAME ${name}
           COMMAND ${CMAKE_COMMAND} -DCODE=${arg_CODE} -DMESSAGES=${arg_MESSAGES} -DMATCH=${arg_MATCH}
                   -P ${PROJECT_SOURCE_DIR}/tests/support/check_command.cmake --
                   ${RINGATTN_PYTHON} ${PROJECT_SOURCE_DIR}/tests/support/store_ranks.py ${arg_RANKS} ${options}
                   -- ${arg_COMMAND})
  ringattn_processors(${name} ${arg_RANKS})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABELS}")
endfunction()

# ringattn_store_test(<name> SOURCES … LINKS … RANKS 2 3 … [LABELS …] [TIMEOUT s]): one gtest program, a ctest test
# <name>.np<N> for each world size, whose processes meet at RINGATTN_STORE. All ranks run all tests, in the same order.
function(ringattn_store_test name)
  if(NOT RINGATTN_PYTHON OR RINGATTN_FAST_TESTS)
    return()
  endif()
  cmake_parse_arguments(arg "" "TIMEOUT" "SOURCES;LINKS;RANKS;LABELS" ${ARGN})
  if(NOT arg_LABELS)
    set(arg_LABELS distributed)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE store_test_main ringattn_comm ${arg_LINKS})
  ringattn_test_compile(${name})
  foreach(ranks ${arg_RANKS})
    add_test(NAME ${name}.np${ranks}
             COMMAND ${RINGATTN_PYTHON} ${PROJECT_SOURCE_DIR}/tests/support/store_ranks.py ${ranks} --limit ${arg_TIMEOUT}
                     -- $<TARGET_FILE:${name}>)
    ringattn_processors(${name}.np${ranks} ${ranks})
    set_tests_properties(${name}.np${ranks} PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABELS}"
                         ENVIRONMENT "ASAN_OPTIONS=detect_leaks=0")
  endforeach()
endfunction()
