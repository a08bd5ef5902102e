# makes tune.cu from spike_bench.cu: only the variants given as NAME=ARGS
import sys
s = open('spike_bench.cu').read()
a = s.index('using A = sm80'); b = s.index('}  // namespace\n\nint main')
lines, body = [], []
for i, arg in enumerate(sys.argv[1:]):
    name, args = arg.split('=')
    lines.append(f'using V{i} = {"sm90" if name.startswith("sm90") else "sm80"}::Config<{args}>;')
    body.append(f'  if (what == "all" || what == "{i}") tune<V{i}>("{name}");')
out = s[:a] + '\n'.join(lines) + '''
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
''' + '\n'.join(body) + '\n  return 0;\n}\n'
open('/tmp/tune.cu', 'w').write(out)
