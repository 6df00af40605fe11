#!/usr/bin/env bash
# Everything that the crate makes public has an example; and documented.py finds what has none, in a
# crate that is written here.
set -euo pipefail
here=$TEST_SRCDIR/$TEST_WORKSPACE/bindings/rust
tool=$here/documented.py
python3 "$tool" "$here/src"

cd "$(mktemp -d "$TEST_TMPDIR/documented.XXXXXX")"
mkdir -p src/low
failed=0
# check WHAT EXPECTED
check() {
  local status=0 said
  said=$(python3 "$tool" src) || status=$?
  if [[ $said != "$2" || $status != $([[ -z $2 ]] && echo 0 || echo 1) ]]; then
    echo "FAILED: $1: status $status; it said '$said', not '$2'" >&2
    failed=1
  fi
}
cat >src/lib.rs <<'END'
//! A crate.
mod high;
mod low;
pub use high::{Failure, One};
#[doc(hidden)]
pub use high::Hidden;
pub use low::two;
pub use low::{
    Three,
    Four,
};
/// It runs.
///
/// ```
/// assert!(true);
/// ```
#[must_use]
pub fn runs() {}
/// Only for tests.
#[doc(hidden)]
pub fn hidden() {}
fn private() {}
END
cat >src/high.rs <<'END'
/// ```no_run
/// loop {}
/// ```
pub struct One(u8);
/// ```should_panic
/// panic!();
/// ```
///
/// ```compile_fail,E0277
/// one
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Failure {
    /// Of One's sort.
    Ones,
}
pub struct Hidden;
pub struct NotOfLib;
END
cat >src/low/mod.rs <<'END'
mod deep;
pub use deep::Three;
/// ```
/// ```
pub unsafe fn two() {}
/// ```
/// ```
pub type Four = u8;
pub(crate) struct Crate;
END
cat >src/low/deep.rs <<'END'
/// ```rust
/// ```
pub trait Three {}
#[macro_export]
macro_rules! five {
    () => {};
}
END
check "a macro without an example" "src/low/deep.rs:5: five has no example"
sed -i 's|^#.macro_export.*|/// ```\n/// ```\n&|' src/low/deep.rs
check "examples of everything" ""

cp -r src good
sed -i 's|no_run|compile_fail|; s|should_panic|text|' src/high.rs
sed -i 's|^/// ```rust|/// ```ignore|' src/low/deep.rs
sed -i '/^pub unsafe fn two/i struct Between;' src/low/mod.rs
sed -i '/^\/\/\/ ```$/d' src/lib.rs
check "no example of some" "src/high.rs:14: Failure has no example
src/high.rs:4: One has no example
src/low/mod.rs:6: two has no example
src/low/deep.rs:3: Three has no example
src/lib.rs:16: runs has no example"

rm -r src && cp -r good src
sed -i 's|^pub use low::two;|pub use low::deep::two;\npub mod more {}|; s|Failure, One|Failure as Error|' src/lib.rs
check "what cannot be followed" "src/lib.rs: \`pub use high::{Failure as Error}\` is not followed: teach documented.py
src/lib.rs: \`pub use low::deep::two\` is not followed: teach documented.py
src/lib.rs: it makes something public in a way that is not followed: teach documented.py"

rm -r src && cp -r good src
sed -i 's|Failure, One|Failure, Nowhere|' src/lib.rs
check "a name that is nowhere" "src/lib.rs: Nowhere is defined in 0 places of ['src/high.rs'], not in one"
echo >src/lib.rs
rm -r src/low
check "nothing at all" "src/lib.rs makes nothing public"
exit $failed
