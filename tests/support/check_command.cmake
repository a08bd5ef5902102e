# cmake -DCODE=c [-DMESSAGES=m] [-DMATCH=regex] -P check_command.cmake -- command…
# Runs the command and checks its exit code (a number, or "nonzero"), how many lines of its stderr contain "message:",
# and that its output matches.
set(command)
set(behind FALSE)
math(EXPR last "${CMAKE_ARGC} - 1")
foreach(i RANGE ${last})
  if(behind)
    list(APPEND command "${CMAKE_ARGV${i}}")
  elseif("${CMAKE_ARGV${i}}" STREQUAL "--")
    set(behind TRUE)
  endif()
endforeach()

execute_process(COMMAND ${command} RESULT_VARIABLE code OUTPUT_VARIABLE out ERROR_VARIABLE err)
set(shown "code ${code}\n--- stdout\n${out}\n--- stderr\n${err}")

if("${CODE}" STREQUAL "nonzero")
  if("${code}" STREQUAL "0")
    message(FATAL_ERROR "expected an exit code other than 0\n${shown}")
  endif()
elseif(NOT "${code}" STREQUAL "${CODE}")
  message(FATAL_ERROR "expected exit code ${CODE}\n${shown}")
endif()

if(NOT "${MESSAGES}" STREQUAL "")
  string(REGEX MATCHALL "message:" found "${err}")
  list(LENGTH found count)
  if(NOT count EQUAL MESSAGES)
    message(FATAL_ERROR "expected ${MESSAGES} messages, saw ${count}\n${shown}")
  endif()
endif()

if(NOT "${MATCH}" STREQUAL "" AND NOT "${out}${err}" MATCHES "${MATCH}")
  message(FATAL_ERROR "the output does not match '${MATCH}'\n${shown}")
endif()
