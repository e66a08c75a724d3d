#!/usr/bin/env bash
# Serves in the foreground: the checks and preparations of `make serve`, then app.serve in this very process, so that
# Ctrl-C reaches it. Environment: VENV, PORT, CONFIG, ARGS (further arguments of app.serve).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

venv=${VENV:-.venv} port=${PORT:-8000} config=${CONFIG:-deploy/cpu.yaml}
[ -f "$config" ] || die "there is no configuration $config" "choose one: make serve CONFIG=deploy/cpu.yaml (see deploy/)"
"$venv/bin/python" scripts/check_port.py "$port"
# The default model is made here so that its progress shows; whatever the configuration names is resolved by app.serve.
if grep -q 'smollm2-135m-instruct' "$config"; then
    "$venv/bin/python" -m app.models smollm2-135m-instruct >/dev/null
fi
# shellcheck disable=SC2086  # ARGS is a list of words
exec "$venv/bin/python" -m app.serve --config "$config" --port "$port" ${ARGS:-}
