#!/usr/bin/env bash
# Finds a Python that can run Triaxis and makes .venv where there is none (launch/start/bootstrap.py has the rules).
# Sourced by launch/pretrain_gpt.sh and tests/run.sh. By itself it prepares the environment and prints its Python:
#
#   bash launch/bootstrap.sh          # what training needs
#   bash launch/bootstrap.sh dev      # and what the tests need
#   bash launch/bootstrap.sh text     # and another extra of pyproject.toml, here for parquet, zstd and more tokenizers
#
# TRIAXIS_PYTHON=/path/to/python   use exactly that one
# TRIAXIS_BOOTSTRAP=0              never install anything

# With PYTHONINSPECT, Python and each rank would open an interactive prompt at exit.
unset PYTHONINSPECT
triaxis_root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# triaxis_python [extra ...]: prints the interpreter to use.
triaxis_python() {
  local candidate said
  for candidate in python3 python python3.13 python3.12 python3.11 "${TRIAXIS_PYTHON:-}"; do
    # -I ignores PYTHONHOME and similar variables, which may keep any Python from starting.
    if "$candidate" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      if ! said=$("$candidate" -c '' 2>&1); then
        grep -i -m 1 error <<< "$said" >&2 || true
        echo "triaxis: $candidate starts only without variables of this environment: $(compgen -e PYTHON | tr '\n' ' ')" >&2
        echo "triaxis: its message is above. Correct or unset the variable that it is about." >&2
        return 2
      fi
      PYTHONSAFEPATH=1 "$candidate" "$triaxis_root/launch/start/bootstrap.py" "${@/#/--extra=}"
      return
    fi
  done
  echo "triaxis: no Python 3.11 or newer was found (tried python3, python, python3.13 to python3.11 and TRIAXIS_PYTHON)." >&2
  echo "triaxis: install one (on Debian 12: apt-get install python3 python3-venv), or set TRIAXIS_PYTHON to it." >&2
  return 2
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  case "${1:-}" in
    -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" ;;
    *) triaxis_python "$@" ;;
  esac
fi
