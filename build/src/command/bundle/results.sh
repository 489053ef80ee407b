# shellcheck shell=sh
# Writes the page results.md from the tables and files of a run. `run.sh` reads this file. A figure
# that the run has not measured is not on the page: the page states the reason.
# shellcheck disable=SC2154,SC2016 # the variables are those of run.sh; backquotes are Markdown

# is_measured FILE: returns true if this run has written FILE in the results folder.
is_measured() {
    grep -qx "$1" "$measured"
}

# result_of SECTION: prints the result and the details of SECTION, or that it was not selected.
result_of() {
    found=$(awk -F '\t' -v section="$1" '$1 == section { print $2 ": " $4 }' "$rows")
    echo "${found:-not selected by --only}"
}

# sections RESULT: prints the names of the sections with this result, separated by commas.
sections() {
    awk -F '\t' -v result="$1" '
        $2 == result { printf "%s%s", separator, $1; separator = ", " }
        END { if (!separator) printf "none" }' "$rows"
}

# described SECTION: prints what SECTION checks.
described() {
    case $1 in
        files) echo 'hashes of the bundle' ;;
        info) echo 'devices and libraries' ;;
        conformance)
            [ "$quick" = no ] || short='short '
            echo "${short-}conformance list: operations, sizes, types, reductions"
            ;;
        graphs) echo 'captured and replayed graphs' ;;
        failures) echo 'ranks that stop or end' ;;
        bitwise) echo 'bits equal to those of the CPU device' ;;
        multi) echo 'ranks on separate GPUs' ;;
        sanitizers) echo 'compute-sanitizer' ;;
        benches) echo 'measurements on one GPU or on the CPU' ;;
    esac
}

# cell TEXT: prints TEXT as a cell of a Markdown table.
cell() {
    printf '%s' "$1" | sed 's/|/\\|/g'
}

machine_table() {
    names=$(sed -n "s/^  found *$kind *$kind:[0-9]*: //p" "$out/devices.txt" | sort | uniq -c |
        awk '{ count = $1; sub(/^ *[0-9]+ /, ""); printf "%s%d x %s", separator, count, $0
            separator = "; " }')
    echo '| | |'
    echo '|---|---|'
    echo "| version | $version, commit ${commit:-unknown} |"
    echo "| date | $when |"
    echo "| host | $(cell "$host") |"
    echo "| device | \`$device\`: $(cell "${names:-$plain}") |"
    [ "$kind" = cpu ] || echo "| driver | $(cell "$(driver_version)") |"
    echo "| options | $(printf '%s' "--device $device$options${only:+, --only$only}") |"
}

# driver_version: prints the version of the GPU's driver.
driver_version() {
    if [ "$kind" = cuda ] && command -v nvidia-smi >/dev/null 2>&1; then
        timeout -k 5 60 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1 |
            sort -u | head -n 1
    elif [ "$kind" = hip ] && [ -r /sys/module/amdgpu/version ]; then
        cat /sys/module/amdgpu/version
    elif [ "$kind" = cuda ]; then
        echo 'version unknown: nvidia-smi is not in the path'
    else
        echo 'version unknown'
    fi
}

topology() {
    if [ "$kind" = cuda ]; then
        set -- nvidia-smi topo -m
    else
        set -- rocm-smi --showtopo
    fi
    if ! command -v "$1" >/dev/null 2>&1; then
        echo "Unknown: $1 is not in the path."
        return
    fi
    echo '```text'
    # Removes the escape sequences that nvidia-smi uses to underline the header.
    timeout -k 5 60 "$@" 2>&1 | sed "s/$(printf '\033')\\[[0-9;]*m//g"
    echo '```'
}

conformance_part() {
    echo '## Conformance'
    echo
    echo "Passed: $(sections pass). Failed: $(sections FAIL). Skipped: $(sections skip)."
    if [ -n "$only" ]; then
        echo "Other sections were not selected by \`--only\`."
    fi
    echo
    echo '| section | subject | result | tests passed | seconds | details |'
    echo '|---|---|---|---|---|---|'
    while IFS="$(printf '\t')" read -r section result seconds what passed; do
        echo "| $section | $(described "$section") | $result | $passed | $seconds |" \
            "$(cell "$what") |"
    done <"$rows"
    echo
    if [ -s "$skips" ]; then
        echo 'A test that lacks a requirement counts as passed. These tests have skipped cases:'
        echo
        sort -u "$skips" | awk -F '\t' '{ sub(/^skipped /, "", $2); print "- " $1 ": " $2 }'
    else
        echo 'No test has skipped cases.'
    fi
}

several_gpus_part() {
    echo '## Several GPUs'
    echo
    if [ ! -s "$checks" ]; then
        echo "Not tested: $(result_of multi)."
    else
        echo '| check | result | ranks, each on a separate GPU | details |'
        echo '|---|---|---|---|'
        awk -F '\t' '{ print "| " $1 " | " $2 " | " $3 " | " $4 " |" }' "$checks"
    fi
    [ "$kind" != cpu ] || return
    echo
    echo '### Topology'
    echo
    topology
}

