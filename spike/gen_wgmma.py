# Writes sm90_wgmma.cuh: the wrappers whose operand lists nobody should type.
def wrapper(n, rs):
    regs = n // 2
    d = ', '.join(f'%{i}' for i in range(regs))
    lines = []
    name = f'wgmma_m64n{n}k16_{"rs" if rs else "ss"}'
    a = 'const std::uint32_t (&a)[4], std::uint64_t b' if rs else 'std::uint64_t a, std::uint64_t b'
    lines.append(f'__device__ __forceinline__ void {name}(float (&d)[{n // 8}][4], {a}, int accumulate) {{')
    if rs:
        ops, b, p = f'{{%{regs}, %{regs+1}, %{regs+2}, %{regs+3}}}', regs + 4, regs + 5
    else:
        ops, b, p = f'%{regs}', regs + 1, regs + 2
    tail = 'p, 1, 1, 1' if rs else 'p, 1, 1, 0, 0'
    lines.append('  asm volatile(')
    lines.append(f'      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{p}, 0;\\n"')
    lines.append(f'      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "')
    lines.append(f'      "{{{d}}}, "')
    lines.append(f'      "{ops}, %{b}, {tail};\\n}}"')
    out = ', '.join(f'"+f"(d[{i // 4}][{i % 4}])' for i in range(regs))
    lines.append(f'      : {out}')
    ins = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)' if rs else '"l"(a), "l"(b), "r"(accumulate)'
    lines.append(f'      : {ins});')
    lines.append('}')
    return '\n'.join(lines)

print('''// SPDX-License-Identifier: Apache-2.0
// wgmma with fp32 accumulators; d[j][i] is column block j of 8, in mma.sync's order. ss: A and B are K-major in shared
// memory. rs: A in registers, B is MN-major in shared memory. Written by gen_wgmma.py.
#pragma once

#include <cstdint>

namespace ringattn::sm90 {
''')
for n, rs in ((128, False), (64, False), (64, True), (128, True)):
    print(wrapper(n, rs) + '\n')
print('}  // namespace ringattn::sm90')
