#!/usr/bin/env bash
# Stands for the interpreter that install.sh uses and puts into the environment: notes every pip and module run in $LOG,
# fails where $FAIL_AT matches, and answers for the torch that $TORCH_IS says is installed.
case "$1 ${2:-}" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg" ;;
"-m pip" | "-m harness."*)
  printf '%s\n' "${*:2}" >>"$LOG"
  [[ -z ${SLEEP_AT:-} || "$*" != *$SLEEP_AT* ]] || sleep 60
  [[ -z ${FAIL_AT:-} || "$*" != *$FAIL_AT* ]] || exit 1 ;;
"-c "*urllib*) [[ -n ${INDEX_IS_UP:-} ]] ;;
"- "*) PYTHONPATH=$FAKE_SITE exec "$REAL_PYTHON" "$@" ;; # the check of torch
*) exec "$REAL_PYTHON" "$@" ;;
esac