# comparison LABEL: prints a table of all_reduce. LABEL is the number of ranks, followed by -graph
# if graphs were replayed.
comparison() {
    set -- ours= "multi-all_reduce-$1" nvls= "multi-nvls-$1" vendor= "multi-$vendor-$1"
    files=
    while [ $# -gt 0 ]; do
        ! is_measured "$2.json" || files="$files which=${1%=} $2.json"
        shift 2
    done
    # The names of the files contain no blanks, and awk runs in their folder.
    # shellcheck disable=SC2086 # words
    (cd "$out" && awk -v library="$library" '
        function value() {
            text = $0
            sub(/^[^:]*: */, "", text)
            gsub(/[",]/, "", text)
            return text
        }
        /"operation":/ { operation = value() }
        /"bytes":/ { bytes = value() }
        /"algorithm":/ { algorithm = value() }
        /"timing":/ { timing = value() }
        /"median_us":/ { median = value() }
        /"wrong":/ && operation == "all_reduce" {
            if (!(bytes in known)) { known[bytes] = 1; sizes[++count] = bytes }
            time[which, bytes] = median
            if (which == "ours") chosen[bytes] = algorithm
            if (value() != 0) time[which, bytes] = "wrong"
        }
        function shown(key) { return (key in time) ? time[key] : "-" }
        END {
            printf "| bytes | Fusewire us | algorithm | Fusewire nvls us "
            print "| " library " us | Fusewire / " library " |"
            print "|---|---|---|---|---|---|"
            for (i = 1; i <= count; i++) {
                bytes = sizes[i]
                ours = shown("ours" SUBSEP bytes); theirs = shown("vendor" SUBSEP bytes)
                ratio = "-"
                if (ours + 0 > 0 && theirs + 0 > 0) ratio = sprintf("%.2f", ours / theirs)
                algorithm = (bytes in chosen) ? chosen[bytes] : "-"
                print "| " bytes " | " ours " | " algorithm " | " shown("nvls" SUBSEP bytes) \
                    " | " theirs " | " ratio " |"
            }
            print ""
            if (timing == "gpu_events") timing = "GPU events around batches of operations"
            print "Timing: " timing "."
        }' $files)
}

vendor_part() {
    case $kind in hip) library=RCCL vendor=rccl ;; *) library=NCCL vendor=nccl ;; esac
    echo "## All-reduce next to $library"
    echo
    if ! grep -q '^multi-all_reduce-' "$measured"; then
        echo "Not measured: $(result_of multi)."
        return
    fi
    echo 'f32, sum, out of place, registered buffers; ranks are processes on separate GPUs. The'
    echo 'times are medians of the slowest rank; `-` means not measured.'
    if [ -z "$(vendor_library)" ]; then
        missing=$(sed -n "s/^  missing *lib$vendor\.so *//p" "$out/devices.txt" | head -n 1)
        echo "$library was not measured: lib$vendor not found (${missing:-not listed})."
    fi
    if ! grep -q '^multi-nvls-' "$measured"; then
        reason=$(grep '^NVLS' "$checks" | cut -f 4 | head -n 1)
        echo "NVLS was not measured: ${reason:-see multi.log}."
    fi
    for count in 2 4 8; do
        for mode in eager graph; do
            label=$count
            [ $mode = eager ] || label=$count-graph
            echo
            echo "### $count ranks, $(
                [ $mode = eager ] && echo 'enqueued calls' || echo 'replays of a graph')"
            echo
            if is_measured "multi-all_reduce-$label.json"; then
                comparison "$label"
            elif [ "$count" -gt "$gpus" ]; then
                echo "Not measured: this machine has $gpus GPUs."
            else
                echo 'Not measured: the command failed, see multi.log.'
            fi
        done
    done
}

baseline_part() {
    echo '## Next to the CUDA C++ baseline'
    echo
    if [ "$kind" != cuda ]; then
        echo "Not measured: the baseline is for CUDA, the device is $device."
    elif is_measured versus-cuda.md; then
        echo 'All ranks share one GPU. `versus-cuda.md` has the conditions and the costs of'
        echo 'barriers and signals.'
        echo
        awk '/^### / { on = !/^### Costs/ } on' "$out/versus-cuda.md"
    elif [ -n "$baseline" ]; then
        echo "Not measured: $baseline."
    else
        echo "Not measured: $(result_of benches)."
    fi
}

results_page() {
    gpu=$(printf '%s' "$plain" | sed "s/^$kind:[0-9]*: //; s/,.*//")
    case $kind in
        cpu) echo '# Fusewire on the CPU' ;;
        *) echo "# Fusewire on $gpu ($gpus in this machine)" ;;
    esac
    echo
    if [ "$failures" -eq 0 ]; then
        echo 'No section failed.'
    else
        echo "$failures sections failed: $(sections FAIL)."
    fi
    echo
    machine_table
    echo
    conformance_part
    echo
    several_gpus_part
    echo
    vendor_part
    echo
    baseline_part
}
