#!/bin/sh
# Run a script with the first Python that can make this project's virtual environment, or say in plain words what to install.
# PYTHON=/path/to/python3 names one. The engine's packages exist for Python 3.11, 3.12 and 3.13; the locks were made on 3.11.
fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
bare=
seen=
for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c "$fits" >/dev/null 2>&1; then
        "$candidate" -c 'import venv, ensurepip' >/dev/null 2>&1 && exec "$candidate" "$@"
        bare=$candidate
    else
        version=$("$candidate" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) && seen="$seen $candidate ($version)"
    fi
done
if [ -n "$bare" ]; then
    version=$("$bare" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "$bare is new enough but cannot make virtual environments. On Debian or Ubuntu: sudo apt-get install python$version-venv" >&2
    exit 1
fi
echo "Eagle3 Lab needs Python 3.11, 3.12 or 3.13; ${PYTHON:+\"$PYTHON\" is none of them. }found:${seen:- no Python}." >&2
echo "Install one (Debian, Ubuntu: sudo apt-get install python3.11 python3.11-venv; Fedora, RHEL: sudo dnf install python3.12;" >&2
echo "elsewhere: uv python install 3.12, or python.org) and run this again, or name it: make lab PYTHON=/path/to/python3" >&2
exit 1
