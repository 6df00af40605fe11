#!/usr/bin/env bash
# license_test LICENSE LICENSE-OF-CRATE CARGO.TOML
#
# The crate has the project's licence, names it, and packs it.
set -euo pipefail
cmp "$1" "$2"
grep -q "Version 2.0, January 2004" "$2"
grep -qx 'license = "Apache-2.0"' "$3"
grep -q '^include = .*"/LICENSE"' "$3"
