# SPDX-License-Identifier: Apache-2.0
# Prints a program that times only the variants given as NAME=TEMPLATE_ARGUMENTS (names that begin with sm90 are Hopper's):
#   python3 tune.py "sm90 3 groups=2,false,2,false,false,3,false" "sm80=128,64,4,2,2,2,false,1" > tune.cu
import sys

source = open('spike_bench.cu').read()
head = source[:source.index('// The shapes of the house')]
types, calls = [], []
for i, argument in enumerate(sys.argv[1:]):
    name, arguments = argument.split('=')
    types.append(f'using V{i} = {"sm90" if name.startswith("sm90") else "sm80"}::Config<{arguments}>;')
    calls.append(f'  if (what == "all" || what == "{i}") tune<V{i}>("{name}");')
print(head + '\n'.join(types) + '''
template <class C>
void tune(const char* name) {
  const int h = C::kHeadDim == 256 ? 8 : 32, hk = C::kHeadDim == 128 ? 8 : h;
  for (const std::int64_t n : {std::int64_t{1024}, std::int64_t{4096}, std::int64_t{8192}, std::int64_t{32768}}) {
    const int batch = n < 16384 ? static_cast<int>(16384 / n) : 1;
    Bench<C> b(name, h, hk, batch * n, batch * n);
    b.speed(batch, n, Mask{-1, 0});
    if (n == 8192) b.speed(batch, n, Mask{-1, -1});
  }
}
}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
''' + '\n'.join(calls) + '\n  return 0;\n}')
