#!/usr/bin/env bash
# The first thing to run on a new GPU box: what only a GPU settles, in one command and under 8 minutes on one GPU (it
# stops by itself; not yet seen on a GPU). Needs an environment made by ./install.sh.
#
#   bash tests/gpu/first_look.sh                  with .venv (VENV=DIR for another)
#   bash tests/gpu/first_look.sh --system         with this box's own python3 and packages
#   bash tests/gpu/first_look.sh attention DTYPE  only the checks with one of these words in their name
#   bash tests/gpu/first_look.sh --rehearse       no GPU: what of it a CPU can do, with a tiny model
#
# Ends with one table: check, figure, holds or not. Without a GPU it says what it would run.
# exit codes: 0 every check that ran holds; 1 one does not; 2 wrong use; 77 skipped: there is no GPU here.
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" --first-look "$@"
