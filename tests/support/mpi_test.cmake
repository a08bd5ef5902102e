# Programs that run under mpirun. Without MPI nothing is registered, and the tables have no mpi row to test.
set(RINGATTN_MPIRUN_FLAGS --oversubscribe --bind-to none CACHE STRING "Flags of mpirun in tests")

# ringattn_mpirun_properties(<test> RANKS n [TIMEOUT s] [LABELS …] [ENVIRONMENT …])
function(ringattn_mpirun_properties test)
  cmake_parse_arguments(arg "" "RANKS;TIMEOUT" "LABELS;ENVIRONMENT" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  math(EXPR arg_TIMEOUT "${arg_TIMEOUT} * ${RINGATTN_TEST_TIMEOUT_FACTOR}")
  if(NOT arg_LABELS)
    set(arg_LABELS distributed)
  endif()
  ringattn_processors(${test} ${arg_RANKS})
  # MPI libraries leak by design; mpirun refuses root unless told twice.
  set_tests_properties(${test} PROPERTIES
    TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABELS}"
    ENVIRONMENT "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;ASAN_OPTIONS=detect_leaks=0;${arg_ENVIRONMENT}")
endfunction()

# ringattn_mpi_test(<name> SOURCES … LINKS … RANKS 1 2 4 … [LABELS …] [TIMEOUT s] [ENVIRONMENT …]): one gtest program,
# a ctest test <name>.np<N> for each world size. All ranks run all tests, in the same order.
function(ringattn_mpi_test name)
  if(NOT MPI_CXX_FOUND)
    return()
  endif()
  cmake_parse_arguments(arg "" "TIMEOUT" "SOURCES;LINKS;RANKS;LABELS;ENVIRONMENT" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE mpi_test_main ringattn_comm_mpi ${arg_LINKS})
  ringattn_test_compile(${name})
  foreach(ranks ${arg_RANKS})
    add_test(NAME ${name}.np${ranks}
             COMMAND ${MPIEXEC_EXECUTABLE} ${RINGATTN_MPIRUN_FLAGS} -np ${ranks} $<TARGET_FILE:${name}>)
    ringattn_mpirun_properties(${name}.np${ranks} RANKS ${ranks} TIMEOUT ${arg_TIMEOUT} LABELS ${arg_LABELS}
                               ENVIRONMENT ${arg_ENVIRONMENT})
  endforeach()
endfunction()

# ringattn_mpirun_check(<name> RANKS n CODE c [MESSAGES m] [MATCH regex] [TIMEOUT s] COMMAND …): runs a command under
# mpirun and checks its exit code ("nonzero": any but 0), the number of lines with "message:" on stderr, and its output.
function(ringattn_mpirun_check name)
  if(NOT MPI_CXX_FOUND)
    return()
  endif()
  cmake_parse_arguments(arg "" "RANKS;CODE;MESSAGES;MATCH;TIMEOUT" "COMMAND;LABELS;ENVIRONMENT" ${ARGN})
  add_test(NAME ${name}
           COMMAND ${CMAKE_COMMAND} -DCODE=${arg_CODE} -DMESSAGES=${arg_MESSAGES} -DMATCH=${arg_MATCH}
                   -P ${PROJECT_SOURCE_DIR}/tests/support/check_command.cmake --
                   ${MPIEXEC_EXECUTABLE} ${RINGATTN_MPIRUN_FLAGS} -np ${arg_RANKS} ${arg_COMMAND})
  ringattn_mpirun_properties(${name} RANKS ${arg_RANKS} TIMEOUT ${arg_TIMEOUT} LABELS ${arg_LABELS}
                             ENVIRONMENT ${arg_ENVIRONMENT})
endfunction()
