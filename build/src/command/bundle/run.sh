#!/bin/sh
# Runs Fusewire's tests and benches on a device, from a folder that `fusewire-build bundle` made.
# Needs a shell, coreutils, awk, grep, sed, gzip and, for a GPU, its driver. Exit status: 0 if no
# section failed, 1 if a section failed, 2 for wrong usage or a missing device, 130 if interrupted.
set -u

usage() {
    cat <<'TEXT'
usage: run.sh [--device cpu|cuda|cuda:N|cuda:each|hip|hip:N|hip:each] [--out DIR] [--quick]
              [--strict] [--only SECTION[,SECTION..]]
  --device  device of the ranks; cpu by default. With a number, all ranks share that GPU. With
            `each`, rank r uses GPU r modulo the number of GPUs. With neither, all ranks share the
            first GPU, and the section `multi` uses all GPUs.
  --out     folder for the results; fusewire-results by default
  --quick   runs a selection that takes a few minutes
  --strict  counts a skipped section as a failure
  --only    runs only these of: files info conformance graphs failures bitwise multi sanitizers
            benches
TEXT
}

wrong() {
    echo "run.sh: $1" >&2
    exit 2
}

SECTIONS='files info conformance graphs failures bitwise multi sanitizers benches'
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
            each) ;;
            '' | *[!0-9]*)
                wrong "--device $device: expected a number or \`each\` after the colon"
                ;;
        esac
        ;;
    *) wrong "--device $device: expected cpu, or cuda or hip with or without :N or :each" ;;
esac
kind=${device%%:*}
each=no
[ "$device" != "$kind:each" ] || each=yes
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
case $kind in
    cuda) export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}" ;;
    hip) export GPU_MAX_HW_QUEUES="${GPU_MAX_HW_QUEUES:-16}" ;;
esac

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
# Tables of this run, which the results are made of: the sections, the tests on several GPUs, the
# reasons of skipped tests, and the names of the files that this run has measured.
rows=$out/.rows checks=$out/.checks skips=$out/.skips measured=$out/.measured
for table in "$rows" "$checks" "$skips" "$measured"; do
    { : >"$table"; } 2>/dev/null || wrong "--out $out cannot be written"
done

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

# If the device is missing, the script stops here with one line of output. `info` loads all kernels.
# Without cubins, the driver compiles their PTX the first time, which took 60 s on an H100 machine.
section=info
: >"$out/devices.txt"
bounded 300 "$out/devices.txt" "$programs/bin/fusewire" info
code=$?
[ $code -eq 0 ] || {
    last=$(tail -n 1 "$out/devices.txt")
    wrong "bin/fusewire does not run here (status $code): $last; README.txt lists what it needs"
}
line=$(grep -E "^  (found  |missing)  $kind " "$out/devices.txt" |
    case $device in
        "$kind" | "$kind:each") cat ;;
        *) grep -E " $device: |missing" ;;
    esac | head -n 1)
name=$(echo "$line" | sed -E "s/^  (found|missing) +$kind +//")
case $line in
    '  found'*) ;;
    '') wrong "--device $device: no such device; bin/fusewire info lists the devices" ;;
    *) wrong "--device $device: $name" ;;
esac
# Number of GPUs of the device's kind.
gpus=$(grep -cE "^  found +$kind +$kind:[0-9]+: " "$out/devices.txt")
[ $each = no ] || [ "$gpus" -ge 2 ] ||
    wrong "--device $device: this machine has $gpus GPU; ranks on separate GPUs need at least 2"

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
    grep -o 'skipped ([a-z-]*): .*' "$part" | sort -u | sed "s/^/$section	/" >>"$skips"
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

