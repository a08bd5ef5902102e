// SPDX-License-Identifier: Apache-2.0
// The program of a wheel: main.cpp has the rest, in the library of the Python package.
extern "C" int ringattn_program(int argc, char** argv);

int main(int argc, char** argv) { return ringattn_program(argc, argv); }
