#!/bin/sh
# Runs Fusewire's tests and benches on a device, from a folder that `fusewire-build bundle` made.
# Needs a shell, coreutils, awk, grep, sed, gzip and, for a GPU, its driver. Exit status: 0 if no
# section failed, 1 if a section failed, 2 for wrong usage or a missing device, 130 if interrupted.
set -u

usage() {
    cat <<'TEXT'
usage: run.sh [--device cpu|cuda|cuda:N|hip|hip:N] [--out DIR] [--quick] [--strict]
              [--only SECTION[,SECTION..]]
  --device  device of the ranks; cpu by default. With a number, all ranks share that GPU.
  --out     folder for the results; fusewire-results by default
  --quick   runs a selection that takes a few minutes at most
  --strict  counts a skipped section as a failure
  --only    runs only these of: files info conformance graphs failures bitwise sanitizers benches
TEXT
}

wrong() {
    echo "run.sh: $1" >&2
    exit 2
}

SECTIONS='files info conformance graphs failures bitwise sanitizers benches'
device=cpu out=fusewire-results quick=no strict=no only=
while [ $# -gt 0 ]; do
    case $1 in
        --device | --out | --only)
            [ $# -gt 1 ] || wrong "$1 needs a value (see --help)"
            case $1 in
                --device) device=$2 ;;
                --out) out=$2 ;;
                --only) only="$only $(echo "$2" | tr ',' ' ')" ;;
            esac
            shift
            ;;
        --quick) quick=yes ;;
        --strict) strict=yes ;;
        -h | --help) usage; exit 0 ;;
        *) wrong "unknown argument $1 (see --help)" ;;
    esac
    shift
done
case $device in
    cpu | cuda | hip) ;;
    cuda:* | hip:*)
        case ${device#*:} in
            '' | *[!0-9]*) wrong "--device $device: expected a number after the colon" ;;
        esac
        ;;
    *) wrong "--device $device: expected cpu, cuda, cuda:N, hip or hip:N" ;;
esac
kind=${device%%:*}
[ -n "$out" ] || wrong '--out needs a folder'
for word in $only; do
    case " $SECTIONS " in
        *" $word "*) ;;
        *) wrong "--only $word: expected one of $SECTIONS" ;;
    esac
done
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 2
for tool in timeout awk grep sed tr date cat; do
    command -v "$tool" >/dev/null 2>&1 ||
        wrong "$tool is not in the path; it is a part of coreutils, gawk, grep or sed"
done

# Removes the variables of an outer launcher. Otherwise the tests would start as ranks of that
# launcher's job.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT \
    TORCHCOMM_RANK TORCHCOMM_SIZE TORCHELASTIC_USE_AGENT_STORE \
    OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE PMI_RANK PMI_SIZE SLURM_PROCID SLURM_NTASKS \
    FUSEWIRE_REQUIRE FUSEWIRE_FULL FUSEWIRE_TEST_ROLE FUSEWIRE_TEST_MULTI_RANK_GRID FUSEWIRE_HOST_ID
export FUSEWIRE_TEST_DEVICE="$device"
export FUSEWIRE_IMAGES="$here/images${FUSEWIRE_IMAGES:+:$FUSEWIRE_IMAGES}"
export RUST_BACKTRACE="${RUST_BACKTRACE:-1}"
# Kernels of ranks in one process wait for each other, so each stream needs its own hardware queue.
[ "$kind" != cuda ] || export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}"

# Process id of the `timeout` that runs the current command. `timeout` runs the command in a process
# group and forwards signals to that group.
child=
interrupted() {
    trap '' INT TERM HUP
    if [ -n "$child" ]; then
        kill -TERM "$child" 2>/dev/null
        wait "$child" 2>/dev/null
    fi
    echo "run.sh: interrupted in section ${section:-none}; its log is in $out" >&2
    exit 130
}
trap interrupted INT TERM HUP

# bounded SECONDS LOG COMMAND..: runs COMMAND for at most SECONDS and appends its output to LOG.
bounded() {
    seconds=$1 to=$2
    shift 2
    printf '\n$ %s\n' "$*" >>"$to"
    timeout -k 10 "$seconds" "$@" >>"$to" 2>&1 </dev/null &
    child=$!
    wait "$child"
    code=$?
    child=
    return "$code"
}