# in_multi_rank_grid COMMAND..: runs COMMAND with its ranks in a multi-rank grid on one GPU, if the
# bundle has the images.
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
    outer=$FUSEWIRE_TEST_DEVICE
    [ $each = no ] || FUSEWIRE_TEST_DEVICE=$kind
    "$@"
    FUSEWIRE_TEST_DEVICE=$outer
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
            tests moe 30
        else
            # lanes_as_threads needs the CPU device. One GPU has too few hardware queues for the
            # ranks of every_number_of_ranks (16) and many_ranks (130).
            tests conformance 6 --skip lanes_as_threads --skip every_number_of_ranks \
                --skip many_ranks --skip ranks_as_processes
            tests moe 25 --skip lanes_as_threads --skip every_number_of_ranks \
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
    # Ranks on separate GPUs are tested by other sections.
    [ $each = no ] || FUSEWIRE_TEST_DEVICE=$kind
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
    case $device in cuda:[0-9]*) gpu=${device#*:} ;; *) gpu=0 ;; esac
    if [ -z "$(ls "$here/cuda" 2>/dev/null)" ] && [ -z "${FUSEWIRE_NVCC-}" ] &&
        ! command -v nvcc >/dev/null 2>&1 && [ ! -x /usr/local/cuda/bin/nvcc ]; then
        baseline='neither cubins in the bundle nor nvcc'
        note "no CUDA C++ baseline: $baseline"
        return
    fi
    # The program adds its tables to those that the file contains.
    rm -f "$out/versus-cuda.md" "$out/wait-cost.md"
    few=
    if [ $quick = yes ]; then
        few='--ranks 2 --sizes 512,64K --types bf16 --tokens 1,16 --rounds 7'
        few="$few --moe-tokens 1,64 --moe-hidden 2048"
    fi
    # shellcheck disable=SC2086 # words
    command_of fusewire-benches versus cuda --gpu "$gpu" $few --out "$out/versus-cuda.md" \
        --json "$out/versus-cuda.json"
    if [ "$code" -eq 0 ]; then
        echo versus-cuda.md >>"$measured"
        note 'comparison with CUDA C++: versus-cuda.md'
    else
        baseline="bin/fusewire-benches failed with status $code, see benches.log"
    fi
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

# perf FILE RANKS ARGUMENTS..: runs `fusewire perf ARGUMENTS` with RANKS ranks, and writes its rows
# to FILE.json. Ranks that share a GPU are threads, ranks on separate GPUs are processes.
perf() {
    file=$1 count=$2
    shift 2
    if [ $each = yes ] || [ "$section" = multi ]; then
        set -- "$@" --device "$kind"
    else
        set -- "$@" --device "$device" --threads
    fi
    command_of fusewire perf "$@" --ranks "$count" --json "$out/$file.json"
    [ "$code" -ne 0 ] || echo "$file.json" >>"$measured"
}

run_benches() {
    most=64M sizes=4 ranks='2 4 8'
    [ $quick = no ] || { most=64K sizes=8 ranks=2; }
    [ "$kind" != cpu ] || [ $quick = yes ] || { most=4M ranks='2 4'; }
    tables=0
    for count in $ranks; do
        [ $each = no ] || [ "$count" -le "$gpus" ] || continue
        for graph in '' --graph; do
            # shellcheck disable=SC2086 # words
            perf "perf-$count${graph:+-graph}" "$count" all --max-bytes $most --factor $sizes $graph
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

# Tests of the section `multi`, each with its description in the results.
MULTI='
every_rank_has_its_own_gpu                       each rank has a GPU, as threads and processes
short_form_as_threads                            conformance (short list), threads
short_form_as_processes                          conformance (short list), processes
nvls_as_threads                                  NVLS, threads
nvls_as_processes                                NVLS, processes
memory_of_the_driver_is_registered_as_threads    registered memory of cuMemAlloc, threads
memory_of_the_driver_is_registered_as_processes  registered memory of cuMemAlloc, processes
a_rank_that_never_launches_is_named              failure: a rank never launches, threads
a_process_that_is_killed_is_named                failure: a process is killed, processes
'

# multi_tests: runs the tests in MULTI on separate GPUs, and adds the result of each to the table of
# checks. Sets `multicast` to no if a test was skipped because a GPU has no multicast.
multi_tests() {
    multicast=yes
    for test in $(echo "$MULTI" | awk 'NF { print $1 }'); do
        before=$result text=$what lines=$(wc -l <"$log")
        result=pass what=''
        exactly on_device "several_gpus::$test"
        one=$result why=$what
        said=$(tail -n "+$((lines + 1))" "$log")
        skipped=$(echo "$said" | sed -n 's/.*skipped (\([a-z-]*\)): \(.*\)/\1 \2/p' | head -n 1)
        over=$(echo "$said" | sed -n 's/.*ranks on separate GPUs: \[\(.*\)\].*/\1/p' | head -n 1)
        result=$before what=$text
        if [ "$one" = FAIL ]; then
            fail "$why"
        elif [ -n "$skipped" ]; then
            one=skip why=${skipped#* }
            case $skipped in multicast*) multicast=no ;; esac
            passed=$((passed - 1))
            note "$test skipped: $why"
            [ $strict = no ] || fail '--strict requires it'
        fi
        described=$(echo "$MULTI" | sed -n "s/^$test  *//p")
        printf '%s\t%s\t%s\t%s\n' "$described" "$one" "${over:--}" \
            "$(printf '%s' "$why" | tr '\t\n' '  ')" >>"$checks"
    done
}

# vendor_library: prints the backend of the GPU vendor's library if `fusewire info` has found it.
vendor_library() {
    case $kind in cuda) vendor=nccl ;; *) vendor=rccl ;; esac
    ! grep -qE "^  found +lib$vendor\.so " "$out/devices.txt" || echo $vendor
}

