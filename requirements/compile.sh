#!/usr/bin/env bash
# Writes the pins beside this script from pyproject.toml: `make pins`. One resolution serves every Python
# (environment markers choose), and every file is a cut of the same one. Needs uv.
set -euo pipefail
cd "$(dirname "$0")/.."

compile() { # compile NAME EXTRA... : requirements/NAME.txt for these extras of the project
  local name=$1 extras=() pins; shift
  for extra in "$@"; do extras+=(--extra "$extra"); done
  pins=$(uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links "${constraint[@]}" "${extras[@]}" pyproject.toml)
  { echo "# Pins made by \`make pins\`; edit pyproject.toml instead."; echo "$pins"; } \
    >"requirements/$name.txt"
  echo "requirements/$name.txt: $(grep -c == "requirements/$name.txt") lines"
}

constraint=()
compile all dev reasoning # the widest set first, so that every file agrees with it
constraint=(--constraint requirements/all.txt)
compile core
compile experiments experiments
compile reasoning reasoning
compile dev dev
rm requirements/all.txt
