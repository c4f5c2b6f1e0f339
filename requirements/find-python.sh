#!/usr/bin/env bash
# Prints the first Python that is at least 3.MINOR (default 3.11): `find-python.sh [MINOR] [CANDIDATE...]`.
# A candidate is run, not only found: version managers leave commands on the PATH that cannot start.
minor=${1:-11}
shift
[ $# -gt 0 ] || set -- python3 python python3.13 python3.12 python3.11
for candidate in "$@"; do
  path=$("$candidate" -c "import sys
if sys.version_info >= (3, $minor): print(sys.executable)" 2>/dev/null)
  [ -n "$path" ] && echo "$path" && exit 0
done
for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python; do
  [ -x "$candidate" ] && "$candidate" -c "import sys; sys.exit(sys.version_info < (3, $minor))" \
    && found=$candidate
done 2>/dev/null
[ -n "$found" ] && echo "$found"
