# next_header.cmake: HEADER as a later version of it might be, OUTPUT: every struct has one more member at its end.
file(READ ${HEADER} text)
string(REGEX REPLACE "\n} (ringattn_[a-z_]+);" "\n  int64_t another;\n} \\1;" text "${text}")
string(REGEX MATCH "define RINGATTN_ABI ([0-9]+)" _ "${text}")
math(EXPR next "${CMAKE_MATCH_1} + 1")
string(REPLACE "${CMAKE_MATCH_0}" "define RINGATTN_ABI ${next}" text "${text}")
file(WRITE ${OUTPUT} "${text}")
