#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The lint itself: each rule finds the breach that it is there for, and leaves good code alone."""
import unittest

import lint

FLAGS = {"kv-heads", "backend", "measure"}
COMMANDS = {"info"}
OPS = {"attention", "mla"}


def include(name, header):
    return [rule for _, rule in lint.include_breaches(name, f'#include "{header}"\n')]


class Ops(unittest.TestCase):
    def rules(self, name, line):
        return [rule for _, rule in lint.ops_by_name(name, line + "\n", OPS)]

    def test_the_rows_are_found(self):
        names = {"attention", "decode", "mla", "ssd", "selective_scan", "conv1d", "compress"}
        self.assertLessEqual(names, lint.op_names())

    def test_only_ops_know_an_op(self):
        for line in ('if (op == "mla") return;', 'if ("mla" != op) return;', 'op_entry("attention")', 'find_op("mla")',
                     "if (input.op() == Op::kMla) return;", "op_name(op)", '#include "ops/mla/mla.hpp"'):
            self.assertEqual(len(self.rules("launch/run.cpp", line)), 1, line)
            self.assertEqual(self.rules("src/ops/mla/mla.cpp", line), [], line)
        for line in ('#include "ops/jobs/op_job.hpp"', '#include "ops/op_table.hpp"', "op_entry(job.op())",
                     'text = "mla";', 'if (op == "other") return;'):
            self.assertEqual(self.rules("launch/run.cpp", line), [], line)


class Rooms(unittest.TestCase):
    def test_data_goes_one_way(self):
        order = ["launch", "src/ops/mla", "src/attention", "src/attention/ring", "src/attention/tokens", "src/kernels",
                 "src/base"]
        for upper, folder in enumerate(order):
            for lower, target in enumerate(order):
                header = f"{target.removeprefix('src/')}/x.hpp"
                allowed = upper <= lower
                self.assertEqual(include(f"{folder}/y.cpp", header) == [], allowed, f"{folder} includes {header}")

    def test_what_ops_share_is_in_layers(self):
        for header in ("mla/mla.hpp", "op_table.hpp"):
            self.assertEqual(include("src/ops/common/x.cpp", f"ops/{header}"), ["ops/common does not include ops"])
        layers = ["common", "attention_jobs", "jobs"]
        for upper, folder in enumerate(layers):
            self.assertEqual(include("src/ops/mla/x.cpp", f"ops/{folder}/x.hpp"), [])
            for lower, target in enumerate(layers):
                said = [] if upper >= lower else [f"ops/{folder} does not include ops/{target}"]
                self.assertEqual(include(f"src/ops/{folder}/x.cpp", f"ops/{target}/x.hpp"), said)
        self.assertEqual(include("src/c/x.cpp", "ops/jobs/op_job.hpp"), ["c does not include ops/jobs"])
        self.assertEqual(include("launch/x.cpp", "ops/attention_jobs/job_input.hpp"),
                         ["launch does not include ops/attention_jobs"])

    def test_comm_and_kernels_do_not_know_each_other(self):
        self.assertEqual(include("src/comm/x.cpp", "kernels/attention/attention.hpp"), ["comm does not include kernels"])
        self.assertEqual(include("src/kernels/x.cpp", "comm/self.hpp"), ["kernels does not include comm"])
        self.assertEqual(include("src/kernels/x.cpp", "ops/attention/attention.hpp"), ["kernels does not include ops"])

    def test_files_do_not_know_ranks(self):
        for module in ("comm", "kernels", "attention", "ops"):
            self.assertEqual(include("src/io/x.cpp", f"{module}/x.hpp"), [f"io does not include {module}"])

    def test_inner_rooms_of_comm_and_kernels(self):
        self.assertEqual(include("src/comm/world.cpp", "comm/p2p/p2p.hpp"), [])
        self.assertEqual(include("src/attention/ring/x.cpp", "comm/p2p/p2p.hpp"),
                         ["attention/ring does not include comm/p2p"])
        self.assertEqual(include("src/kernels/attention/sm80/x.cpp", "kernels/common/cuda/ptx.cuh"), [])
        self.assertEqual(include("src/kernels/attention/sm80/x.cpp", "kernels/attention/sm90/attention.cuh"),
                         ["kernels/sm80 does not include kernels/sm90"])
        self.assertEqual(include("src/kernels/attention/sm90/x.cu", "kernels/attention/sm80/attention.cuh"),
                         ["kernels/sm90 does not include kernels/sm80"])
        self.assertEqual(include("src/kernels/attention/cpu/x.cpp", "kernels/attention/cuda/attention_params.hpp"),
                         ["kernels/cpu does not include kernels/cuda"])
        self.assertEqual(include("src/kernels/attention/cuda/x.cpp", "kernels/attention/cpu/cpu_attention.hpp"),
                         ["kernels/cuda does not include kernels/cpu"])
        self.assertEqual(include("src/ops/attention/attention.cpp", "kernels/common/cuda/ptx.cuh"),
                         ["ops does not include kernels/cuda"])

    def test_headers_of_the_house_are_included_by_their_path(self):
        rule = "a header of the house is included by its path from src/, in quotes"
        self.assertEqual(include("src/attention/check/x.cpp", "../ring/plan.hpp"), [rule])
        self.assertEqual(include("src/attention/x.cpp", "./scan.hpp"), [rule])
        text = "#include <attention/ring/plan.hpp>\n"
        self.assertEqual([said for _, said in lint.include_breaches("src/attention/check/x.cpp", text)], [rule])
        self.assertEqual([said for _, said in lint.include_breaches("src/base/x.cpp", text)],
                         ["base does not include attention/ring", rule])

    def test_a_table_includes_what_it_lists(self):
        self.assertEqual(include("src/kernels/attention/attention_table.cpp", "kernels/attention/sm90/attention.hpp"), [])
        self.assertEqual(include("src/kernels/common/synthetic.cpp", "kernels/attention/sm90/attention.hpp"),
                         ["kernels does not include kernels/sm90"])

    def test_tests_include_everything(self):
        self.assertEqual(include("tests/comm/x.cpp", "launch/config.hpp"), [])

    def test_vendors(self):
        self.assertEqual(len(list(lint.include_breaches("src/attention/x.cpp", "#include <mpi.h>\n"))), 1)
        self.assertEqual(list(lint.include_breaches("src/comm/mpi.cpp", "#include <mpi.h>\n")), [])


