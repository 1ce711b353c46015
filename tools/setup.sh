#!/bin/sh
# Finds a Python (>= 3.11) and lets it set up the environment: tools/setup.sh VENV EXTRAS CUDA [PYTHON]
set -eu

works() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

if [ -n "${4:-}" ]; then
  if ! works "$4"; then
    echo "error: PYTHON=$4 does not run or is older than Python 3.11." >&2
    exit 1
  fi
  exec "$4" "$(dirname "$0")/setup_env.py" --venv "$1" --extras "$2" --cuda "$3" --use-this-python
fi

# An environment that exists keeps its Python, unless another one is asked for.
for candidate in "$1/bin/python" python3 python3.13 python3.12 python3.11; do
  if works "$candidate"; then
    exec "$candidate" "$(dirname "$0")/setup_env.py" --venv "$1" --extras "$2" --cuda "$3"
  fi
done
echo "error: no Python 3.11 or newer was found; install one, or name it: make PYTHON=/path/to/python" >&2
exit 1
