#!/usr/bin/env bash
# Runs the protocols under model checkers and ThreadSanitizer:
#
#   tests/models/run.sh [loom|shuttle|tsan|mutants|quick|all] [FILTER]
#
# `quick` runs loom and shuttle, each model for at most half a second (FUSEWIRE_MODEL_SECONDS).
# `all` runs loom, shuttle and ThreadSanitizer without that limit. `mutants` weakens every memory
# operation of the device API once: a model under loom must fail, or survivors.txt must say why not.
#
# loom and shuttle need only stable Rust. ThreadSanitizer also needs an instrumented standard
# library: Debian's rustc-web cargo-web rust-web-src libclang-rt-22-dev, or rustup's nightly with
# rust-src.
set -euo pipefail
cd "$(dirname "$0")/../.."

checker() {
  RUSTFLAGS="--cfg $1" cargo test --quiet --release -p fusewire-models --test "$1" -- ${2:+"$2"}
}

# Prints the path of the archive with TSan's C runtime, which Debian's Rust packages do not contain.
runtime() {
  local archive
  for archive in /usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.tsan-x86_64.a; do
    if [ -e "$archive" ]; then printf '%s\n' "$archive"; fi
  done | sort -V | tail -n 1
}

tsan() {
  local flags="--cfg tsan -Zsanitizer=thread" archive sources
  archive=$(runtime)
  sources=(/usr/src/rustc-*/library/Cargo.lock)
  if [ -n "$archive" ] && [ -e "${sources[0]}" ]; then
    flags+=" -Zexternal-clangrt -Clink-arg=-Wl,--whole-archive,$archive,--no-whole-archive"
    # GNU ld rejects the symbol versions of this archive, so link with lld.
    flags+=" -Clink-arg=-lm -Clink-arg=-lc -Clink-arg=-fuse-ld=lld"
    flags+=" -Clink-arg=-B${archive%/lib/clang/*}/bin"
    run_tsan "$flags" env PATH="/usr/bin:$PATH" RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1 \
      /usr/bin/cargo
  elif command -v rustup >/dev/null && rustup run nightly rustc --version >/dev/null 2>&1; then
    run_tsan "$flags" rustup run nightly cargo
  else
    echo 'tsan: skipped: apt install rustc-web cargo-web rust-web-src libclang-rt-22-dev'
    echo 'tsan:      or: rustup toolchain install nightly --component rust-src'
    case ",${FUSEWIRE_REQUIRE:-}," in *,tsan,*) return 1 ;; esac
  fi
}

run_tsan() {
  local flags=$1
  shift
  env -u RUSTUP_TOOLCHAIN RUSTFLAGS="$flags" "$@" test --quiet --release \
    -Zbuild-std=std,panic_unwind --target x86_64-unknown-linux-gnu -p fusewire-models --test tsan
}

case "${1:-all}" in
  loom | shuttle) checker "$1" "${2:-}" ;;
  mutants) FUSEWIRE_MUTANTS="${2:-1}" checker loom ;;
  tsan) tsan ;;
  quick)
    export FUSEWIRE_MODEL_SECONDS=0.5
    checker loom
    checker shuttle
    ;;
  all)
    checker loom
    checker shuttle
    tsan
    ;;
  *)
    echo "$0: no checker is named $1: loom, shuttle, tsan, mutants, quick or all" >&2
    exit 2
    ;;
esac