mkdir -p "$out" 2>/dev/null || wrong "--out $out cannot be created"
out=$(CDPATH='' cd -- "$out" && pwd) || wrong "--out cannot be entered"
rows=$out/.rows
{ : >"$rows"; } 2>/dev/null || wrong "--out $out cannot be written"

# The programs are compressed. Unpacks them into the results folder and removes them at exit.
programs=$here
if [ -e "$here/bin/fusewire.gz" ]; then
    command -v gzip >/dev/null 2>&1 || wrong 'gzip is not in the path'
    programs=$out/.programs
    trap 'rm -rf "$out/.programs"' EXIT
    mkdir -p "$programs/bin" "$programs/tests" || wrong "--out $out cannot be written"
    for packed in "$here"/bin/*.gz "$here"/tests/*.gz; do
        to=${packed#"$here"/}
        to=$programs/${to%.gz}
        # If gzip fails, the section `files` and every section that needs the program will fail.
        gzip -dc "$packed" >"$to" 2>/dev/null
        chmod 755 "$to"
    done
    ln -sfn "$here/cuda" "$programs/cuda"
fi

# If the device is missing, the script stops here with one line of output.
section=info
: >"$out/devices.txt"
bounded 60 "$out/devices.txt" "$programs/bin/fusewire" info
code=$?
[ $code -eq 0 ] || {
    last=$(tail -n 1 "$out/devices.txt")
    wrong "bin/fusewire does not run here (status $code): $last; README.txt lists what it needs"
}
line=$(grep -E "^  (found  |missing)  $kind " "$out/devices.txt" |
    if [ "$device" = "$kind" ]; then cat; else grep -E " $device: |missing"; fi | head -n 1)
name=$(echo "$line" | sed -E "s/^  (found|missing) +$kind +//")
case $line in
    '  found'*) ;;
    '') wrong "--device $device: no such device; bin/fusewire info lists the devices" ;;
    *) wrong "--device $device: $name" ;;
esac

# ---- sections ------------------------------------------------------------------------------------

# Result of the current section, and text that explains the result. `fail`, `skip` and `note` set
# them.
result='' what=''
fail() {
    result=FAIL
    what="${what:+$what; }$1"
}
skip() {
    [ "$result" = FAIL ] || result=skip
    what="${what:+$what; }$1"
}
note() {
    what="${what:+$what; }$1"
}

# left: sets seconds_left to the seconds that remain of the section's limit, at least 1.
left() {
    seconds_left=$((limit - ($(date +%s) - began)))
    [ "$seconds_left" -ge 1 ] || seconds_left=1
}

# explain CODE NAME: fails the section, because the command NAME failed with status CODE.
explain() {
    case $1 in
        124 | 137) fail "$2: not finished within the section's $limit s" ;;
        126 | 127) fail "$2: cannot be started: $(tail -n 1 "$part" | tr -d '\n')" ;;
        *) fail "$2: status $1" ;;
    esac
}

passed=0
# tests BINARY WANTED ARGUMENTS..: runs the test binary BINARY. At least WANTED tests must pass.
tests() {
    binary=$1 wanted=$2
    shift 2
    part=$out/.part
    : >"$part"
    left
    # shellcheck disable=SC2086 # words
    bounded "$seconds_left" "$part" ${sanitizer-} \
        "$programs/tests/$binary" --test-threads=1 --nocapture "$@"
    code=$?
    cat "$part" >>"$log"
    good=$(awk '
        /^test result: / { for (i = 2; i <= NF; i++) if ($i ~ /^passed/) sum += $(i - 1) }
        END { print sum + 0 }' "$part")
    passed=$((passed + good))
    if [ "$code" -ne 0 ]; then
        failed=$(awk '
            /^failures:$/ { on = 1; next }
            /^test result/ { on = 0 }
            on && NF == 1 { print $1 }' "$part" | sort -u | tr '\n' ' ')
        [ -n "$failed" ] || failed=$(awk '
            /^test .* \.\.\. / { name = $2 }
            END { if (name) print "in " name }' "$part")
        explain "$code" "tests/$binary${failed:+ (${failed% })}"
    elif [ "$good" -lt "$wanted" ]; then
        fail "tests/$binary: $good tests have passed, expected $wanted"
    fi
    rm -f "$part"
}

# exactly BINARY TEST..: runs the named tests of BINARY. Every TEST must exist and pass.
exactly() {
    binary=$1
    shift
    tests "$binary" $# --exact "$@"
}

# command_of NAME ARGUMENTS..: runs the program NAME in bin/.
command_of() {
    program=$1
    shift
    part=$out/.part
    : >"$part"
    left
    bounded "$seconds_left" "$part" "$programs/bin/$program" "$@"
    code=$?
    cat "$part" >>"$log"
    [ "$code" -eq 0 ] || explain "$code" "bin/$program $1 $2"
    rm -f "$part"
}

# in_multi_rank_grid COMMAND..: runs COMMAND with its ranks in a multi-rank grid, if the bundle has
# the images.
in_multi_rank_grid() {
    if [ "$kind" != cuda ]; then
        return
    fi
    if ! ls "$here"/images/fusewire-kernels-multi-rank-grid.*.ptx* >/dev/null 2>&1; then
        note 'no tests in a multi-rank grid: the bundle was made without its images'
        [ $strict = no ] || fail '--strict requires them'
        return
    fi
    multi_rank_grid=yes
    export FUSEWIRE_TEST_MULTI_RANK_GRID=1
    "$@"
    unset FUSEWIRE_TEST_MULTI_RANK_GRID
    multi_rank_grid=
}

run_files() {
    if ! command -v sha256sum >/dev/null 2>&1; then
        skip 'sha256sum is not in the path'
        return
    fi
    (cd "$here" && sha256sum -c SHA256SUMS) >>"$log" 2>&1
    code=$?
    if [ "$code" -ne 0 ]; then
        differ=$(grep -E ': FAILED' "$log" | sed 's/: FAILED.*//' | tr '\n' ' ')
        fail "not as bundled: ${differ% }"
    else
        note "$(grep -c ': OK$' "$log") files as bundled"
    fi
}

