#!/bin/sh
# A program that becomes Python. With AS_CHILD it starts Python instead.
if [ -n "$AS_CHILD" ]; then
    "$PYTHON" -m tests.programs.train "$@"
    exit $?
fi
exec "$PYTHON" -m tests.programs.train "$@"
