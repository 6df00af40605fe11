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
# `finds` says which seeds fail, with which defect, or with "none" of them. Somebody edits the page while
# the seeds are looked for. `calls` is how the program was called.
cat >"$scratch/tree/bazel-bin/tests/simulation/simulation" <<'END'
#!/usr/bin/env bash
defect=${DISTGRAD_PLANTED:-none} from=0 seeds=0 status=0
echo "$defect: $*" >>calls
[[ $defect != early ]] || sed -i 's/Behind/Edited/; s/comes early/comes too early/' docs/testing.md
while (($#)); do
  case $1 in
    --from) from=$2 ;;
    --seeds) seeds=$2 ;;
    --case) defect+=" in ${2##*/}" from=38 ;;
  esac
  shift
done
for seed in $(sed -n "s/^$defect: //p" finds); do
  if ((seed >= from && seed < from + seeds)); then
    echo "seed $seed: it failed"
    status=1
  fi
done
exit $status
END
chmod +x "$scratch/tree/bazel-bin/tests/simulation/simulation"
cd "$scratch"

failed=0
# check WHAT STATUS SAID OPTIONS...
check() {
  local status=0
  : >calls
  tools/planted.py --tree tree "${@:4}" >said 2>&1 || status=$?
  if [[ $status != "$2" ]] || ! diff <(echo "$3") said; then
    echo "FAILED: $1: status $status; what it should say (<) and what it said (>)" >&2
    failed=1
  fi
}

printf '%s\n' 'early: 1' 'late: 20 22' >finds
check "no seed finds one, and it has no case" 1 "early: seed 1: it failed
late: seed 20: it failed
never: NOT FOUND by 5000 seeds
2 of 3 planted defects are found"

touch tests/simulation/cases/{late,never}.txt
printf '%s\n' 'early: 1' 'late in late.txt: 45' 'never in never.txt: 38 40' >finds
check "a case finds what no seed does" 0 "early: seed 1: it failed
late: NOT FOUND by 5000 seeds, 1 of 20 seeds of its case: it failed
never: NOT FOUND by 5000 seeds, 2 of 20 seeds of its case: it failed
3 of 3 planted defects are found" --table
diff - "$page" <<'END' || failed=1
Before.

| planted | defect | first seed |
| --- | --- | --- |
| `early` | what comes too early | 1 |
| `late` | what comes late | none of 5,000; its case |
| `never` | what never comes | none of 5,000 |

Edited.
END
# Without a defect: the seeds to the last one of the table, 7, and the cases.
diff <(sed -n 's/^none: //p' calls) - <<END || failed=1
--whole --from 0 --seeds 8
--whole --case $scratch/tests/simulation/cases/late.txt --seeds 20
--whole --case $scratch/tests/simulation/cases/never.txt --seeds 20
END

check "by its name, and no seed finds it" 0 \
  "never: NOT FOUND by 5000 seeds, 2 of 20 seeds of its case: it failed
1 of 1 planted defects are found" never

# What has no case needs a seed, and what has one needs no other.
rm tests/simulation/cases/late.txt
printf '%s\n' 'early: 1' 'late: 20 22' 'never in never.txt: 38 40' >finds
check "one has a case" 0 "early: seed 1: it failed
late: seed 20: it failed
never: 2 of 20 seeds of its case: it failed
3 of 3 planted defects are found"
# Without a defect: the seeds to the last one that found any, and the case.
diff <(sed -n 's/^none: //p' calls) - <<END || failed=1
--whole --from 0 --seeds 2
--whole --from 2 --seeds 19
--whole --case $scratch/tests/simulation/cases/never.txt --seeds 20
END

sed -i '/^never/d' finds
check "its case does not find it any more" 1 "early: seed 1: it failed
late: seed 20: it failed
never: NOT FOUND by its case
2 of 3 planted defects are found"

# What fails without a defect is no find.
echo 'none: 0' >>finds
check "a seed fails without a defect" 1 \
  "one of the seeds 0 to 1 fails without a planted defect, so it finds none: seed 0: it failed"
sed -i 's/^none.*/none: 25/; s/^late.*/late: 30/' finds
check "a seed behind those of the table fails without a defect" 1 "early: seed 1: it failed
one of the seeds 2 to 30 fails without a planted defect, so it finds none: seed 25: it failed"
sed -i 's/^none.*/none in never.txt: 39/' finds
check "a case fails without a defect" 1 "early: seed 1: it failed
late: seed 30: it failed
never.txt fails without a planted defect, so it finds none: seed 39: it failed"

check "the patch is looked at alone" 0 \
  "tests/simulation/planted.patch applies, and has the 3 defects of docs/testing.md" --check
if [[ -s calls ]]; then
  echo "FAILED: the patch was to be looked at, and the simulation ran" >&2
  failed=1
fi
sed -i '/never/d' "$page"
check "the table lacks a defect" 1 "never: not in docs/testing.md"
check "the table lacks a defect, and that alone is looked at" 1 "never: not in docs/testing.md" --check
exit $failed