run_info() {
    cat "$out/devices.txt" >>"$log"
    note "$name"
    if [ "$kind" = cuda ] && command -v nvidia-smi >/dev/null 2>&1; then
        left
        bounded "$seconds_left" "$log" nvidia-smi
        left
        bounded "$seconds_left" "$log" nvidia-smi topo -m
    fi
}

run_conformance() {
    exactly on_device short_form_of_1_rank short_form_of_2_ranks three_to_eight_ranks_as_threads \
        types_reductions_and_the_fused_norm enqueued_and_replayed two_ranks_as_processes
    if [ $quick = no ]; then
        if [ "$kind" = cpu ]; then
            tests conformance 10
        else
            # lanes_as_threads needs the CPU device. One GPU has too few hardware queues for sixteen
            # ranks.
            tests conformance 6 --skip lanes_as_threads --skip every_number_of_ranks \
                --skip ranks_as_processes
        fi
        tests operations 33 --skip abort:: --skip determinism::
    fi
    in_multi_rank_grid exactly on_device short_form_of_2_ranks three_to_eight_ranks_as_threads \
        types_reductions_and_the_fused_norm
    note "$passed tests passed"
}

run_graphs() {
    exactly graphs several_graphs_and_eager_calls_between_them \
        graphs_are_dropped_and_captured_again streams_join_a_capture_by_events \
        zero_elements_are_replayed_in_step memory_lives_as_long_as_the_graph
    if [ $quick = no ]; then
        tests graphs 9 --skip replays::
        # Replays as often on a GPU as on the CPU. By default, the test replays less often on a GPU.
        FUSEWIRE_TEST_REPLAYS=${FUSEWIRE_TEST_REPLAYS-100000}
        export FUSEWIRE_TEST_REPLAYS
        exactly graphs replays::a_hundred_thousand_replays_of_a_mix
        unset FUSEWIRE_TEST_REPLAYS
        tests graphs 3 replays:: --skip a_hundred_thousand_replays
    fi
    note "$passed tests passed"
}

