#!/usr/bin/env bash
# Makes a virtual environment with the pins of one purpose: install.sh VENV experiments|dev [PYTHON] [ACCELERATOR]
# Uses uv where it is, else installs it into the environment, else makes do with pip.
set -euo pipefail
venv=$1 purpose=$2 asked=${3:-} accelerator=${4:-}
python=$asked
here=$(dirname "$0")

fail() { echo "error: $*" >&2; exit 2; }

if [ -z "$python" ]; then
  python=$(bash "$here/find-python.sh") \
    || fail "no Python 3.11 or newer found; install one, or say which: make PYTHON=/path/to/python"
else
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
    || fail "PYTHON=$python is not a working Python 3.11 or newer"
fi

version='import sys; print(*sys.version_info[:2], sep=".")'
has=$("$venv/bin/python" -c "$version" 2>/dev/null || true)
if [ -z "$has" ] || { [ -n "$asked" ] && [ "$has" != "$("$python" -c "$version")" ]; }; then
  echo "Setting up $venv with $("$python" --version) (the first time takes about a minute) ..."
  rm -rf "$venv"
  "$python" -m venv "$venv" 2>/dev/null || uv venv --quiet --seed --python "$python" "$venv" \
    || fail "cannot make a virtual environment: install Python's venv module (Debian: python3-venv)"
fi
py=$venv/bin/python

pip=("$py" -m pip install --quiet)
if uv --version >/dev/null 2>&1; then
  installer=(uv pip install --quiet --python "$py")
elif "${pip[@]}" uv 2>/dev/null && "$py" -m uv --version >/dev/null 2>&1; then
  installer=("$py" -m uv pip install --quiet --python "$py")
else
  installer=("${pip[@]}")
fi

install() { # with pip where uv cannot, such as behind a proxy whose certificate only pip was told of
  "${installer[@]}" "$@" && return 0
  [ "${installer[*]}" != "${pip[*]}" ] && "$py" -m pip --version >/dev/null 2>&1 || return 1
  echo "uv could not install the packages; trying pip ..."
  installer=("${pip[@]}")
  "${installer[@]}" "$@"
}

pins=$here/$purpose.txt
echo "Installing $purpose packages ..."
rm -f "$venv/.ready-$purpose"
install -r "$pins"
[ -z "$accelerator" ] || install -c "$pins" "jax[$accelerator]"
install --no-deps --editable "$here/.."

touch "$venv/.ready-$purpose"
[ "$purpose" = dev ] && touch "$venv/.ready-experiments" # the wider set holds the other
exit 0
