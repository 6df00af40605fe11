#!/usr/bin/env bash
# What tools/one_definition.py finds in files that are written here, and what it passes over.
set -euo pipefail
cd "$TEST_SRCDIR/$TEST_WORKSPACE"
scratch=$(mktemp -d "$TEST_TMPDIR/one_definition.XXXXXX")

cat >"$scratch/a.h" <<'END'
#define BRACE {
namespace distgrad {
class Declared;
struct Twice { int a = '{'; };  // struct Comment {
template <typename T> class alignas(64) Shared final : public Declared {
  struct Inner {};
};
enum class Kind : uint8_t { kOne };
struct Once {};
void Function(struct Declared* x) { struct Local {}; }
const char* const text = R"(struct Text {)";
namespace {
struct Hidden {};
}  // namespace
}  // namespace distgrad
namespace other { struct Once {}; }
struct Global {};
END
cat >"$scratch/b.cc" <<'END'
namespace distgrad {
class Declared;
namespace {
struct Hidden {};
}  // namespace
struct Inner {};
struct Local {};
struct Comment {};
struct Text {};
class Twice::Impl {};
extern "C" {
struct Twice
    : std::vector<int> {};
}
class Shared {};
enum Kind { kTwo };
}  // namespace distgrad
struct Global { int x; };
END
cat >"$scratch/wanted" <<END
Global is defined in $scratch/a.h:17 and $scratch/b.cc:18
distgrad::Kind is defined in $scratch/a.h:8 and $scratch/b.cc:16
distgrad::Shared is defined in $scratch/a.h:5 and $scratch/b.cc:15
distgrad::Twice is defined in $scratch/a.h:4 and $scratch/b.cc:13
END
status=0
python3 tools/one_definition.py "$scratch/a.h" "$scratch/b.cc" >"$scratch/said" || status=$?
diff "$scratch/wanted" "$scratch/said"
[[ $status == 1 ]]
python3 tools/one_definition.py "$scratch/a.h" >"$scratch/said"
[[ ! -s $scratch/said ]]
