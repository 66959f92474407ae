#!/bin/sh
exec "$PYTHON" -m tests.programs.broken "$@"
