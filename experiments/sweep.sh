#!/usr/bin/env bash
# Experiments times seeds, one after another, then the table over seeds.
#
#   experiments/sweep.sh "lamer_darkroom gigpo_darkroom:laptop" "0 1 2" [--config.a.b=value ...]
#
# Runs lie in $OUT (runs/sweep), one folder each. Started again it goes on where it was stopped, and
# finished runs are skipped. An ablation is one more call with another value:
#
#   experiments/sweep.sh lamer_darkroom "0 1 2" --config.credit.gamma_traj=0
set -euo pipefail

if [ $# -lt 2 ]; then
  sed -n '2,/^set/s/^#\( \|$\)//p' "$0" >&2
  exit 2
fi
experiments=$1 seeds=$2
shift 2

export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1} # huge pages for malloc: faster, same numbers
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
[ -x "$python" ] || python=python3
out=${OUT:-runs/sweep}
tag=$(printf '%s' "$*" | sed 's/--config\.//g' | tr -c '[:alnum:].=-' '_')

folders=()
for experiment in $experiments; do
  for seed in $seeds; do
    folder=$out/${experiment/:/-}${tag:+-$tag}-seed$seed
    folders+=("$folder")
    file=$here/${experiment%%:*}.py
    variant=${experiment#"${experiment%%:*}"}
    echo "== $folder"
    "$python" "$here/run.py" --config="$file$variant" --config.seed="$seed" \
      --workdir="$folder" --resume "$@" || [ $? -eq 3 ] # 3: the collapse guard stopped it; evaluate the rest
  done
done
"$python" "$here/compare.py" "${folders[@]}"