run_failures() {
    exactly on_device a_rank_that_never_launches_is_named_and_the_device_works_afterwards \
        a_process_that_ends_is_named
    exactly operations abort::abort_ends_waits
    exactly graphs a_failed_replay_fails_all_later_calls
    if [ $quick = no ]; then
        exactly operations mismatch::different_calls_are_reported_at_once
    fi
    note "$passed tests passed"
}

# The oracle of the conformance cases is plain CPU code. These tests instead compare the results of
# two devices: this device and the CPU device.
run_bitwise() {
    exactly on_device the_bits_are_those_of_the_cpu
    if [ $quick = no ]; then
        exactly operations determinism::special_numbers_equal_the_reference \
            determinism::a_row_does_not_depend_on_its_batch \
            determinism::the_fused_norm_equals_its_steps \
            determinism::every_setting_gives_the_same_bits_on_every_rank
    fi
    note "$passed tests passed"
}

ERRORS_FOUND=86
# tool_options TOOL: prints the options of TOOL. Disables memcheck's reports of failed driver calls,
# because the library's queries of a GPU's capabilities may fail.
tool_options() {
    echo "--tool $1 --error-exitcode $ERRORS_FOUND --target-processes all --print-limit 20"
    [ "$1" != memcheck ] || echo '--report-api-errors no'
}

# sanitize TOOL TEST..: runs the TESTs under TOOL, a tool of compute-sanitizer.
sanitize() {
    tool=$1
    shift
    sanitizer="compute-sanitizer $(tool_options "$tool" | tr '\n' ' ')"
    before=$what was=$result
    lines=$(wc -l <"$log")
    exactly on_device "$@"
    sanitizer=
    run="$*${multi_rank_grid:+ in a multi-rank grid}"
    [ "$code" -ne 0 ] || [ "$what" != "$before" ] || note "$tool: no errors in $run"
    [ "$code" -ne 0 ] || return
    what=$before result=$was
    if [ "$code" -eq $ERRORS_FOUND ]; then
        fail "$tool found errors in $run"
    elif [ "$run" = short_form_of_2_ranks ] &&
        tail -n "+$((lines + 1))" "$log" | grep -q 'timed out'; then
        note "$tool: two ranks do not run concurrently under it"
    else
        explain "$code" "$tool, $run"
    fi
}

# seeded_write: memcheck must report a seeded out-of-bounds write.
seeded_write() {
    part=$out/.part
    : >"$part"
    left
    # shellcheck disable=SC2046 # words
    bounded "$seconds_left" "$part" compute-sanitizer $(tool_options memcheck) \
        "$programs/tests/on_device" --test-threads=1 --nocapture --exact --ignored \
        seeded_write_beyond_memory
    code=$?
    cat "$part" >>"$log"
    ran=$(grep -c '^seeded bug: ' "$part")
    errors=$(grep -c 'Invalid __global__ write' "$part")
    rm -f "$part"
    if [ "$code" -eq $ERRORS_FOUND ] && [ "$errors" -gt 0 ]; then
        note 'memcheck finds the seeded write'
    else
        fail "memcheck does not find the seeded write (status $code, $ran launches, $errors errors)"
    fi
}

# grid_sanitizers: runs two ranks in a multi-rank grid under each tool. The blocks of both ranks run
# concurrently, because they belong to one grid.
grid_sanitizers() {
    for tool in memcheck racecheck synccheck; do
        sanitize "$tool" short_form_of_2_ranks
    done
    if [ $quick = no ]; then
        sanitize memcheck types_reductions_and_the_fused_norm
    fi
}

# under TOOL TEST: runs a test of seeded bugs under TOOL. Sets `code` to its status and `part` to
# the file with its output.
under() {
    part=$out/.part
    : >"$part"
    left
    [ "$seconds_left" -le 120 ] || seconds_left=120
    # shellcheck disable=SC2046 # words
    bounded "$seconds_left" "$part" compute-sanitizer $(tool_options "$1") \
        "$programs/tests/on_device" --test-threads=1 --nocapture --exact --ignored "$2"
    code=$?
    cat "$part" >>"$log"
}