run_multi() {
    if [ "$kind" = cpu ]; then
        skip "ranks on separate GPUs need --device cuda or hip, the device is $device"
        return
    fi
    case $device in
        *:[0-9]*)
            skip "--device $device selects one GPU; --device $kind uses all"
            return
            ;;
    esac
    if [ "$gpus" -lt 2 ]; then
        skip "ranks on separate GPUs need 2 GPUs, this machine has $gpus"
        return
    fi
    FUSEWIRE_TEST_DEVICE=$kind:each
    multi_tests
    note "$passed tests passed on up to $gpus GPUs"

    most=64M sizes=4
    [ $quick = no ] || { most=64K sizes=8; }
    vendor=$(vendor_library)
    tables=0
    for count in 2 4 8; do
        [ "$count" -le "$gpus" ] || continue
        perf "multi-$count" "$count" all --max-bytes $most --factor $sizes
        [ "$code" -ne 0 ] || tables=$((tables + 1))
        # Measures the same sizes with all algorithms and libraries, close together in time.
        for graph in '' --graph; do
            label=$count${graph:+-graph}
            # shellcheck disable=SC2086 # words
            perf "multi-all_reduce-$label" "$count" all_reduce --max-bytes $most --factor $sizes \
                $graph
            [ "$code" -ne 0 ] || tables=$((tables + 1))
            if [ $multicast = yes ]; then
                # shellcheck disable=SC2086 # words
                perf "multi-nvls-$label" "$count" all_reduce --algorithm nvls --max-bytes $most \
                    --factor $sizes $graph
                [ "$code" -ne 0 ] || tables=$((tables + 1))
            fi
            if [ -n "$vendor" ]; then
                # shellcheck disable=SC2086 # words
                perf "multi-$vendor-$label" "$count" all_reduce --backend "$vendor" \
                    --max-bytes $most --factor $sizes $graph
                [ "$code" -ne 0 ] || tables=$((tables + 1))
            fi
        done
    done
    note "$tables tables, in multi-*.json and multi.log"
}

# limit_of SECTION: prints the time limit of SECTION in seconds. The limits of conformance,
# sanitizers and benches include the first load of images that `info` does not load: the multi-rank
# grid, whose PTX is as large as that of all other kernels, and the kernels with unbounded waits.
limit_of() {
    if [ $quick = yes ]; then
        case $1 in
            files | info) echo 60 ;;
            sanitizers) echo 900 ;;
            multi) echo 600 ;;
            conformance | benches) echo 360 ;;
            *) echo 180 ;;
        esac
    else
        case $1 in
            files | info) echo 60 ;;
            sanitizers | benches | multi) echo 2400 ;;
            failures) echo 300 ;;
            *) echo 1200 ;;
        esac
    fi
}

failures=0 baseline=''
for section in $SECTIONS; do
    log=$out/$section.log
    [ -z "$only" ] || case " $only " in *" $section "*) ;; *) continue ;; esac
    : >"$log"
    result=pass what='' passed=0 sanitizer='' multi_rank_grid=''
    FUSEWIRE_TEST_DEVICE=$device
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
    printf '%s\t%s\t%s\t%s\t%s\n' "$section" "$result" "$took" "$what" "$passed" >>"$rows"
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
        printf "\"result\": \"%s\", \"seconds\": %s, ", $2, $3
        printf "\"tests\": %s, \"what\": \"%s\"}", $5, $4
    }' "$rows"
    printf '\n]}\n'
} >"$out/results.json"
. "$here/results.sh"
results_page >"$out/results.md"
rm -f "$rows" "$checks" "$skips" "$measured"
echo
cat "$out/results.txt"
[ $failures -eq 0 ] || exit 1