class Messages(unittest.TestCase):
    def test_device_code_counts_bits_by_itself(self):
        rule = "device code takes __ffs() and __clz(): nvcc makes constants of what <bit> counts"
        rule_of = lint.include_breaches("src/kernels/attention/sm80/x.cuh", "#include <bit>\n")
        self.assertEqual([found for _, found in rule_of], [rule])
        self.assertEqual(list(lint.include_breaches("src/kernels/attention/sm80/x.cpp", "#include <bit>\n")), [])

    def test_all_parts(self):
        self.assertEqual([line for line, _ in lint.short_messages('\nfail(ErrorCode::kFile, "a", "b");\n')], [2])
        self.assertEqual(len(list(lint.short_messages('fail(ErrorCode::kFile, "a", "", "c");'))), 1)
        self.assertEqual(list(lint.short_messages('fail(ErrorCode::kFile, {"a", f(x, y)}, "b", {"c", "d"});')), [])
        self.assertEqual(list(lint.short_messages('fail(ErrorCode::kInternal, "a");')), [])

    def test_no_spelled_flags(self):
        self.assertEqual([line for line, _ in lint.spelled_flags('f();\ng("Use --backend cpu.");')], [2])
        self.assertEqual(len(list(lint.spelled_flags('"Leave -q out."'))), 1)
        self.assertEqual(len(list(lint.spelled_flags('"-q"'))), 1)
        self.assertEqual(len(list(lint.spelled_flags('"See `ringattn info`."'))), 1)
        self.assertEqual(len(list(lint.spelled_flags('"ringattn plan says it"'))), 1)

    def test_flags_elsewhere_than_in_literals(self):
        self.assertEqual(list(lint.spelled_flags("--count; x--; // as --backend does\n/* `ringattn info` */")), [])
        self.assertEqual(list(lint.spelled_flags("const char quote = '\"'; --count; f('\"');")), [])
        self.assertEqual(list(lint.spelled_flags('"a - b", "-- ", "https://x"')), [])

    def test_known_settings(self):
        def rules(text):
            return [rule for _, rule in lint.unknown_settings(text, FLAGS, COMMANDS)]

        self.assertEqual(rules('{setting("kv_heads"), setting("backend", "cpu"), command("info", "measure")}'), [])
        self.assertEqual(rules('setting("backends")'), ["backends is no flag of launch/flags.cpp"])
        self.assertEqual(rules('command("inform")'), ["inform is no command of launch/commands.cpp"])
        self.assertEqual(rules('command("info", "measured")'), ["measured is no flag of launch/flags.cpp"])

    def test_names_come_from_the_tables(self):
        flags = lint.table_names("launch/flags.cpp")
        self.assertTrue({"input", "kv-heads", "timeout"} <= flags, flags)
        self.assertTrue({"in-features", "activation"} <= lint.own_settings(), lint.own_settings())
        self.assertTrue({"run", "info"} <= lint.table_names("launch/commands.cpp"))