# seeded_kernel TOOL REPORT RIGHT TEST..: checks that TOOL prints REPORT for at least one TEST. The
# TESTs contain different forms of the same bug. The test RIGHT runs the kernel without the bug, and
# TOOL must find no error in RIGHT.
seeded_kernel() {
    tool=$1 says=$2 right=$3
    shift 3
    found=
    for test in "$@"; do
        [ -z "$found" ] || break
        under "$tool" "$test"
        [ "$code" -ne $ERRORS_FOUND ] || ! grep -q '^seeded bug: ' "$part" ||
            ! grep -q "$says" "$part" || found=$test
        last="$test: status $code, $(grep -c '^seeded bug: ' "$part") lines of the test"
    done
    under "$tool" "$right"
    if [ -z "$found" ]; then
        fail "$tool does not find the seeded bug ($last)"
    elif [ "$code" -ne 0 ]; then
        fail "$tool, $right, the kernel without its bug: status $code"
    else
        note "$tool finds $found"
    fi
    rm -f "$part"
}

seeded_kernels() {
    if ! ls "$here"/images/seeded-bugs.*.ptx >/dev/null 2>&1; then
        skip 'no image of the seeded bugs: the bundle was made without a device tool chain'
        return
    fi
    seeded_kernel racecheck 'Race reported between\|hazard detected' seeded_race_fixed seeded_race
    seeded_kernel synccheck 'Divergent thread(s) in' seeded_divergence_fixed \
        seeded_divergence_of_warps seeded_divergence_in_a_warp
}

run_sanitizers() {
    if [ "$kind" != cuda ]; then
        skip "compute-sanitizer is for CUDA, the device is $device"
        return
    fi
    if ! command -v compute-sanitizer >/dev/null 2>&1; then
        skip 'compute-sanitizer is not in the path (it comes with the CUDA toolkit)'
        return
    fi
    left
    bounded "$seconds_left" "$log" compute-sanitizer --version
    seeded_write
    seeded_kernels
    # Uses a single rank. Under a tool, the kernels of several ranks may run one after another, but
    # kernels that wait for each other must run concurrently.
    for tool in memcheck racecheck synccheck; do
        sanitize "$tool" short_form_of_1_rank
    done
    in_multi_rank_grid grid_sanitizers
    if [ $quick = no ]; then
        for tool in memcheck synccheck; do
            sanitize "$tool" short_form_of_2_ranks
        done
    fi
}

# versus_cuda: compares the kernels with the CUDA C++ baseline and measures the cost of bounded
# waits. Does neither if the bundle has no cubins of the baseline and there is no nvcc.
versus_cuda() {
    case $device in cuda:*) gpu=${device#*:} ;; *) gpu=0 ;; esac
    if [ -z "$(ls "$here/cuda" 2>/dev/null)" ] && [ -z "${FUSEWIRE_NVCC-}" ] &&
        ! command -v nvcc >/dev/null 2>&1 && [ ! -x /usr/local/cuda/bin/nvcc ]; then
        note 'no CUDA C++ baseline: neither cubins in the bundle nor nvcc'
        return
    fi
    few=
    [ $quick = no ] || few='--ranks 2 --sizes 512,64K --types bf16 --tokens 1,16 --rounds 7'
    # shellcheck disable=SC2086 # words
    command_of fusewire-benches versus cuda --gpu "$gpu" $few --out "$out/versus-cuda.md" \
        --json "$out/versus-cuda.json"
    [ "$code" -ne 0 ] || note 'comparison with CUDA C++: versus-cuda.md'
    [ -d "$here/unbounded" ] || return
    few=
    [ $quick = no ] || few='--sizes 512,64K --rounds 7'
    for count in 2 8; do
        [ $quick = no ] || [ $count = 2 ] || continue
        # shellcheck disable=SC2086 # words
        command_of fusewire-benches wait-cost --device cuda --gpu "$gpu" --ranks $count \
            --unbounded "$here/unbounded" $few --out "$out/wait-cost.md"
    done
    [ "$code" -ne 0 ] || note 'cost of bounded waits: wait-cost.md'
}

