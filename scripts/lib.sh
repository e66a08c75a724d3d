# Functions for the scripts in this folder: messages with elapsed time, and steps that show output only if they fail.

began_s=$(date +%s)

say() { printf '[%4ds] %s\n' "$(($(date +%s) - began_s))" "$*"; }

die() {
    printf 'error: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '       %s\n' "$line" >&2; done
    exit 1
}

# step TITLE COMMAND... runs the command, says every 15 s that it runs, and shows the end of its output if it fails.
step() {
    local title=$1 log pid ticks=0 status=0
    shift
    log=$(mktemp)
    say "$title"
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    trap 'kill "$pid" 2>/dev/null; rm -f "$log"; exit 130' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.5
        ticks=$((ticks + 1))
        if ((ticks % 30 == 0)); then say "  still: $title"; fi
    done
    wait "$pid" || status=$?
    trap - INT TERM
    if ((status != 0)); then
        tail -n 40 "$log" >&2
        if grep -qiE 'no space left|disk quota' "$log"; then
            printf 'hint: the disk is full; free some space and run the same command again\n' >&2
        elif grep -qiE 'connection|timed? ?out|name resolution|ResolutionImpossible|No matching distribution' "$log"; then
            printf 'hint: if the package index is not reachable, check network, proxy and pip settings; then run it again\n' >&2
        fi
        rm -f "$log"
        die "this step failed (status $status): $title"
    fi
    rm -f "$log"
}