class Files(unittest.TestCase):
    def test_licence(self):
        self.assertEqual(len(list(lint.licence_breaches("int x;\n"))), 1)
        self.assertEqual(list(lint.licence_breaches("// SPDX-License-Identifier: Apache-2.0\n")), [])

    def test_retired_words(self):
        def said(name, text):
            return [rule for _, rule in lint.retired_words(name, text)]

        self.assertEqual(said("src/x.cpp", "FoldSpec spec;\n"), ['retired: "FoldSpec"; write Attention…'])
        self.assertEqual(len(said("docs/x.md", "`sm90_fold` runs\n// Of the rows\n")), 2)
        self.assertEqual(len(said("src/kernels/x.cu", "// by the copy engine\n")), 1)
        self.assertEqual(said("src/comm/p2p/x.cpp", "// by the copy engine\n"), [])
        self.assertEqual(said("docs/renamed.md", "`sm90_fold`\n") + said("src/x.cpp", "// Offsets of rows\nunfold();\n"), [])

    def test_lengths(self):
        self.assertEqual(len(list(lint.length_breaches("src/x.cpp", "\n" * (lint.MAX_LINES + 1)))), 1)
        self.assertEqual(list(lint.length_breaches("src/x.cpp", "\n" * lint.MAX_LINES)), [])
        self.assertEqual(len(list(lint.length_breaches("x.py", "x" * (lint.MAX_COLUMNS + 1)))), 1)

    def test_deadlines(self):
        text = "// Deadline::after(1.0)\nwait(Deadline::after(kSeconds));\n"
        rule = "a wait's deadline comes from src/comm/timeouts.hpp or src/base/device_timeouts.hpp"
        self.assertEqual(list(lint.own_deadlines("src/kernels/x.cpp", text)), [(2, rule)])
        self.assertEqual(list(lint.own_deadlines("src/comm/timeouts.hpp", text)), [])
        self.assertIn(rule, [said for _, said in lint.breaches_of("src/comm/x.cpp", text, FLAGS, COMMANDS, OPS)])
        self.assertNotIn(rule, [said for _, said in lint.breaches_of("tests/comm/x.cpp", text, FLAGS, COMMANDS, OPS)])

    def test_prefetches(self):
        text = "void prefetch_row(int row) {\nHWY_INLINE void prefetch_row(int row) {\n[[gnu::always_inline]] void prefetch() {\n"
        rule = "a function that prefetches is always inlined"
        self.assertEqual(list(lint.dropped_prefetches("src/kernels/ssm/cpu/x.cpp", text)), [(1, rule)])
        self.assertEqual(list(lint.dropped_prefetches("src/kernels/ssm/cuda/x.cpp", text)), [])
        self.assertIn(rule, [said for _, said in lint.breaches_of("src/kernels/ssm/cpu/x.cpp", text, FLAGS, COMMANDS, OPS)])

    def test_one_namespace_for_what_tests_share(self):
        def lines(name, text):
            return [number for number, _ in lint.stray_test_support(name, text)]

        ours = "namespace ringattn::testing {\nint x();\n}  // namespace ringattn::testing\n"
        printer = "namespace ringattn {\ninline void PrintTo(const Row&, std::ostream*);\n}  // namespace ringattn\n"
        self.assertEqual(lines("tests/support/x.hpp", printer + ours), [])
        self.assertEqual(lines("tests/support/x.hpp", ours + "namespace ringattn {\nint y();\n}\n"), [4])
        self.assertEqual(lines("tests/support/x.hpp", "namespace ringattn::cuda {\nint y();\n}\n"), [1])
        self.assertEqual(lines("tests/support/x.hpp", "int y();\n"), [1])
        self.assertEqual(lines("tests/base/x_test.cpp", "namespace ringattn {\nint y();\n}\n"), [])
        self.assertEqual(lines("tests/package/consumer/job.hpp", "int y();\n"), [])
        self.assertEqual(lines("src/base/x.hpp", "namespace ringattn {\nint y();\n}\n"), [])

    def test_a_file_is_held_to_all_rules(self):
        text = '#include "launch/config.hpp"\nfail(ErrorCode::kFile, "--a", setting("b"));\n'
        rules = {rule.split(":")[0] for _, rule in lint.breaches_of("src/base/x.cpp", text, FLAGS, COMMANDS, OPS)}
        self.assertEqual(rules, {"a message has all its parts", "the library spells no flag", "b is no flag of launch/flags.cpp",
                                 "the first lines name the licence (SPDX-License-Identifier",
                                 "base does not include launch"})


if __name__ == "__main__":
    unittest.main()