run_benches() {
    most=64M sizes=4 ranks='2 4 8'
    [ $quick = no ] || { most=64K sizes=8 ranks=2; }
    [ "$kind" != cpu ] || [ $quick = yes ] || { most=4M ranks='2 4'; }
    tables=0
    for count in $ranks; do
        for graph in '' --graph; do
            file=perf-$count${graph:+-graph}
            command_of fusewire perf all --device "$device" --threads --ranks "$count" \
                --max-bytes $most --factor $sizes $graph --json "$out/$file.json"
            [ "$code" -ne 0 ] || tables=$((tables + 1))
        done
    done
    if [ "$device" = cpu ]; then
        command_of fusewire-benches bootstrap --ranks 64
    fi
    note "$tables tables, in perf-*.json and benches.log"
    if [ "$kind" = cuda ]; then
        versus_cuda
    fi
}

# limit_of SECTION: prints the time limit of SECTION in seconds.
limit_of() {
    if [ $quick = yes ]; then
        case $1 in
            files | info) echo 60 ;;
            sanitizers) echo 900 ;;
            *) echo 180 ;;
        esac
    else
        case $1 in
            files | info) echo 60 ;;
            sanitizers | benches) echo 2400 ;;
            failures) echo 300 ;;
            *) echo 1200 ;;
        esac
    fi
}

failures=0
for section in $SECTIONS; do
    log=$out/$section.log
    [ -z "$only" ] || case " $only " in *" $section "*) ;; *) continue ;; esac
    : >"$log"
    result=pass what='' passed=0 sanitizer='' multi_rank_grid=''
    limit=$(limit_of "$section")
    began=$(date +%s)
    "run_$section"
    took=$(($(date +%s) - began))
    if [ $result = skip ] && [ $strict = yes ]; then
        result=FAIL
    fi
    [ $result != FAIL ] || failures=$((failures + 1))
    # Tabs, quotes and backslashes would break the fields of the results.
    what=$(printf '%s' "$what" | tr '\t\n"\\' "  ''")
    printf '%s\t%s\t%s\t%s\n' "$section" "$result" "$took" "$what" >>"$rows"
    printf '%-12s %-6s %5s s  %s\n' "$section" "$result" "$took" "$what"
done

# ---- results -------------------------------------------------------------------------------------

version=$("$programs/bin/fusewire" --version)
commit=$(sed -n 's/^  "commit": "\(.*\)",$/\1/p' "$here/manifest.json" 2>/dev/null)
when=$(date -u +%Y-%m-%dT%H:%M:%SZ)
host=$(uname -srm)
plain=$(printf '%s' "$name" | tr '\t\n"\\' "  ''")
{
    echo "$version, commit ${commit:-unknown}, device $device ($plain)"
    options=$([ $quick = no ] || printf ', --quick')$([ $strict = no ] || printf ', --strict')
    echo "$when, $host$options"
    echo
    printf '%-12s| %-7s| %-8s| %s\n' section result seconds what
    awk -F '\t' '{ printf "%-12s| %-7s| %-8s| %s\n", $1, $2, $3, $4 }' "$rows"
    echo
    if [ $failures -eq 0 ]; then
        echo 'no section failed'
    else
        failed=$(awk -F '\t' '$2 == "FAIL" { printf " %s (%s.log)", $1, $1 }' "$rows")
        echo "$failures sections failed:$failed"
    fi
} >"$out/results.txt"
{
    printf '{"version": "%s", "commit": "%s", "device": "%s", "name": "%s", ' \
        "$version" "${commit:-unknown}" "$device" "$plain"
    printf '"when": "%s", "host": "%s", "quick": "%s", "failed": %s, "sections": [' \
        "$when" "$host" "$quick" "$failures"
    awk -F '\t' '{
        printf "%s\n  {\"section\": \"%s\", ", (NR > 1 ? "," : ""), $1
        printf "\"result\": \"%s\", \"seconds\": %s, \"what\": \"%s\"}", $2, $3, $4
    }' "$rows"
    printf '\n]}\n'
} >"$out/results.json"
rm -f "$rows"
echo
cat "$out/results.txt"
[ $failures -eq 0 ] || exit 1
