#!/usr/bin/env bash
# Installs Debian's chromium, which the tests of the marker `browser` drive; `make setup-browser` calls it. Safe to repeat.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

if command -v chromium >/dev/null; then
    say "the browser is there: $(chromium --version --no-sandbox 2>/dev/null || command -v chromium)"
    exit 0
fi
how="install it as root (Debian: apt-get install --no-install-recommends chromium fonts-dejavu-core); until then the tests of the marker \`browser\` are skipped"
[ "$(id -u)" = 0 ] || die "chromium is not installed, and only root may install it" "$how"
command -v apt-get >/dev/null || die "chromium is not installed, and there is no apt-get to install it with" "$how"
step "reading the package lists" apt-get update -qq
step "installing chromium" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core
say "the browser is installed: $(chromium --version --no-sandbox)"
