#!/usr/bin/env bash
# What tools/planted.py finds and writes, in a folder that has what it reads, a simulation that finds
# what it is told to, and neither Bazel nor git.
set -euo pipefail
cd "$TEST_SRCDIR/$TEST_WORKSPACE"
scratch=$(mktemp -d "$TEST_TMPDIR/planted.XXXXXX")
mkdir -p "$scratch"/{tools,docs,tests/simulation/cases,tree/bazel-bin/tests/simulation}
cp tools/planted.py "$scratch/tools"
cat >"$scratch/tools/mutate.py" <<'END'
import subprocess

def tree_of(name): return name
def prepare(tree): pass
def git(*arguments, cwd=None): pass
def bazel(tree, *arguments): return subprocess.CompletedProcess(arguments, 0)
END
echo '+ if (Planted("early")) if (Planted("late")) if (Planted("never"))' \
  >"$scratch/tests/simulation/planted.patch"
page=$scratch/docs/testing.md
cat >"$page" <<'END'
Before.

| planted | defect | first seed |
| --- | --- | --- |
| `late` | what comes late | 3 |
| `early` | what comes early | 7 |
| `never` | what never comes | none of 5,000 |

Behind.
END
# Somebody edits the page while the seeds are looked for.
cat >"$scratch/tree/bazel-bin/tests/simulation/simulation" <<'END'
#!/usr/bin/env bash
[[ $DISTGRAD_PLANTED != early ]] || sed -i 's/Behind/Edited/; s/comes early/comes too early/' docs/testing.md
echo "seed $([[ $DISTGRAD_PLANTED == early ]] && echo 1 || echo 20): it failed"
exit 1
END
chmod +x "$scratch/tree/bazel-bin/tests/simulation/simulation"

found=$("$scratch/tools/planted.py" --table --tree "$scratch/tree")
diff - <(echo "$found") <<'END'
early: seed 1: it failed
late: seed 20: it failed
2 of 2 planted defects are found
END
diff - "$page" <<'END'
Before.

| planted | defect | first seed |
| --- | --- | --- |
| `early` | what comes too early | 1 |
| `late` | what comes late | 20 |
| `never` | what never comes | none of 5,000 |

Edited.
END

# A defect that the table lacks.
sed -i '/never/d' "$page"
if "$scratch/tools/planted.py" --tree "$scratch/tree" 2>"$scratch/said"; then
  echo "a defect that the table lacks was passed over"
  exit 1
fi
grep -qx "never: not in docs/testing.md" "$scratch/said"
