#!/usr/bin/env bash
# Fetches the libraries of the dashboard's page from npm and writes app/dashboard/static/vendor: the files as their packages
# have them, and vendor.json with package, version, licence and the SHA-256 of each file. A test compares the hashes.
#
# Another version is taken by changing a line of `packages` below and running this again. It needs npm and Python 3, and uses
# the registry that the machine's npm is set to.
set -euo pipefail
cd "$(dirname "$0")/.."

target=app/dashboard/static/vendor
# package@version, then pairs of a file in the package and its name here. The module of htm contains Preact; its text is that
# of release 10.5.14 as far as the two can be compared, and this release's licence goes with it.
packages=(
    "htm@3.1.1 preact/standalone.module.js=htm-preact-standalone.module.js dist/htm.module.js=htm.module.js LICENSE=htm.LICENSE"
    "preact@10.5.14 LICENSE=preact.LICENSE"
    "uplot@1.6.32 dist/uPlot.iife.min.js=uPlot.iife.min.js dist/uPlot.min.css=uPlot.min.css LICENSE=uplot.LICENSE"
)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$target"
rm -f "$target"/*
: >"$work/listed"
for line in "${packages[@]}"; do
    read -r package files <<<"$line"
    folder=$work/${package%@*}
    mkdir -p "$folder"
    (cd "$folder" && npm pack --silent "$package" >/dev/null && tar -xzf ./*.tgz)
    for pair in $files; do
        install -m 644 "$folder/package/${pair%%=*}" "$target/${pair#*=}"
        printf '%s\t%s\t%s\n' "$folder/package/package.json" "${pair%%=*}" "${pair#*=}" >>"$work/listed"
    done
done
python3 - "$work/listed" "$target" <<'PYTHON'
import hashlib
import json
import sys
from pathlib import Path

listed, target = Path(sys.argv[1]), Path(sys.argv[2])
packages = {}
for line in listed.read_text().splitlines():
    described, source, name = line.split("\t")
    about = json.loads(Path(described).read_text())
    one = packages.setdefault(
        about["name"],
        {"package": about["name"], "version": about["version"], "licence": about["license"], "files": []},
    )
    digest = hashlib.sha256((target / name).read_bytes()).hexdigest()
    one["files"].append({"file": name, "from": source, "sha256": digest})
(target / "vendor.json").write_text(json.dumps(list(packages.values()), indent=2) + "\n")
PYTHON
echo "vendored into $target:"
ls -l "$target"
